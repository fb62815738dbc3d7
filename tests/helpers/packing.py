# SPDX-License-Identifier: Apache-2.0
"""Ways to pack sequences into rows, and what the reference makes of each sequence alone.

Used to check packed calls without the reference's own idea of packing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.differential import STATES, leaves_of
from helpers.op_inputs import Kwargs

from statescan import reference
from statescan.testing import in_double

TOKENS = ("x", "dt", "B", "C", "z", "xz")
PER_SEQUENCE = ("initial_states", "conv_initial_states")


@dataclass(frozen=True)
class Packing:
    """Rows of (first token, one past the last) spans; what no span covers is padding.

    Attributes:
        rows: The spans of each row.
        seqlen: Tokens a row.
        bounds: cu_seqlens, if that is how it is told; seq_idx else.
        ids: The id of each span, by row; counted if not given.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    seqlen: int
    bounds: tuple[int, ...] | None = None
    ids: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_states(self) -> int:
        return len(self.rows) if self.bounds is None else len(self.bounds) - 1

    def arguments(self) -> Kwargs:
        if self.bounds is not None:
            return {"cu_seqlens": torch.tensor(self.bounds, dtype=torch.int32)}
        seq_idx = torch.full((len(self.rows), self.seqlen), -1, dtype=torch.int64)
        for row, spans in enumerate(self.rows):
            for number, (start, end) in enumerate(spans):
                seq_idx[row, start:end] = number if self.ids is None else self.ids[row][number]
        return {"seq_idx": seq_idx}

    def sequences(self) -> list[tuple[int, int, int, int | None, int | None]]:
        """(row, start, end, state to start from, state to leave)."""
        if self.bounds is not None:
            return [(0, a, b, i, i) for i, (a, b) in enumerate(self.rows[0])]
        found: list[tuple[int, int, int, int | None, int | None]] = []
        for row, spans in enumerate(self.rows):
            for i, (start, end) in enumerate(spans or ((0, 0),)):
                first, last = i == 0, i == max(len(spans), 1) - 1
                found.append((row, start, end, row if first else None, row if last else None))
        return found


def _bounds(*bounds: int) -> Packing:
    spans = tuple(pairwise(bounds))
    return Packing((spans,), bounds[-1], bounds)


PACKINGS = [
    pytest.param(_bounds(0, 9), id="one"),
    pytest.param(_bounds(0, 1, 2, 3, 4), id="single_tokens"),
    pytest.param(_bounds(0, 0, 4, 4, 5, 11, 11), id="with_empty_ones"),
    pytest.param(_bounds(0, 63, 64, 65, 131), id="around_chunks"),
    pytest.param(Packing((((0, 9),), ((0, 9),)), 9), id="one_id"),
    pytest.param(
        Packing((((0, 4), (4, 5), (5, 9)), ((0, 1), (1, 9))), 9, ids=((7, 2, 7), (5, 0))),
        id="falling_and_repeated_ids",
    ),
    pytest.param(
        Packing((((2, 5), (6, 9)), (), ((0, 3), (3, 8))), 10, ids=((1, 1), (), (0, 4))), id="padded"
    ),
    pytest.param(Packing((((13, 16),), ((7, 16),)), 16), id="left_padded"),
    pytest.param(Packing((((0, 3),), ((0, 9),)), 16), id="right_padded"),
    pytest.param(Packing((((1, 2), (3, 4), (5, 6)),), 7, ids=((0, 0, 0),)), id="islands"),
    pytest.param(Packing((((0, 64), (64, 70), (72, 130)),), 131), id="padded_around_chunks"),
]


def pieces(kwargs: Kwargs, start: int, end: int, rows: slice | None = None) -> Kwargs:
    """Tokens ``start`` to ``end`` of all per-token arguments (of some rows)."""
    chosen = slice(None) if rows is None else rows
    return kwargs | {
        n: kwargs[n][chosen, ..., start:end]
        for n in TOKENS
        if kwargs.get(n) is not None and kwargs[n].dim() > 2
    }


def poison(kwargs: Kwargs, packing: Packing) -> Kwargs:
    """NaN in every per-token argument where there is padding."""
    pads = _padding(packing)
    result = dict(kwargs)
    for name in TOKENS:
        if kwargs.get(name) is not None and kwargs[name].dim() > 2:
            mask = pads.view(pads.shape[0], *[1] * (kwargs[name].dim() - 2), -1)
            result[name] = torch.where(mask, math.nan, kwargs[name])
    return result


def flip_runs(tensor: torch.Tensor, packing: Packing) -> torch.Tensor:
    """A per-token tensor with every sequence reversed in its place."""
    flipped = tensor.clone()
    for row, start, end, _, _ in packing.sequences():
        flipped[row, ..., start:end] = tensor[row, ..., start:end].flip(-1)
    return flipped


def runs_of(
    op: str, kwargs: Kwargs, packing: Packing, cotangents: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Results and gradients from one unpacked call of the float64 reference for each sequence."""
    wide = in_double({n: v for n, v in kwargs.items() if n not in ("seq_idx", "cu_seqlens")})
    leaves = leaves_of(wide)
    seeds = in_double(cotangents)
    results = {name: torch.zeros_like(seed) for name, seed in seeds.items()}
    total: Any = torch.zeros((), dtype=torch.float64)
    time = 1 if kwargs.get("out_proj_weight") is not None else 2
    for row, start, end, initial, final in packing.sequences():
        part = pieces(wide | leaves, start, end, slice(row, row + 1))
        for name in PER_SEQUENCE:
            if part.get(name) is not None:
                part[name] = None if initial is None else part[name][initial : initial + 1]
        outputs = getattr(reference, f"{op}_ref")(**part)
        place = (slice(row, row + 1), *[slice(None)] * (time - 1), slice(start, end))
        for name, output in zip(STATES[op], outputs, strict=True):
            where = place if name == "out" else final
            if where is None:
                continue
            value = output if name == "out" else output[0]
            results[name][where] = value.detach()
            total = total + (value * seeds[name][where].conj()).real.sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    gradients = {
        f"d{n}": torch.zeros_like(leaf) if g is None else g
        for (n, leaf), g in zip(leaves.items(), found, strict=True)
    }
    return results | gradients


def _padding(packing: Packing) -> torch.Tensor:
    pads = torch.ones(len(packing.rows), packing.seqlen, dtype=torch.bool)
    for row, spans in enumerate(packing.rows):
        for start, end in spans:
            pads[row, start:end] = False
    return pads
