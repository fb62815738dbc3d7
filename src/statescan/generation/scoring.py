# SPDX-License-Identifier: Apache-2.0
"""How likely a model finds given text: sums of log probabilities, in batches by length.

Choosing tokens is in ``sampling``; the names that lm-evaluation-harness uses are in ``harness``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from statescan.errors import ArgumentError
from statescan.generation.generate import PREFILL_CHUNK
from statescan.models.lm import MambaLM
from statescan.models.tokenizer import Tokenizer

_SCORED_AT_ONCE = 1 << 22
"""Logits that exist at a time: 16 MiB in float32, 83 positions of a vocabulary of 50280."""


class Request(NamedTuple):
    """Tokens to score, and at least one token that they follow."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """Log of the continuation's probability, and whether greedy decoding would write it."""

    logprob: float
    is_greedy: bool


@torch.no_grad()
def score(
    model: MambaLM,
    requests: Sequence[Request],
    *,
    batch_size: int = 16,
    max_length: int | None = None,
    chunk_size: int = PREFILL_CHUNK,
) -> list[Score]:
    """Score each continuation given its context; the result does not depend on the batch.

    Args:
        model: In evaluation mode, on any device.
        requests: Of any lengths; an empty continuation scores 0.
        batch_size: Rows of similar length that run together.
        max_length: Most tokens that the model sees at once. Longer contexts lose their oldest
            tokens; longer continuations are scored in windows (see ``windows``). None reads
            everything, which a recurrent model can, since its states do not grow.
        chunk_size: Tokens of a row that go through the model at once, which bounds memory.
    """
    for name, value in (("batch_size", batch_size), ("chunk_size", chunk_size)):
        if value < 1:
            raise ArgumentError(
                f"score: got {name}={value}.\nIt must be at least 1.\nLeave it out."
            )
    pieces = [
        (number, window)
        for number, request in enumerate(requests)
        for window in windows(request, max_length)
    ]
    # Neighbours have similar lengths, so that little of a batch is padding; the longest come
    # first, so that too large a batch fails at once.
    pieces.sort(key=lambda piece: -len(piece[1].context) - len(piece[1].continuation))
    logprobs, greedy = [0.0] * len(requests), [True] * len(requests)
    for start in range(0, len(pieces), batch_size):
        batch = pieces[start : start + batch_size]
        found = _score_batch(model, [window for _, window in batch], chunk_size)
        for (number, _), part in zip(batch, found, strict=True):
            logprobs[number] += part.logprob
            greedy[number] = greedy[number] and part.is_greedy
    return [Score(*pair) for pair in zip(logprobs, greedy, strict=True)]


def windows(request: Request, max_length: int | None) -> list[Request]:
    """Cut a request so that the model never sees more than ``max_length`` tokens.

    Every token of the continuation is predicted once, and after as many tokens as fit.
    """
    context, continuation = list(request.context), list(request.continuation)
    if not context:
        raise ArgumentError(
            "score: a request has an empty context.\n"
            "The first token to score must follow something.\n"
            "Begin with a token that stands for the start, such as a newline."
        )
    if max_length is None:
        return [Request(context, continuation)] if continuation else []
    if max_length < 1:
        raise ArgumentError(
            f"score: got max_length={max_length}.\n"
            "It must be at least 1 token.\n"
            "Pass None to read everything."
        )
    tokens, cut = context + continuation, []
    for start in range(len(context), len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        # The last token of a window is predicted and never read.
        first = max(0, end - 1 - max_length)
        cut.append(Request(tokens[first:start], tokens[start:end]))
    return cut


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, prefix_token: int
) -> Request:
    """Tokens of a context and what follows it, as they are in the text of both together.

    Spaces between the two belong to the continuation, since tokenizers join a space to the word
    after it. An empty context is ``prefix_token`` alone.
    """
    bare = context.rstrip()
    continuation, context = context[len(bare) :] + continuation, bare
    if not context:
        return Request([prefix_token], tokenizer.encode(continuation))
    size = len(tokenizer.encode(context))
    whole = tokenizer.encode(context + continuation)
    return Request(whole[:size], whole[size:])


def _score_batch(model: MambaLM, batch: Sequence[Request], chunk_size: int) -> list[Score]:
    """Score rows together: padding on the right comes after all that counts in its row."""
    read = [[*request.context, *request.continuation][:-1] for request in batch]
    longest = max(len(row) for row in read)
    device = model.device
    ids = [row + [0] * (longest - len(row)) for row in read]
    input_ids = torch.tensor(ids, dtype=torch.long, device=device)
    # Position t predicts token t + 1: -1 marks positions whose prediction is not asked for.
    targets = torch.full_like(input_ids, -1)
    for row, request in enumerate(batch):
        start, size = len(request.context) - 1, len(request.continuation)
        targets[row, start : start + size] = torch.tensor(list(request.continuation), device=device)
    logprobs = torch.zeros(len(batch), dtype=torch.float64)
    misses = torch.zeros(len(batch), dtype=torch.long)
    cache = model.allocate_inference_cache(len(batch)) if longest > chunk_size else None
    for begin in range(0, longest, chunk_size):
        part = slice(begin, begin + chunk_size)
        hidden_states = model.backbone(input_ids[:, part], cache)
        rows, positions = (targets[:, part] >= 0).nonzero(as_tuple=True)
        wanted = targets[:, part][rows, positions]
        found, hit = _token_logprobs(model, hidden_states[rows, positions], wanted)
        logprobs.index_add_(0, rows.cpu(), found.double().cpu())
        misses.index_add_(0, rows.cpu(), (~hit).long().cpu())
    return [Score(float(p), int(m) == 0) for p, m in zip(logprobs, misses, strict=True)]


def _token_logprobs(
    model: MambaLM, hidden_states: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Log probability of each target, and whether it is the most likely token.

    Only these positions go through the head: of a multiple-choice task that is a small part.
    """
    vocab_size = model.config.vocab_size
    logprobs, hits = [], []
    size = max(1, _SCORED_AT_ONCE // vocab_size)
    for hidden, target in zip(hidden_states.split(size), targets.split(size), strict=True):
        # Rows that pad the vocabulary are no tokens and take no probability.
        logits = model.lm_head(hidden)[:, :vocab_size]
        wide = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        logprobs.append(wide.gather(1, target.unsqueeze(1)).squeeze(1))
        hits.append(wide.argmax(dim=-1) == target)
    if not logprobs:
        return hidden_states.new_zeros(0, dtype=torch.float32), targets == 0
    return torch.cat(logprobs), torch.cat(hits)
