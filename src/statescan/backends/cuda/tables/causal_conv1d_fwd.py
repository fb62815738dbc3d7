# SPDX-License-Identifier: Apache-2.0
"""The forward causal convolution: parameters and instances, no launch."""

from __future__ import annotations

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel

VECTOR = 8
"""Tokens of a vector of the instances for rows."""

ROW_VECTORS = 4
"""Vectors that a thread of them makes at once."""

WALK_CHANNELS = 2
"""Neighbouring channels that a thread of the instances for channel-last has."""

TYPES = (("float32", "float"), ("bfloat16", "bf16"), ("float16", "f16"))

INSTANCES = (
    *(
        Instance(
            f"rows_{name}_taps{taps}",
            f"ROWS, {kind}, {taps}, {ROW_VECTORS}",
            threads=128,
            min_blocks=6 if taps == 4 else 5,
        )
        for name, kind in TYPES
        for taps in (4, 8)
    ),
    *(
        Instance(
            f"walk_{name}_taps{taps}",
            f"WALK, {kind}, {taps}, {WALK_CHANNELS}",
            threads=128,
            min_blocks=8 if taps == 4 else 4,
        )
        for name, kind in TYPES
        for taps in (4, 8)
    ),
    Instance("walk_any", "WALK, any_t, 8, 1", threads=128),
    Instance("any", "ANY, float, 1, 1", threads=128),
)

KERNEL = Kernel(
    stem="causal_conv1d_fwd",
    fields=(
        *((name, POINTER) for name in ("x", "out", "weight", "bias", "initial_states")),
        *((name, POINTER) for name in ("final_states", "marks", "occupied")),
        ("words", INTEGER),
        *((f"x_{axis}_stride", INTEGER) for axis in ("batch", "dim", "seqlen")),
        *((f"out_{axis}_stride", INTEGER) for axis in ("batch", "dim", "seqlen")),
        *((f"weight_{axis}_stride", INTEGER) for axis in ("dim", "width")),
        ("bias_dim_stride", INTEGER),
        *((f"initial_{axis}_stride", INTEGER) for axis in ("batch", "dim", "width")),
        *((f"{name}_dtype", INTEGER) for name in ("x", "weight", "bias", "initial")),
        *((name, INTEGER) for name in ("batch", "dim", "seqlen", "width", "silu", "reverse")),
        ("stretch", INTEGER),
    ),
    instances=INSTANCES,
    headers=("marks.cuh", "conv.cuh", "conv_fwd.cuh", "conv_fwd_rows.cuh"),
)
