# SPDX-License-Identifier: Apache-2.0
"""Marks where the sequences of a packed call begin and end, on the device and without a look at it.

Only index bookkeeping; what a mark means is in ``kernels/cuda/marks.cuh``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.tables.sequence_marks import STRETCH
from statescan.errors import ArgumentError

MOST_BLOCKS = 2**31 - 1
"""Of the first axis of a grid; kernels loop over what is beyond."""

_MOST_SEQUENCES = 2**27


class Sequences(NamedTuple):
    """The marks of a call, or none where each row is one sequence.

    Attributes:
        memory: int32: a mark for each token of (batch, seqlen), then words of a bit for each.
        occupied: Where in ``memory`` these words begin.
        words: Words a row.
        untouched: Whether there may be sequences without tokens, whose final state is the initial.
    """

    memory: Tensor | None = None
    occupied: int = 0
    words: int = 0
    untouched: bool = False

    @property
    def address(self) -> int:
        """Of the marks; 0 where there are none."""
        return 0 if self.memory is None else self.memory.data_ptr()

    @property
    def marks(self) -> Tensor | None:
        """The marks of all tokens, one row behind the other."""
        return None if self.memory is None else self.memory[: self.occupied]

    def fields(self) -> tuple[int, int, int]:
        """Address of the marks, address of the words, words a row."""
        if self.memory is None:
            return 0, 0, 0
        start = self.memory.data_ptr()
        return start, start + 4 * self.occupied, self.words

    def pass_through(self, target: Tensor, source: Tensor | None) -> None:
        """Fill states with what sequences without tokens hand on: the state they came with, or 0.

        To be called before the kernel, which then writes the states of the others.
        """
        if not self.untouched or target.numel() == 0:
            return
        if source is None:
            target.zero_()
        else:
            target.copy_(source)


_UNPACKED = Sequences()
_NO_TOKENS = Sequences(untouched=True)


def list_sequences(
    x: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> Sequences:
    """The sequences of a call over x (batch, dim, seqlen); launches a kernel if it is packed."""
    batch, _, seqlen = x.shape
    if batch == 0 or seqlen == 0:
        return _NO_TOKENS
    if cu_seqlens is not None:
        num_seqs = cu_seqlens.shape[0] - 1
        if num_seqs > _MOST_SEQUENCES:
            raise ArgumentError(
                f"cu_seqlens has {num_seqs} sequences.\n"
                f"The cuda backend takes {_MOST_SEQUENCES} of them.\n"
                "Split the call, or pass backend='torch'."
            )
        return _mark(
            "bounds", cu_seqlens, 0, cu_seqlens.stride(0), batch, seqlen, num_seqs, reverse
        )
    if seq_idx is not None:
        batch_stride, stride = seq_idx.stride()
        return _mark("ids", seq_idx, batch_stride, stride, batch, seqlen, 0, reverse)
    return _UNPACKED


def _mark(
    instance: str,
    source: Tensor,
    batch_stride: int,
    seqlen_stride: int,
    batch: int,
    seqlen: int,
    num_seqs: int,
    reverse: bool,
) -> Sequences:
    words = -(-seqlen // 32)
    count = batch * seqlen
    memory = torch.empty(count + batch * words, dtype=torch.int32, device=source.device)
    start = memory.data_ptr()
    blocks = min(batch * -(-seqlen // STRETCH), MOST_BLOCKS)
    launch(
        "sequence_marks",
        instance,
        source.device,
        (blocks, 1, 1),
        (
            *(source.data_ptr(), start, start + 4 * count),
            *(int(source.dtype == torch.int64), batch_stride, seqlen_stride),
            *(batch, seqlen, num_seqs, words, int(reverse)),
        ),
    )
    return Sequences(memory, count, words, True)
