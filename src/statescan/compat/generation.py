# SPDX-License-Identifier: Apache-2.0
"""``generate`` and its parts under mamba_ssm's names: states, sampling, the loop, CUDA graphs.

The native way to write text is ``statescan.generation``, which also takes unequal prompts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from statescan.errors import ArgumentError


@dataclass
class InferenceParams:
    """The states of a model between two calls, and how many tokens they have seen.

    Attributes:
        max_seqlen, max_batch_size: Largest sizes that are going to be used.
        seqlen_offset: Tokens seen so far; at 0 states start from zero.
        batch_size_offset: First row of the states that a call uses.
        key_value_memory_dict: States by layer.
        lengths_per_sample: (batch,) tokens seen by each row, for programs that keep them.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin anew; the states' memory is kept."""
        self.max_seqlen, self.max_batch_size = max_seqlen, max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclass
class GenerateOutput:
    """sequences (batch, length), and scores: one (batch, vocabulary) for each new token."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None

    def __getitem__(self, key: str | int) -> Any:
        """By name, or by place among the fields that are there."""
        if isinstance(key, str):
            return getattr(self, key)
        return [value for value in (self.sequences, self.scores) if value is not None][key]


def modify_logits_for_min_p_filtering(logits: Tensor, min_p: float) -> None:
    """Set logits to -inf, in place, whose probability is below min_p times the row's largest."""
    if 0.0 < min_p < 1.0:
        probabilities = logits.softmax(dim=-1)
        least = probabilities.amax(dim=-1, keepdim=True) * min_p
        logits.masked_fill_(probabilities < least, float("-inf"))


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set all but the ``top_k`` largest logits of each row to -inf, in place."""
    least = torch.topk(logits, min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    logits.masked_fill_(logits < least, float("-inf"))


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Set the least likely logits to -inf, in place, that together have less than 1 - top_p."""
    if 0.0 < top_p < 1.0:
        ordered, places = torch.sort(logits, dim=-1)
        dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        logits.masked_fill_(dropped.scatter(-1, places, dropped), float("-inf"))


def modify_logit_for_repetition_penalty(
    logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = 1.0
) -> Tensor:
    """Make tokens that came before less likely, in place; returns logits."""
    if repetition_penalty != 1.0:
        scores = logits.gather(-1, prev_output_tokens)
        weaker = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
        logits.scatter_(-1, prev_output_tokens, weaker)
    return logits


def sample(
    logits: Tensor,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """One token (batch,) from logits (batch, vocabulary), which stay as they are.

    ``top_k`` 1 takes the most likely, 0 does not limit; then ``top_p``, and ``min_p``: at least
    that share of the most likely token's probability, row by row.
    """
    if top_k == 1:
        return logits.argmax(dim=-1)
    if not 0.0 <= top_p <= 1.0 or temperature <= 0.0:
        raise ArgumentError(
            f"sample: got top_p={top_p}, temperature={temperature}.\n"
            "top_p must be from 0 to 1 (0 and 1 do not limit), temperature above 0.\n"
            "Use top_k=1 for the most likely token."
        )
    scaled = logits / temperature
    if top_k > 0:
        modify_logits_for_top_k_filtering(scaled, top_k)
    modify_logits_for_top_p_filtering(scaled, top_p)
    modify_logits_for_min_p_filtering(scaled, min_p)
    drawn: Tensor = torch.multinomial(scaled.softmax(dim=-1), num_samples=1).squeeze(-1)
    return drawn


@torch.no_grad()
def decode(
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    cg: bool = False,
    enable_timing: bool = False,
    output_scores: bool = False,
    streamer: Any = None,
) -> GenerateOutput:
    """Continue input_ids (batch, seqlen) until max_length tokens, or until all rows end.

    All rows have one length; ``statescan.generation.generate`` takes unequal prompts.

    Args:
        input_ids: The prompts.
        model: Called as ``MambaLMHeadModel`` is.
        max_length: Of prompt and new tokens together.
        top_k, top_p, min_p, temperature: As ``sample`` takes them.
        repetition_penalty: As ``modify_logit_for_repetition_penalty`` takes it.
        eos_token_id: Stop once every row has written it last.
        teacher_outputs: (batch, length) tokens to take instead of sampled ones, where it reaches.
        vocab_size: Logits beyond it are cut off.
        cg: Replay each step as a CUDA graph; without CUDA it is said that nothing changes.
        enable_timing: Print how long it took.
        output_scores: Keep the logits of each step.
        streamer: Its ``put`` gets the prompt and every new token, its ``end`` the end.
    """
    began = time.perf_counter()
    if streamer is not None:
        streamer.put(input_ids.cpu())
    graphs = cg and _can_capture(input_ids)
    batch, seqlen = input_ids.shape
    if graphs:
        cache = getattr(model, "_decoding_cache", None)
        model._decoding_cache = update_graph_cache(model, cache, batch, seqlen, max_length)
        params = model._decoding_cache.inference_params
        params.reset(max_length, batch)
    else:
        params = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
    tokens, scores = [input_ids], []
    while not _should_stop(tokens[-1], params, eos_token_id, max_length):
        logits = _next_logits(model, tokens[-1], params, graphs)[..., :vocab_size]
        if output_scores:
            scores.append(logits.clone())
        params.seqlen_offset += tokens[-1].shape[1]
        seen = params.seqlen_offset
        if repetition_penalty != 1.0:
            before = torch.cat(tokens, dim=1)
            logits = modify_logit_for_repetition_penalty(logits, before, repetition_penalty)
        if teacher_outputs is not None and seen < teacher_outputs.shape[1]:
            chosen = teacher_outputs[:, seen]
        else:
            chosen = sample(logits, top_k, top_p, min_p, temperature)
        tokens.append(chosen.unsqueeze(1))
        if streamer is not None:
            streamer.put(tokens[-1].cpu())
    if streamer is not None:
        streamer.end()
    if enable_timing:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        spent = (time.perf_counter() - began) * 1000
        print(f"Prompt processing + decoding time: {spent:.0f}ms")  # noqa: T201
    return GenerateOutput(torch.cat(tokens, dim=1), tuple(scores))


class GenerationMixin:
    """``generate`` for models that are called as ``MambaLMHeadModel`` is."""

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Any:
        """Empty states of every layer; the model must say how."""
        raise NotImplementedError(
            f"{type(self).__name__} has no allocate_inference_cache, which CUDA graphs need"
        )

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Tensor | GenerateOutput:
        """``decode`` with this model; the tokens, or with the flag sequences and scores."""
        output = decode(
            *(input_ids, self, max_length, top_k, top_p, min_p, temperature),
            output_scores=output_scores,
            **kwargs,
        )
        if not output_scores:
            output.scores = None
        return output if return_dict_in_generate else output.sequences


@dataclass
class DecodingCGCache:
    """Graphs of decode steps by (batch, tokens), with the states that they were captured on."""

    max_batch_size: int = 0
    max_seqlen: int = 0
    device: torch.device | None = field(default=None, init=False)
    dtype: torch.dtype | None = field(default=None, init=False)
    callables: dict[tuple[int, int], Callable[..., Tensor]] = field(default_factory=dict)
    mempool: Any = field(default=None, init=False)
    inference_params: InferenceParams | None = None
    run: Callable[..., Tensor] | None = None


@torch.no_grad()
def update_graph_cache(
    model: Any,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Sequence[int] = (1,),
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """A cache with graphs for this batch; states and graphs are made anew if they are too small."""
    cache = DecodingCGCache() if cache is None else cache
    example = next(iter(model.parameters()))
    dtype = example.dtype if dtype is None else dtype
    too_small = batch_size > cache.max_batch_size or max_seqlen > cache.max_seqlen
    if too_small or (example.device, dtype) != (cache.device, cache.dtype):
        cache.callables, cache.mempool, cache.inference_params = {}, None, None
        cache.device, cache.dtype = example.device, dtype
        cache.max_batch_size, cache.max_seqlen = batch_size, max_seqlen
        cache.inference_params = InferenceParams(
            max_seqlen,
            batch_size,
            seqlen_og,
            key_value_memory_dict=model.allocate_inference_cache(batch_size, max_seqlen, dtype),
            lengths_per_sample=torch.full(
                (batch_size,), seqlen_og, dtype=torch.int32, device=example.device
            ),
        )
        cache.mempool = torch.cuda.graph_pool_handle()
    params = cache.inference_params
    assert params is not None
    for tokens in decoding_seqlens:
        if (batch_size, tokens) not in cache.callables:
            cache.callables[batch_size, tokens] = capture_graph(
                *(model, params, batch_size, max_seqlen, tokens, cache.mempool, n_warmups)
            )
    callables = cache.callables
    cache.run = lambda ids, positions, seqlen: callables[tuple(ids.shape[:2])](
        ids, positions, seqlen
    )
    params.seqlen_offset = 0
    return cache


def capture_graph(
    model: Any,
    inference_params: InferenceParams,
    batch_size: int,
    max_seqlen: int,
    decoding_seqlen: int = 1,
    mempool: Any = None,
    n_warmups: int = 2,
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Capture one decode step; returns a function of (input_ids, position_ids, seqlen)."""
    device = next(iter(model.parameters())).device
    shape = (batch_size, decoding_seqlen)
    input_ids = torch.zeros(shape, dtype=torch.long, device=device)
    position_ids = torch.zeros(shape, dtype=torch.long, device=device)
    offset = inference_params.seqlen_offset
    inference_params.seqlen_offset = max(max_seqlen - decoding_seqlen, 1)

    def step() -> Tensor:
        logits: Tensor = model(
            input_ids,
            position_ids=position_ids,
            inference_params=inference_params,
            num_last_tokens=decoding_seqlen,
        ).logits
        return logits

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(max(n_warmups, 1)):
            step()
        side.synchronize()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=mempool):
        captured = step()
    inference_params.seqlen_offset = offset

    def run(new_input_ids: Tensor, new_position_ids: Tensor, seqlen: int) -> Tensor:
        if inference_params.lengths_per_sample is not None:
            inference_params.lengths_per_sample.fill_(seqlen)
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        graph.replay()
        return captured.clone()

    return run


def _can_capture(input_ids: Tensor) -> bool:
    if not input_ids.is_cuda:
        warnings.warn(
            f"generate: cg=True changes nothing on {input_ids.device.type}; "
            "CUDA graphs are for CUDA devices.",
            stacklevel=4,
        )
    return input_ids.is_cuda


def _should_stop(
    last: Tensor, params: InferenceParams, eos_token_id: int | None, max_length: int
) -> bool:
    if params.seqlen_offset == 0:
        return False
    if eos_token_id is not None and bool((last == eos_token_id).all()):
        return True
    return params.seqlen_offset >= max_length - 1


def _next_logits(model: Any, tokens: Tensor, params: InferenceParams, graphs: bool) -> Tensor:
    """(batch, vocabulary) after the given tokens, the whole prompt or one a row."""
    if params.seqlen_offset == 0:
        output = model(tokens, position_ids=None, inference_params=params, num_last_tokens=1)
        return output.logits.squeeze(1)  # type: ignore[no-any-return]
    positions = torch.full_like(tokens, params.seqlen_offset, dtype=torch.long)
    if graphs:
        return model._decoding_cache.run(tokens, positions, params.seqlen_offset).squeeze(1)  # type: ignore[no-any-return]
    output = model(tokens, position_ids=positions, inference_params=params, num_last_tokens=1)
    return output.logits.squeeze(1)  # type: ignore[no-any-return]
