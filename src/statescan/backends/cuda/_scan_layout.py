# SPDX-License-Identifier: Apache-2.0
"""Decides how a forward selective scan lies on the GPU: instance, grid, strides, stretches of time.

Integers only, remembered by the call's shapes and strides; tensors are in ``selective_scan.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from statescan.backends.cuda.tables.selective_scan_fwd import SHAPES, Shape
from statescan.backends.outputs import scan_chunk_size

MOST_STATES = 256
"""States of one launch; calls with more of them run slice by slice."""

_SINGLY, _TOKEN_PAIRS, _STATE_QUADS = range(3)
"""``WEIGHTS_*`` of ``kernels/cuda/scan_weights.cuh``."""

_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
_STRETCH_UNIT = 64
"""A stretch is a multiple of this: of all tiles, and of what lies between two saved states."""

_SHORTEST_STRETCH = 512

Strides = tuple[int, ...]

DECAY_SHIFT = 4.5e-8
"""Added to the argument of ex2.approx, whose results are 2e-8 (near 1) to 5e-8 too small on
average: states that decay slowly collected 1.8e-6 of error in 65 steps, with it 5e-7 (H200)."""


class Layout(NamedTuple):
    """How a call lies on the GPU.

    Attributes:
        instance: The instance that makes the output.
        grid: Its grid.
        first_pass: The instance that summarises stretches of time before, if there are several.
        first_grid: Its grid.
        workspace_floats: What it leaves for the other.
        offsets: Bytes from the start of x, dt, z, out, B and C to their first step and state.
        marks_offset: The same for the marks.
        numbers: The integers of the kernel's struct.
    """

    instance: str
    grid: tuple[int, int, int]
    first_pass: str | None
    first_grid: tuple[int, int, int]
    workspace_floats: int
    offsets: tuple[int, ...]
    marks_offset: int
    numbers: tuple[int, ...]


class _Plan(NamedTuple):
    shape: str
    stretches: int = 1


@lru_cache(maxsize=1024)
def layout_of(
    dtype: str,
    size: tuple[int, int, int],
    state_row: int,
    first_state: int,
    dstate: int,
    strides: tuple[Strides | None, ...],
    groups: tuple[int, int],
    alignment: tuple[int, ...],
    dt_softplus: bool,
    reverse: bool,
    packed: bool,
    processors: int,
) -> Layout:
    """The layout of a call.

    Args:
        dtype: ``f32``, ``bf16`` or ``f16``, of x, dt, z, out, and of B and C unless constant.
        size: batch, dim, seqlen.
        state_row: dstate of the whole call, of which this launch takes ``dstate`` from
            ``first_state`` on.
        strides: Of x, dt, z, out, B and C; None for an absent z.
        groups: Groups of B and of C, 0 where they are constant.
        alignment: Of x, dt, z, out, B and C: addresses modulo 16.
    """
    batch, dim, seqlen = size
    constant = 0 in groups
    sizes = tuple(dim // count if count else dim for count in groups)
    unit = math.gcd(*sizes)
    plain = not (constant or reverse or packed)
    plan = _plan(batch, dim, unit, seqlen, dstate, not plain, constant, processors)
    shape = SHAPES[plan.shape]
    dense = plain and _steps_are_dense(dtype, size, strides[:4], alignment[:4], shape)
    if plain and not dense:
        plan = _plan(batch, dim, unit, seqlen, dstate, True, False, processors)
        shape = SHAPES[plan.shape]
        # Its lanes own fewer steps, so 4 of them in a row may do. It has no first pass by vectors.
        dense = plan.stretches == 1 and _steps_are_dense(
            dtype, size, strides[:4], alignment[:4], shape
        )
    stretch, stretches = _stretches(seqlen, plan.stretches)
    blocks_per_unit = -(-unit // shape.block_channels)
    blocks = blocks_per_unit * (dim // unit) * batch
    kind = "constant" if constant else "vector" if dense else "any"
    way, last = (-1, seqlen - 1) if reverse else (1, 0)
    weights = _weights_mode(dtype, strides[4:], alignment[4:], groups, seqlen, dstate, plain)
    numbers = (
        *(number for own in strides[:4] for number in _token_strides(own, way)),
        *(number for own in strides[4:] for number in _weight_strides(own, way)),
        *(*sizes, int(groups[0] == 0), int(groups[1] == 0)),
        *(batch, dim, seqlen, dstate, state_row),
        *(scan_chunk_size(state_row), -(-seqlen // scan_chunk_size(state_row)), unit),
        *(blocks_per_unit, blocks_per_unit * (dim // unit), stretches, stretch),
        *(way, int(dt_softplus), weights, int(state_row % 4 == 0 and dstate % 4 == 0)),
        _float_bits(DECAY_SHIFT),
        *_items(strides[:4], shape, way, dim),
    )
    several = stretches > 1
    summary = shape.lanes * shape.states + 2
    return Layout(
        f"{dtype}_{plan.shape}_{kind}",
        (blocks * stretches, 1, 1),
        f"{dtype}_{plan.shape}_{'vector_summary' if dense else 'summary'}" if several else None,
        (blocks * (stretches - 1), 1, 1),
        batch * stretches * dim * summary if several else 0,
        _offsets(dtype, strides, last, first_state),
        4 * last,
        numbers,
    )


def _plan(
    batch: int,
    dim: int,
    unit: int,
    seqlen: int,
    dstate: int,
    singly: bool,
    constant: bool,
    processors: int,
) -> _Plan:
    """The shape, and into how many stretches time is cut. Figures: H200, 132 multiprocessors.

    ``singly``: tokens are not read by vectors. More lanes a channel cost exchanges and shared
    memory; a first pass over stretches costs its exponentials again: 1.7 times the time. So the
    least of both that still fills the GPU.
    """

    def blocks(name: str) -> int:
        return batch * (dim // unit) * -(-unit // SHAPES[name].block_channels)

    def cut(name: str, blocks_each: int) -> _Plan:
        wanted = round(blocks_each * processors / blocks(name))
        return _Plan(name, max(1, min(wanted, seqlen // _SHORTEST_STRETCH)))

    if constant:
        return _Plan("s16" if dstate <= 16 else "s256")
    # With one block a multiprocessor, s4 (0.18 ms at 8192 channels) is behind s8 (0.13).
    if dstate <= 4 and blocks("s4") >= 3 * processors:
        return _Plan("s4")
    if dstate <= 8 and 10 * blocks("s8") >= 9 * processors:
        return _Plan("s8")
    if dstate > 16:
        name = next(f"s{count}" for count in (32, 64, 128, 256) if dstate <= count)
        if 2 * blocks(name) > processors or dstate > 64 or singly:
            return _Plan(name)
        return cut("s64", 2)
    if singly:
        return _Plan("s16") if blocks("s16") >= processors else cut("s16", 4)
    for name in ("s16_many", "s16", "s16_few"):
        if 2 * blocks(name) >= 3 * processors:
            return _Plan(name)
    # Measured per step: s16_few 0.042 to 0.048 us up to 4096 channels; s16_many in stretches
    # 0.0122 us for each 1024 channels, once there are two blocks a multiprocessor.
    found = cut("s16_many", 4)
    enough = found.stretches * blocks("s16_many") >= 2 * processors
    return found if enough else _Plan("s16_few")


def _stretches(seqlen: int, wanted: int) -> tuple[int, int]:
    """Length and number of stretches, about as many as wanted."""
    if wanted <= 1:
        return seqlen, 1
    length = -(-seqlen // wanted)
    length = -(-length // _STRETCH_UNIT) * _STRETCH_UNIT
    return length, -(-seqlen // length)


def _steps_are_dense(
    dtype: str,
    size: tuple[int, int, int],
    strides: Sequence[Strides | None],
    alignment: Sequence[int],
    shape: Shape,
) -> bool:
    """Whether the steps that a lane owns are neighbours in memory and aligned, in all tensors."""
    own = shape.steps // shape.lanes
    width = min(16, own * _BYTES[dtype])
    if width < 4 or size[2] % own:
        return False
    for here, start in zip(strides, alignment):
        if here is None:
            continue
        apart = [here[axis] * _BYTES[dtype] for axis in (0, 1) if size[axis] > 1]
        if here[2] != 1 or start % width or any(step % width for step in apart):
            return False
    return True


def _weights_mode(
    dtype: str,
    strides: Sequence[Strides | None],
    alignment: Sequence[int],
    groups: tuple[int, int],
    seqlen: int,
    dstate: int,
    plain: bool,
) -> int:
    """How B and C are read."""
    if not plain:
        return _SINGLY
    pairs, quads = seqlen % 2 == 0, dstate % 4 == 0
    for here, start in zip(strides, alignment):
        assert here is not None
        for_pairs, for_quads = 2 * _BYTES[dtype], 4 * _BYTES[dtype]
        pairs = pairs and here[3] == 1 and start % for_pairs == 0
        pairs = pairs and all(step % 2 == 0 for step in here[:3])
        quads = quads and here[2] == 1 and start % for_quads == 0
        quads = quads and all(step % 4 == 0 for step in (here[0], here[1], here[3]))
    return _TOKEN_PAIRS if pairs else _STATE_QUADS if quads else _SINGLY


def _items(strides: Sequence[Strides | None], shape: Shape, way: int, dim: int) -> tuple[int, ...]:
    """How a lane without vectors goes from one token to the next: strides, channels, steps."""
    x = strides[0]
    assert x is not None
    channels_first = dim > 1 and abs(x[1]) < abs(x[2])
    teams, steps = (0, shape.lanes) if channels_first else (32 // shape.steps, 0)
    apart = (0 if own is None else teams * own[1] + way * steps * own[2] for own in strides)
    return (*apart, teams, steps)


def _float_bits(value: float) -> int:
    """The bits of a float32, as the kernel takes them in an integer field."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _token_strides(strides: Strides | None, way: int) -> Strides:
    return (0, 0, 0) if strides is None else (strides[0], strides[1], way * strides[2])


def _weight_strides(strides: Strides | None, way: int) -> Strides:
    if strides is None or len(strides) == 2:
        return 0, 0, 1, 0
    return (*strides[:3], way * strides[3])


def _offsets(
    dtype: str, strides: Sequence[Strides | None], last: int, first_state: int
) -> tuple[int, ...]:
    """Bytes to the first step in the order of processing, and to the first state."""
    found = []
    for own in strides:
        if own is None:
            found.append(0)
        elif len(own) == 2:
            found.append(4 * first_state)
        elif len(own) == 3:
            found.append(_BYTES[dtype] * last * own[2])
        else:
            found.append(_BYTES[dtype] * (last * own[3] + first_state * own[2]))
    return tuple(found)
