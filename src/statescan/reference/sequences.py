# SPDX-License-Identifier: Apache-2.0
"""Turns seq_idx or cu_seqlens into a plain list of sequences for the references to walk.

Only index bookkeeping lives here; no arithmetic on activations.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from statescan.errors import ArgumentError


class Sequence(NamedTuple):
    """Tokens start..end of some rows that belong together, and which states they meet.

    `initial` selects the entries of initial_states in which the tokens start (None: zeros),
    `final` the entries of final_states that receive the state after the last one (None: nobody
    asks for it). Tokens that no sequence covers are padding.
    """

    rows: slice
    start: int
    end: int
    initial: slice | None
    final: slice | None


def find_sequences(
    batch: int,
    seqlen: int,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> list[Sequence]:
    """List the sequences of a batch in the order of their tokens.

    Without packing all rows are alike and form a single entry, which keeps the references
    vectorised over the batch.
    """
    if seq_idx is not None and cu_seqlens is not None:
        raise ArgumentError(
            "seq_idx and cu_seqlens were both given; they are two ways to say the same.\n"
            "Pass seq_idx for rows of (batch, seqlen), or cu_seqlens for one row of all tokens."
        )
    if cu_seqlens is not None:
        return _from_cu_seqlens(cu_seqlens)
    if seq_idx is not None:
        return [part for row in range(batch) for part in _from_ids(row, seq_idx[row].tolist())]
    everything = slice(0, batch)
    return [Sequence(everything, 0, seqlen, everything, everything)]


def count_states(batch: int, cu_seqlens: torch.Tensor | None) -> int:
    """Number of initial and final states: one per sequence of cu_seqlens, else one per row."""
    return batch if cu_seqlens is None else cu_seqlens.numel() - 1


def _from_cu_seqlens(cu_seqlens: torch.Tensor) -> list[Sequence]:
    """Sequence i is the tokens between bounds i and i + 1 of the only row; it may be empty."""
    bounds = cu_seqlens.tolist()
    return [
        Sequence(slice(0, 1), start, end, slice(i, i + 1), slice(i, i + 1))
        for i, (start, end) in enumerate(pairwise(bounds))
    ]


def _from_ids(row: int, ids: list[int]) -> list[Sequence]:
    """Runs of equal, non-negative ids of one row.

    The row's initial state enters its first run and the row's final state leaves its last one.
    A row of nothing but padding becomes one empty sequence, so that its final state is its
    initial state.
    """
    starts = [t for t in range(len(ids)) if t == 0 or ids[t] != ids[t - 1]]
    ends = [*starts[1:], len(ids)]
    runs = [(s, e) for s, e in zip(starts, ends[: len(starts)], strict=True) if ids[s] >= 0]
    here = slice(row, row + 1)
    return [
        Sequence(
            here,
            start,
            end,
            initial=here if i == 0 else None,
            final=here if i == max(len(runs), 1) - 1 else None,
        )
        for i, (start, end) in enumerate(runs or [(0, 0)])
    ]
