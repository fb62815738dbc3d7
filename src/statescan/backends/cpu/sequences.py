# SPDX-License-Identifier: Apache-2.0
"""Lists the sequences of a packed call for the kernels, as ``struct statescan_sequences`` wants.

Only index bookkeeping; without packing there is nothing to list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_NOBODY, _PADDING = -1, -2


class Sequences(NamedTuple):
    """The runs of a call, or nothing where each row is one sequence.

    Attributes:
        runs: (num_runs, 4) int64: start, end, initial state, final state.
        row_runs: (batch + 1,) int64: where the runs of each row begin.
        untouched: The states of sequences without tokens, whose final state is their initial one.
        padded: Whether there is padding.
    """

    batch: int
    seqlen: int
    reverse: bool
    runs: Tensor | None = None
    row_runs: Tensor | None = None
    untouched: Tensor | None = None
    padded: bool = False

    def fields(self) -> tuple[int, ...]:
        """The fields of the struct."""
        runs = 0 if self.runs is None else self.runs.data_ptr()
        row_runs = 0 if self.row_runs is None else self.row_runs.data_ptr()
        return (runs, row_runs, self.batch, self.seqlen, int(self.reverse))

    def pass_through(self, target: Tensor, source: Tensor | None) -> None:
        """Give sequences without tokens the state that they came with, or zeros."""
        if self.untouched is None or self.untouched.numel() == 0:
            return
        target[self.untouched] = 0 if source is None else source[self.untouched].to(target.dtype)


def list_sequences(
    batch: int, seqlen: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> Sequences:
    """The sequences of a call, in the order of processing."""
    if cu_seqlens is not None:
        return _from_bounds(cu_seqlens.to(torch.int64), seqlen, reverse)
    if seq_idx is not None:
        return _from_ids(seq_idx, reverse)
    untouched = torch.arange(batch, device="cpu") if seqlen == 0 else None
    return Sequences(batch, seqlen, reverse, untouched=untouched)


def _from_bounds(bounds: Tensor, seqlen: int, reverse: bool) -> Sequences:
    """One row; sequence i lies between bounds i and i + 1, perhaps without tokens."""
    starts, ends = bounds[:-1], bounds[1:]
    number = torch.arange(starts.shape[0], device="cpu")
    full = starts < ends
    table = torch.stack([starts, ends, number, number], 1)[full].contiguous()
    row_runs = torch.tensor([0, table.shape[0]], device="cpu")
    return Sequences(1, seqlen, reverse, table, row_runs, number[~full])


def _from_ids(seq_idx: Tensor, reverse: bool) -> Sequences:
    """Runs of equal ids; a row's states belong to its first and last real run."""
    batch, seqlen = seq_idx.shape
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    rows, starts = first.nonzero(as_tuple=True)
    ends = torch.full_like(starts, seqlen)
    same_row = rows[1:] == rows[:-1]
    ends[:-1] = torch.where(same_row, starts[1:], ends[:-1])
    real = seq_idx[first] >= 0
    initial = torch.full_like(starts, _NOBODY)
    final = torch.full_like(starts, _NOBODY)
    initial[~real] = _PADDING
    position = real.nonzero().squeeze(1)
    real_rows = rows[position]
    opens = torch.ones_like(real_rows, dtype=torch.bool)
    opens[1:] = real_rows[1:] != real_rows[:-1]
    closes = torch.ones_like(opens)
    closes[:-1] = opens[1:]
    initial[position[opens]] = real_rows[opens]
    final[position[closes]] = real_rows[closes]
    table = torch.stack([starts, ends, initial, final], 1).contiguous()
    row_runs = torch.searchsorted(rows, torch.arange(batch + 1, device="cpu"))
    has_tokens = torch.zeros(batch, dtype=torch.bool, device="cpu")
    has_tokens[real_rows] = True
    untouched = (~has_tokens).nonzero().squeeze(1)
    padded = bool((~real).any())
    return Sequences(batch, seqlen, reverse, table, row_runs, untouched, padded)
