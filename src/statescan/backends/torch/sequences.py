# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a call lie, and how to visit their tokens in the order of processing.

Only index bookkeeping: no arithmetic on activations, nothing that knows an op.

Packing is read on the host once a call: on an accelerator that is one synchronisation for
``cu_seqlens`` and two for ``seq_idx``; without packing there is none. Tokens are then visited
chunk by chunk in processing order, so ``reverse`` never copies a whole tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Tokens ``start`` to ``end`` of ``rows`` that belong together, in the order of processing.

    ``initial`` and ``final`` select the states that the run starts from and leaves; None stands
    for zeros and for "nobody asks". A stretch of padding is a run with neither.
    """

    rows: slice
    start: int
    end: int
    initial: slice | None
    final: slice | None


class Boundary(NamedTuple):
    """The runs that end and that begin before one step, rows counted from a block's first."""

    ends: list[tuple[slice, slice]]
    begins: list[tuple[slice, slice | None]]


@dataclass(frozen=True)
class SequencePlan:
    """The sequences of a call over (batch, ..., seqlen) tensors.

    Attributes:
        runs: Every token is in exactly one, padding included; sorted by row. Either there is just
            one, or each has one row.
        untouched: States of sequences without tokens: final is initial.
        reverse: Process each sequence from its last token to its first.
        source: (batch, seqlen) token that is processed at each step, for packed reverse only.
        padding: (batch, seqlen) True at padding; None when there is none.
    """

    seqlen: int
    runs: list[Run]
    untouched: list[slice] = field(default_factory=list)
    reverse: bool = False
    source: Tensor | None = None
    padding: Tensor | None = None

    def boundaries(self, rows: slice) -> dict[int, Boundary]:
        """What happens between steps, for a block of rows, by the step that comes after."""
        found: dict[int, Boundary] = {}
        for run in self._runs_of(rows):
            low, high = max(run.rows.start, rows.start), min(run.rows.stop, rows.stop)
            if low >= high or run.start == run.end:
                continue
            here = slice(low - rows.start, high - rows.start)
            begin = found.setdefault(run.start, Boundary([], []))
            entering = None if run.initial is None else _within(run.initial, run, low, high)
            begin.begins.append((here, entering))
            end = found.setdefault(run.end, Boundary([], []))
            if run.final is not None:
                end.ends.append((here, _within(run.final, run, low, high)))
        return found

    def _runs_of(self, rows: slice) -> list[Run]:
        """The runs that can meet a block of rows."""
        if len(self.runs) < 2:
            return self.runs
        first = bisect_left(self.runs, rows.start, key=lambda run: run.rows.start)
        last = bisect_left(self.runs, rows.stop, key=lambda run: run.rows.start)
        return self.runs[first:last]

    def take(self, tensor: Tensor, rows: slice, start: int, stop: int) -> Tensor:
        """Steps ``start`` to ``stop`` of ``tensor``, which holds just ``rows``: (rows, ..., steps).

        A view where the order of processing allows.
        """
        if not self.reverse:
            return tensor[..., start:stop]
        if self.source is None:
            return tensor[..., self.seqlen - stop : self.seqlen - start].flip(-1)
        return tensor.gather(-1, _index(self.source[rows, start:stop], tensor))

    def put(self, target: Tensor, rows: slice, start: int, stop: int, values: Tensor) -> None:
        """Write (rows, ..., steps) ``values`` to where ``take`` would read them in ``target``."""
        if not self.reverse:
            target[..., start:stop] = values
        elif self.source is None:
            target[..., self.seqlen - stop : self.seqlen - start] = values.flip(-1)
        else:
            index = _index(self.source[rows, start:stop], target)
            target.scatter_(-1, index, values.to(target.dtype))


def plan_sequences(
    batch: int,
    seqlen: int,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> SequencePlan:
    """Plan for rows of ``seqlen`` tokens, packed as ``seq_idx`` or ``cu_seqlens`` say.

    Args:
        batch: Number of rows, 1 with ``cu_seqlens``.
        seqlen: Tokens a row.
        seq_idx: (batch, seqlen); a run of equal ids is a sequence, negative ids are padding.
        cu_seqlens: (num_seqs + 1,) bounds. Values outside 0 to seqlen, which only reach this
            place on an accelerator, count as the nearest bound.
        reverse: Process each sequence from its last token to its first.
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(torch.int64).clamp(0, seqlen).cummax(0).values
        return _plan_bounds(bounds, seqlen, reverse)
    if seq_idx is not None:
        return _plan_ids(seq_idx, reverse)
    rows = slice(0, batch)
    if seqlen == 0:
        return SequencePlan(seqlen, [], [rows])
    return SequencePlan(seqlen, [Run(rows, 0, seqlen, rows, rows)], reverse=reverse)


def _plan_bounds(bounds: Tensor, seqlen: int, reverse: bool) -> SequencePlan:
    """One row; sequence i is what lies between bounds i and i + 1, perhaps nothing."""
    row = slice(0, 1)
    edges: list[int] = bounds.tolist()
    runs, untouched = [], []
    for i, (start, end) in enumerate(pairwise(edges)):
        state = slice(i, i + 1)
        if start == end:
            untouched.append(state)
        else:
            runs.append(Run(row, start, end, state, state))
    # Only an accelerator lets bounds through that leave tokens out; those then stand alone.
    for start, end in ((0, edges[0]), (edges[-1], seqlen)):
        if start < end:
            runs.append(Run(row, start, end, None, None))
    if not reverse:
        return SequencePlan(seqlen, runs, untouched)
    token = torch.arange(seqlen, device=bounds.device)
    number = torch.bucketize(token, bounds, right=True)
    around = torch.cat([bounds.new_zeros(1), bounds, bounds.new_full((1,), seqlen)])
    source = around[number] + around[number + 1] - 1 - token
    return SequencePlan(seqlen, runs, untouched, reverse, source[None])


def _plan_ids(seq_idx: Tensor, reverse: bool) -> SequencePlan:
    """Runs of equal ids; padding lies in runs of its own, so nothing passes through it."""
    batch, seqlen = seq_idx.shape
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    rows, starts = first.nonzero(as_tuple=True)
    table = torch.stack([rows, starts, seq_idx[first].to(torch.int64)])
    real: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
    runs = []
    padded = False
    found: list[list[int]] = table.t().tolist()
    for (row, start, number), (next_row, next_start, _) in pairwise([*found, [batch, 0, 0]]):
        end = next_start if next_row == row else seqlen
        if number < 0:
            padded = True
            runs.append(Run(slice(row, row + 1), start, end, None, None))
        else:
            real[row].append((start, end))
    for row, spans in enumerate(real):
        here = slice(row, row + 1)
        for i, (start, end) in enumerate(spans):
            initial = here if i == 0 else None
            final = here if i == len(spans) - 1 else None
            runs.append(Run(here, start, end, initial, final))
    untouched = [slice(row, row + 1) for row, spans in enumerate(real) if not spans]
    padding = seq_idx < 0 if padded else None
    runs.sort(key=lambda run: run.rows.start)
    source = _flipped(rows, starts, first) if reverse else None
    return SequencePlan(seqlen, runs, untouched, reverse, source, padding)


def _flipped(rows: Tensor, starts: Tensor, first: Tensor) -> Tensor:
    """For each step the token to process, when every run is walked from its end."""
    batch, seqlen = first.shape
    begins = rows * seqlen + starts
    ends = torch.cat([begins[1:], begins.new_full((1,), batch * seqlen)])
    number = first.flatten().cumsum(0) - 1
    step = torch.arange(batch * seqlen, device=first.device)
    token = (begins + ends - 1)[number] - step
    return (token % max(seqlen, 1)).view(batch, seqlen)


def _index(source: Tensor, tensor: Tensor) -> Tensor:
    """``source`` (rows, steps) as an index into the last axis of (rows, ..., seqlen)."""
    middle = tensor.shape[1:-1]
    shape = (source.shape[0], *(1 for _ in middle), source.shape[1])
    return source.view(shape).expand(-1, *middle, -1)


def _within(states: slice, run: Run, low: int, high: int) -> slice:
    """Of the states that belong to a run's rows, those of rows ``low`` to ``high``."""
    first = states.start - run.rows.start
    return slice(first + low, first + high)
