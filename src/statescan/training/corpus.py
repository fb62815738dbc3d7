# SPDX-License-Identifier: Apache-2.0
"""A text file as bytes: split into a training and a held-out part, and cut into windows.

Which window a step reads depends on the seed and the step alone, so resuming needs no state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from statescan.errors import ArgumentError


@dataclass(frozen=True)
class Corpus:
    """Bytes of a text, as uint8 tensors.

    Attributes:
        train: All but the end of the text.
        held_out: The end of the text.
        sha256: Of the whole file.
    """

    train: Tensor
    held_out: Tensor
    sha256: str


def load_corpus(path: Path, held_out: float, seqlen: int) -> Corpus:
    """Read a file and split it; each part must hold a window of ``seqlen`` + 1 bytes."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArgumentError(
            f"train: the text {path} cannot be read: {error.strerror or error}.\n"
            "It must be a file.\n"
            "Check --text."
        ) from error
    split = len(data) - round(len(data) * held_out)
    if min(split, len(data) - split) < seqlen + 1:
        raise ArgumentError(
            f"train: {path} has {len(data)} bytes, {len(data) - split} of them held out.\n"
            f"Both parts need at least seqlen + 1 = {seqlen + 1} bytes.\n"
            "Use a longer text, a smaller --seqlen or a larger --held-out."
        )
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Corpus(tensor[:split], tensor[split:], hashlib.sha256(data).hexdigest())


class RandomWindows:
    """Batches of windows in shuffled order: each pass covers the text once, shifted at random.

    Args:
        data: uint8 (bytes,).
        batch: Windows of a batch.
        seqlen: Bytes that a window predicts; it holds one more.
        seed: Of the order.
    """

    def __init__(self, data: Tensor, batch: int, seqlen: int, seed: int) -> None:
        self._data, self._batch, self._seqlen, self._seed = data, batch, seqlen, seed
        # The shift takes up to one window, unless the text is too short to spare it.
        self._shift = min(seqlen, data.shape[0] - seqlen - 1)
        self._per_pass = (data.shape[0] - 1 - self._shift) // seqlen
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch, seqlen) of a step, int64."""
        first = step * self._batch
        starts = [self._start(first + i) for i in range(self._batch)]
        rows = torch.stack([self._data[s : s + self._seqlen + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def fresh_rows(self, step: int) -> bool:
        """Always: windows are unrelated, so no state may be carried from one to the next."""
        return True

    def _start(self, index: int) -> int:
        number, place = divmod(index, self._per_pass)
        if self._order[0] != number:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + number) % 2**63)
            shift = torch.randint(0, self._shift + 1, (1,), generator=generator)
            order = torch.randperm(self._per_pass, generator=generator) * self._seqlen + shift
            self._order = (number, order)
        return int(self._order[1][place])


class CarriedWindows:
    """Batches that continue each other: ``batch`` lanes of the text, each read in order."""

    def __init__(self, data: Tensor, batch: int, seqlen: int) -> None:
        self._lane = (data.shape[0] - 1) // batch
        self._steps = self._lane // seqlen
        if self._steps < 1:
            raise ArgumentError(
                f"train: {data.shape[0]} bytes give {batch} lanes of {self._lane} bytes.\n"
                f"Each lane needs seqlen={seqlen} of them.\n"
                "Use a smaller --batch or --seqlen, or --windows random."
            )
        self._data, self._batch, self._seqlen = data, batch, seqlen

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch, seqlen) of a step, int64."""
        offset = step % self._steps * self._seqlen
        starts = [lane * self._lane + offset for lane in range(self._batch)]
        rows = torch.stack([self._data[s : s + self._seqlen + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def fresh_rows(self, step: int) -> bool:
        """Whether the lanes begin anew at this step, so that states must be forgotten."""
        return step % self._steps == 0
