# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token from logits, each row by itself: the batch around a row changes nothing.

No model is called here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from statescan.errors import ArgumentError, StatescanError


def _check(name: str, value: float, holds: bool, needed: str) -> None:
    if not holds:
        raise ArgumentError(
            f"SamplingConfig: got {name}={value!r}.\n"
            f"{name} must be {needed}.\n"
            "Leave it out to switch it off."
        )


@dataclass(frozen=True)
class SamplingConfig:
    """How to choose tokens. Filters apply in the order of the fields below.

    Attributes:
        repetition_penalty: Divides positive (multiplies negative) logits of tokens seen before in
            the row, prompt included; 1 is off.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Keep the k most likely tokens; 0 is off.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this; 1 is off.
        min_p: Keep tokens at least this fraction as likely as the most likely; 0 is off.
        seed: Row i draws from a generator of seed + i; a sequence gives each row its own seed, so
            that a row alone and the row in any batch draw alike. None draws a fresh seed.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, penalty > 0, "above 0")
        _check("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 (off) to 1")


GREEDY = SamplingConfig(temperature=0.0)


class Sampler:
    """Draws one token a row and call, and remembers what each row has seen.

    Args:
        config: How to choose.
        prompts: Tokens of each row's prompt, for the repetition penalty.
        vocab_size: Tokens that exist; logits beyond are padding and never drawn.
    """

    def __init__(
        self, config: SamplingConfig, prompts: Sequence[Sequence[int]], vocab_size: int
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self._generators = _row_generators(config.seed, len(prompts))
        self._seen: Tensor | None = None
        if config.repetition_penalty != 1.0:
            self._seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                self._seen[row, torch.tensor(list(prompt), dtype=torch.long)] = True

    def sample(self, logits: Tensor) -> Tensor:
        """Tokens (batch,), on the CPU, of logits (batch, vocabulary) on any device."""
        # A row of logits is small; on the CPU in float32 every device and dtype draws alike.
        scores = logits[:, : self.vocab_size].detach().to("cpu", torch.float32)
        if torch.isnan(scores).any():
            raise StatescanError(
                "sampling: the logits hold NaN.\n"
                "Every logit must be a number.\n"
                "Check the checkpoint, or run the model in float32."
            )
        if self._seen is not None:
            scores = penalise(scores, self._seen, self.config.repetition_penalty)
        if self.config.temperature == 0:
            tokens = scores.argmax(dim=-1)
        else:
            tokens = self._draw(filter_probabilities(scores, self.config))
        if self._seen is not None:
            self._seen[torch.arange(tokens.shape[0]), tokens] = True
        return tokens

    def _draw(self, probabilities: Tensor) -> Tensor:
        """Invert each row's cumulative distribution at one uniform number of the row's own."""
        draws = [torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators]
        cumulative = probabilities.double().cumsum(dim=-1)
        thresholds = torch.stack(draws) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
        # Rounding may put a threshold at the very end, behind the last token with any probability.
        last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(dim=-1)
        return torch.minimum(tokens, last)


def _row_generators(seed: int | Sequence[int] | None, rows: int) -> list[torch.Generator]:
    if seed is None:
        seed = int(torch.randint(0, 2**62, ()))
    seeds = list(seed) if isinstance(seed, Sequence) else [int(seed) + i for i in range(rows)]
    if len(seeds) != rows:
        raise ArgumentError(
            f"SamplingConfig: 'seed' holds {len(seeds)} seeds for {rows} prompts.\n"
            "A sequence must give each prompt its own seed.\n"
            "Pass one integer to derive them."
        )
    # manual_seed takes the 64-bit range; Python integers beyond it wrap instead of failing.
    return [torch.Generator().manual_seed(value % 2**63) for value in seeds]


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens marked in ``seen`` less likely: both signs of a score move down."""
    lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
    return torch.where(seen, lowered, scores)


def filter_probabilities(scores: Tensor, config: SamplingConfig) -> Tensor:
    """Probabilities (batch, vocabulary) after temperature and filters; they need not sum to 1."""
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / config.temperature
    if 0 < config.top_k < scores.shape[-1]:
        kept = torch.zeros_like(scores, dtype=torch.bool)
        # The k indices rather than the k-th value, so that ties do not let more than k through.
        kept.scatter_(-1, _descending(scores)[1][:, : config.top_k], True)
        scores = scores.masked_fill(~kept, -torch.inf)
    probabilities = torch.softmax(scores, dim=-1)
    if config.top_p < 1:
        ordered, indices = _descending(probabilities)
        before = ordered.cumsum(dim=-1) - ordered
        dropped = torch.zeros_like(probabilities, dtype=torch.bool)
        dropped.scatter_(-1, indices, before >= config.top_p)
        # The most likely token always stays: nothing stands before it.
        probabilities = probabilities.masked_fill(dropped, 0.0)
    if config.min_p > 0:
        floor = config.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    return probabilities


def _descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by value, ties by index, so that the result depends on nothing else."""
    ordered, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered, indices
