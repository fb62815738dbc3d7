# SPDX-License-Identifier: Apache-2.0
"""Writes tokens with a language model: prefill of unequal prompts, single steps, and the loop.

How a token is chosen is in ``sampling``; how text is cut is in ``text``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from statescan.errors import ArgumentError, DtypeError
from statescan.generation.sampling import GREEDY, Sampler, SamplingConfig
from statescan.generation.text import TextStream
from statescan.models.lm import MambaLM
from statescan.models.tokenizer import Tokenizer
from statescan.nn import InferenceCache

PREFILL_CHUNK = 2048
"""Tokens of a prompt that go through the model at once, which bounds memory for long prompts."""

Prompts = Tensor | Sequence[Tensor | Sequence[int]]
TokenCallback = Callable[[int, int], object]


@dataclass(frozen=True)
class GenerationOutput:
    """What ``generate`` wrote, row by row.

    Attributes:
        prompts: Tokens of each prompt.
        tokens: New tokens of each row, with the one that ended it.
        finish_reasons: "length", "eos" or "stop" for each row.
        texts: New text of each row without its stop string; None without a tokenizer.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    finish_reasons: list[str]
    texts: list[str] | None = None

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and new tokens of each row."""
        return [prompt + new for prompt, new in zip(self.prompts, self.tokens, strict=True)]


@torch.no_grad()
def prefill(
    model: MambaLM,
    prompts: Prompts,
    *,
    cache: InferenceCache | None = None,
    chunk_size: int = PREFILL_CHUNK,
) -> tuple[Tensor, InferenceCache]:
    """Read prompts; ``cache``, if given, is continued and updated in place.

    Shorter prompts are padded on the left; padding never reaches a state, so that every row gets
    what it would get alone.

    Returns:
        Logits (batch, padded vocabulary) of each row's next token, and the cache.
    """
    rows = _token_lists(prompts)
    if chunk_size < 1:
        raise ArgumentError(
            f"prefill: got chunk_size={chunk_size}.\n"
            "It must be at least 1.\n"
            f"Leave it out for {PREFILL_CHUNK}."
        )
    if cache is None:
        cache = model.allocate_inference_cache(len(rows))
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    ids = [[0] * pad + row for pad, row in zip(padding, rows, strict=True)]
    input_ids = torch.tensor(ids, dtype=torch.long, device=model.device)
    seq_idx = None
    if any(padding):
        marks = [[-1] * pad + [0] * len(row) for pad, row in zip(padding, rows, strict=True)]
        seq_idx = torch.tensor(marks, dtype=torch.int32, device=model.device)
    logits = None
    for start in range(0, longest, chunk_size):
        part = slice(start, start + chunk_size)
        marks_part = None if seq_idx is None else seq_idx[:, part]
        logits = model(
            input_ids[:, part], cache=cache, num_last_tokens=1, seq_idx=marks_part
        ).logits
    assert logits is not None
    return logits[:, -1], cache


@torch.no_grad()
def decode_one_token(model: MambaLM, tokens: Tensor, cache: InferenceCache) -> Tensor:
    """Logits (batch, padded vocabulary) after tokens (batch,); ``cache`` is updated in place."""
    logits: Tensor = model(tokens.to(model.device).unsqueeze(1), cache=cache).logits
    return logits[:, -1]


def generate(
    model: MambaLM,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    sampling: SamplingConfig | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    stop: str | Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    on_token: TokenCallback | None = None,
) -> GenerationOutput:
    """Continue each prompt until it ends itself or has ``max_new_tokens`` new tokens.

    Args:
        model: In evaluation mode, on any device.
        prompts: (batch, seqlen) tensor, or a list of prompts of any lengths (1-D tensors or lists).
        max_new_tokens: Most new tokens of a row.
        sampling: How to choose; None takes the most likely token.
        eos_token_id: Token, or tokens, that end a row.
        stop: String, or strings, that end a row wherever they appear in its new text.
        tokenizer: Needed for ``stop``, and for the output's ``texts``.
        on_token: Called with (row, token) for every new token, as soon as it is known.

    Returns:
        ``GenerationOutput``.
    """
    rows = _token_lists(prompts)
    streams = _text_streams(len(rows), stop, tokenizer)
    eos = _eos_tokens(eos_token_id)
    output = GenerationOutput(
        rows, [[] for _ in rows], ["length"] * len(rows), None if streams is None else []
    )
    texts = [""] * len(rows)
    finished = [False] * len(rows)
    for tokens in _tokens(model, rows, max_new_tokens, sampling or GREEDY):
        for row, token in enumerate(tokens):
            if finished[row]:
                continue
            output.tokens[row].append(token)
            if on_token is not None:
                on_token(row, token)
            if token in eos:
                finished[row], output.finish_reasons[row] = True, "eos"
            elif streams is not None:
                texts[row] += streams[row].feed(token)
                if streams[row].stopped:
                    finished[row], output.finish_reasons[row] = True, "stop"
        if all(finished):
            break
    if streams is not None and output.texts is not None:
        output.texts.extend(
            text + stream.flush() for text, stream in zip(texts, streams, strict=True)
        )
    return output


def stream(
    model: MambaLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 256,
    *,
    sampling: SamplingConfig | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    stop: str | Sequence[str] = (),
) -> Iterator[str]:
    """Yield the continuation of ``prompt`` piece by piece, as soon as each piece is certain.

    Pieces are whole characters, and never part of a stop string. Arguments as in ``generate``.
    """
    rows = _token_lists([tokenizer.encode(prompt)])
    text = TextStream(tokenizer.decoder(), stop)
    eos = _eos_tokens(eos_token_id)
    return _pieces(text, eos, _tokens(model, rows, max_new_tokens, sampling or GREEDY))


def _pieces(text: TextStream, eos: frozenset[int], steps: Iterator[list[int]]) -> Iterator[str]:
    for (token,) in steps:
        if token in eos:
            break
        piece = text.feed(token)
        if piece:
            yield piece
        if text.stopped:
            return
    rest = text.flush()
    if rest:
        yield rest


def _tokens(
    model: MambaLM, prompts: list[list[int]], max_new_tokens: int, sampling: SamplingConfig
) -> Iterator[list[int]]:
    """One list of tokens, one a row, for each step; no step runs that nobody asks for."""
    if max_new_tokens < 0:
        raise ArgumentError(
            f"generate: got max_new_tokens={max_new_tokens}.\n"
            "It must be 0 or more.\n"
            "Give the most tokens that may be written."
        )
    sampler = Sampler(sampling, prompts, model.config.vocab_size)
    if max_new_tokens == 0:
        return
    logits, cache = prefill(model, prompts)
    for step in range(max_new_tokens):
        tokens = sampler.sample(logits)
        yield tokens.tolist()
        if step + 1 < max_new_tokens:
            logits = decode_one_token(model, tokens, cache)


def _text_streams(
    rows: int, stop: str | Sequence[str], tokenizer: Tokenizer | None
) -> list[TextStream] | None:
    if tokenizer is not None:
        return [TextStream(tokenizer.decoder(), stop) for _ in range(rows)]
    if stop:
        raise ArgumentError(
            f"generate: got stop={stop!r} and no tokenizer.\n"
            "Stop strings are looked for in text, which needs the model's tokenizer.\n"
            "Pass tokenizer=, or end on tokens with eos_token_id=."
        )
    return None


def _eos_tokens(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    return frozenset((eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id)


def _token_lists(prompts: Prompts) -> list[list[int]]:
    """Every accepted form of prompts as lists; refuses empty ones."""
    rows: list[list[int]] = []
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise DtypeError(
                "generate: the prompts hold a string.\n"
                "Prompts are tokens.\n"
                "Use tokenizer.encode(text), or stream(model, tokenizer, text)."
            )
        values = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        if not values or isinstance(values[0], list):
            raise ArgumentError(
                f"generate: prompt {row} has {'no tokens' if not values else 'too many axes'}.\n"
                "Each prompt must be a list of at least one token.\n"
                "Begin with a token that stands for the start, such as a newline."
            )
        rows.append([int(value) for value in values])
    if not rows:
        raise ArgumentError(
            "generate: there are no prompts.\nIt needs at least one.\nPass a list of prompts."
        )
    return rows
