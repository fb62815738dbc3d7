# SPDX-License-Identifier: Apache-2.0
"""The backward of the causal convolution: parameters and instances, no launch."""

from __future__ import annotations

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel
from statescan.backends.cuda.tables.causal_conv1d_fwd import TYPES

ROW_THREADS = 128
"""Threads of a block of the instances for rows, as in the kernel."""

ROW_TILES = 2
"""Tiles of 8 tokens that a lane of them has on their way at once, with up to 4 taps."""

WALK_CHANNELS = 2
"""Neighbouring channels that a thread of the instances for channel-last has."""

INSTANCES = (
    *(
        Instance(
            f"rows_{name}_taps{taps}",
            f"ROWS, {kind}, {taps}, {ROW_TILES if taps == 4 else 1}",
            threads=ROW_THREADS,
            min_blocks=4,
        )
        for name, kind in TYPES
        for taps in (4, 8)
    ),
    *(
        Instance(
            f"walk_{name}_taps{taps}",
            f"WALK, {kind}, {taps}, {WALK_CHANNELS}",
            threads=128,
            min_blocks=4 if taps == 4 else 3,
        )
        for name, kind in TYPES
        for taps in (4, 8)
    ),
    Instance("walk_any", "WALK, any_t, 8, 1", threads=128),
    Instance("any", "ANY, float, 1, 1", threads=128),
    Instance("sums", "SUMS, float, 1, 1", threads=1024),
)

KERNEL = Kernel(
    stem="causal_conv1d_bwd",
    fields=(
        *((name, POINTER) for name in ("dout", "x", "dx", "weight", "bias", "initial_states")),
        *((name, POINTER) for name in ("dfinal_states", "dinitial_states", "partials")),
        *((name, POINTER) for name in ("dweight", "dbias", "marks", "occupied")),
        ("words", INTEGER),
        *((f"dout_{axis}_stride", INTEGER) for axis in ("batch", "dim", "seqlen")),
        *((f"x_{axis}_stride", INTEGER) for axis in ("batch", "dim", "seqlen")),
        *((f"dx_{axis}_stride", INTEGER) for axis in ("batch", "dim", "seqlen")),
        *((f"weight_{axis}_stride", INTEGER) for axis in ("dim", "width")),
        ("bias_dim_stride", INTEGER),
        *((f"initial_{axis}_stride", INTEGER) for axis in ("batch", "dim", "width")),
        *((f"dfinal_{axis}_stride", INTEGER) for axis in ("batch", "dim", "width")),
        *((f"dinitial_{axis}_stride", INTEGER) for axis in ("batch", "dim", "width")),
        *((f"{n}_dtype", INTEGER) for n in ("dout", "x", "weight", "bias", "initial", "dfinal")),
        *((name, INTEGER) for name in ("batch", "dim", "seqlen", "width", "silu", "reverse")),
        *((name, INTEGER) for name in ("lead", "parts", "part_size", "part_rows")),
    ),
    instances=INSTANCES,
    headers=("marks.cuh", "conv.cuh", "conv_bwd.cuh", "conv_bwd_rows.cuh", "conv_bwd_walk.cuh"),
)
