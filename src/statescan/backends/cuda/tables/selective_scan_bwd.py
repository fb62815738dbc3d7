# SPDX-License-Identifier: Apache-2.0
"""The backward selective scan on CUDA: its parameters, and which shapes are compiled.

Which instance serves a call is decided in ``backends/cuda/selective_scan_bwd.py``.
"""

from __future__ import annotations

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel

CHANNELS = 32
"""Channels of a block, one a lane."""

THREADS = 128
TILE = 64
STRIPE = 16
"""Steps of a tile, and steps between two visits of the activations."""

GROUP = 16
"""States that a block works on at a time."""

DTYPES = {"f32": "float", "bf16": "bf16", "f16": "f16"}
"""The formats of x, dt, z, B, C, dout and their gradients."""

_FLOATS, _RESULTS = "const float*", "float*"

_FIELDS = (
    *((name, POINTER) for name in ("dout", "x", "dt", "z", "dx", "ddt", "dz", "B", "C")),
    *((name, _FLOATS) for name in ("A", "D", "dt_bias", "initial_states", "dfinal_states")),
    *((name, _FLOATS) for name in ("chunk_states",)),
    ("marks", "const u32*"),
    *((name, _RESULTS) for name in ("dinitial_states", "part_dA", "part_dB", "part_dC")),
    *((name, _RESULTS) for name in ("part_dD", "part_ddt_bias")),
    *((name, _RESULTS) for name in ("local_carries", "sums_dt", "carries", "tile_states")),
    *(
        (f"{tensor}_{axis}_stride", INTEGER)
        for tensor in ("dout", "x", "dt", "z", "dx", "ddt", "dz")
        for axis in ("batch", "dim", "seqlen")
    ),
    *(
        (f"{tensor}_{axis}_stride", INTEGER)
        for tensor in ("B", "C")
        for axis in ("batch", "group", "dstate", "seqlen")
    ),
    *((name, INTEGER) for name in ("B_group_size", "C_group_size", "B_vector", "C_vector")),
    *((name, INTEGER) for name in ("batch", "dim", "seqlen", "dstate", "num_chunks")),
    *((name, INTEGER) for name in ("tiles_per_chunk", "unit_channels", "blocks_per_unit")),
    *((name, INTEGER) for name in ("blocks_per_row", "num_segments", "segment_chunks")),
    *((name, INTEGER) for name in ("part_steps", "dt_softplus", "reverse")),
    ("channel_last", INTEGER),
)


def _shared_bytes(large: bool, parts: int) -> int:
    """Of BackwardShared."""
    late = TILE + 4 if large else STRIPE + 4
    floats = 2 * CHANNELS * (TILE + 4) + 2 * CHANNELS * late
    floats += 2 * CHANNELS * (TILE + 4) if large else 8
    floats += 3 * 4 * 32 * 4 + 4 * 2 * 32 * 4 + TILE // 8 * THREADS * 4
    floats += 2 * GROUP * (STRIPE + 4)
    return 4 * (parts * floats + 2 * TILE * GROUP + TILE) + 128


_SUMMARY_BYTES = 4 * (2 * CHANNELS * (TILE + 4) + TILE * GROUP + TILE) + 128


WIDE_PARTS = 2
"""Parts of 32 channels, with 128 threads each, that a wide block has; others have one."""


def _main(
    short: str,
    states: int,
    *,
    large: bool = False,
    kind: str = "",
    constant: int = 0,
    parts: int = 1,
) -> Instance:
    """kind: "" vectors of steps, "_strided" any strides, "_packed" also packed sequences."""
    size = "large" if large else f"n{4 * states}{'_wide' if parts > 1 else ''}"
    flags = (large, kind == "_packed", constant, False, parts, kind == "")
    return Instance(
        suffix=f"{short}_{size}{kind}{f'_constant{constant}' if constant else ''}",
        template=f"{DTYPES[short]}, {states}, {', '.join(str(flag).lower() for flag in flags)}",
        threads=THREADS * parts,
        min_blocks=4 // parts if parts > 1 else 2 if large else 3 if states == 4 else 4,
        shared_bytes=_shared_bytes(large, parts),
    )


def _summary(short: str, kind: str, constant: int = 0) -> Instance:
    flags = (False, kind == "_packed", constant, True, 1, kind == "")
    return Instance(
        suffix=f"{short}_summary{kind}{f'_constant{constant}' if constant else ''}",
        template=f"{DTYPES[short]}, 4, {', '.join(str(flag).lower() for flag in flags)}",
        threads=THREADS,
        min_blocks=6,
        shared_bytes=_SUMMARY_BYTES,
    )


KERNEL = Kernel(
    stem="selective_scan_bwd",
    fields=_FIELDS,
    instances=(
        *(_main(short, 1, kind="_packed") for short in DTYPES),
        *(_main(short, 4, kind=kind) for short in DTYPES for kind in ("", "_packed")),
        *(
            _main(short, 4, kind=kind, parts=WIDE_PARTS)
            for short in DTYPES
            for kind in ("", "_strided", "_packed")
        ),
        *(_main(short, 4, large=True, kind=kind) for short in DTYPES for kind in ("", "_packed")),
        *(_main("f32", 4, large=True, kind="_packed", constant=c) for c in (1, 2, 3)),
        *(_summary(short, kind) for short in DTYPES for kind in ("", "_packed")),
        _summary("f32", "_packed", 2),
    ),
    headers=(
        "marks.cuh",
        "scan.cuh",
        "scan_bwd.cuh",
        "scan_bwd_block.cuh",
        "scan_bwd_tokens.cuh",
        "scan_bwd_steps.cuh",
    ),
)
