# SPDX-License-Identifier: Apache-2.0
"""Index bookkeeping of the convolution: a token's place in its sequence, and who touches states.

Positions count from 0 in the order of processing, so ``reverse`` is dealt with here. Where
sequences lie is found in ``sequences.py``; no arithmetic on activations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends.torch.sequences import Run, SequencePlan, plan_sequences


class Runs(NamedTuple):
    """The runs of tokens that belong together, one entry for each and for each of its rows.

    ``initial`` and ``final`` are the states that a sequence starts from and leaves, -1 for none.
    """

    rows: Tensor
    starts: Tensor
    ends: Tensor
    initial: Tensor
    final: Tensor


class Places(NamedTuple):
    """Tokens that touch states: token (rows[i], times[i]) and column (states[i], columns[i])."""

    rows: Tensor
    times: Tensor
    states: Tensor
    columns: Tensor

    def within(self, rows: slice, low: int, high: int) -> Places | None:
        """Those in a block, with rows and times counted from its corner; None if there are none."""
        inside = (self.times >= low) & (self.times < high)
        inside &= (self.rows >= rows.start) & (self.rows < rows.stop)
        if not bool(inside.any()):
            return None
        kept = Places(*(part[inside] for part in self))
        return kept._replace(rows=kept.rows - rows.start, times=kept.times - low)


class Plan(NamedTuple):
    """What the convolution must know about sequences.

    Attributes:
        positions: (batch, seqlen) place of each token in its sequence, -1 for padding; None when
            every row is one whole sequence, so that no tap has to be held back.
        padded: Whether there is padding.
        heads: The first width - 1 tokens of sequences that start from a state, and the column
            of that state's contribution, which is the token's position.
        tails: The tokens that final states keep, and their column there.
        carried: Columns of final states that come from initial ones, because the sequence is
            shorter than width - 1: ``rows`` and ``times`` are the initial state and its column.
    """

    positions: Tensor | None
    padded: bool
    heads: Places
    tails: Places
    carried: Places


def make_plan(
    x: Tensor, width: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> Plan:
    """Plan for rows like ``x`` (batch, dim, seqlen)."""
    batch, _, seqlen = x.shape
    if seq_idx is None and cu_seqlens is None:
        row = torch.arange(batch, device=x.device)
        rows = Runs(row, torch.zeros_like(row), torch.full_like(row, seqlen), row, row)
        return Plan(None, False, *_state_places(rows, width - 1, reverse))
    found = plan_sequences(batch, seqlen, seq_idx, cu_seqlens)
    runs = _tabulate(found, x.device)
    positions = None
    if len(found.runs) > batch or found.padding is not None:
        positions = _positions(runs, batch, seqlen, reverse)
    if positions is not None and found.padding is not None:
        positions.masked_fill_(found.padding, -1)
    return Plan(positions, found.padding is not None, *_state_places(runs, width - 1, reverse))


def _tabulate(found: SequencePlan, device: torch.device) -> Runs:
    """The runs of a plan, one row of the batch each; padding too, and sequences without tokens."""
    empty = [Run(slice(0, s.stop - s.start), 0, 0, s, s) for s in found.untouched]
    table = []
    for run in (*found.runs, *empty):
        for i, row in enumerate(range(run.rows.start, run.rows.stop)):
            initial = -1 if run.initial is None else run.initial.start + i
            final = -1 if run.final is None else run.final.start + i
            table.append((row, run.start, run.end, initial, final))
    numbers = torch.tensor(table, dtype=torch.int64, device=device).view(-1, 5)
    return Runs(*numbers.unbind(1))


def _positions(runs: Runs, batch: int, seqlen: int, reverse: bool) -> Tensor:
    """(batch, seqlen) place of each token in its run."""
    lengths = runs.ends - runs.starts
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    step = torch.arange(batch * seqlen, device=lengths.device) - first
    token = (runs.rows * seqlen + runs.starts).repeat_interleave(lengths) + step
    positions = torch.empty_like(step)
    positions[token] = lengths.repeat_interleave(lengths) - 1 - step if reverse else step
    return positions.view(batch, seqlen)


def _state_places(runs: Runs, state_len: int, reverse: bool) -> tuple[Places, Places, Places]:
    """heads, tails and carried of a plan."""
    column = torch.arange(state_len, device=runs.rows.device)
    grid = (runs.rows.shape[0], state_len)
    rows, starts, ends, initial, final = (part[:, None].expand(grid) for part in runs)
    columns = column.expand(grid)
    lengths = ends - starts

    def token(position: Tensor) -> Tensor:
        return ends - 1 - position if reverse else starts + position

    def places(mask: Tensor, *parts: Tensor) -> Places:
        return Places(*(part[mask] for part in parts))

    kept = lengths - state_len + columns
    heads = (columns < lengths) & (initial >= 0)
    tails = (kept >= 0) & (final >= 0)
    carried = (kept < 0) & (final >= 0) & (initial >= 0)
    return (
        places(heads, rows, token(columns), initial, columns),
        places(tails, rows, token(kept), final, columns),
        places(carried, initial, lengths + columns, final, columns),
    )
