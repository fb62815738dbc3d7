# SPDX-License-Identifier: Apache-2.0
"""The decode step of the causal convolution: parameters and instances, no launch."""

from __future__ import annotations

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel
from statescan.backends.cuda.tables.causal_conv1d_fwd import TYPES

CHANNELS = 4
"""Neighbouring channels of a thread of the dense instances."""

STATE_LENS = (3, 4)
"""The state lengths that these exist for."""

THREADS = 128

TENSORS = ("x", "out", "state", "start", "kept", "weight", "bias")
LISTS = ("read", "write", "accepted", "positions")

KERNEL = Kernel(
    stem="causal_conv1d_update",
    fields=(
        *((name, POINTER) for name in (*TENSORS, *LISTS)),
        *((f"x_{axis}_stride", INTEGER) for axis in ("row", "channel", "token")),
        *((f"out_{axis}_stride", INTEGER) for axis in ("row", "channel", "token")),
        *((f"state_{axis}_stride", INTEGER) for axis in ("row", "channel", "column")),
        *((f"start_{axis}_stride", INTEGER) for axis in ("row", "channel", "column")),
        *((f"kept_{axis}_stride", INTEGER) for axis in ("row", "token", "channel", "column")),
        *((f"weight_{axis}_stride", INTEGER) for axis in ("dim", "width")),
        ("bias_dim_stride", INTEGER),
        *((f"{name}_dtype", INTEGER) for name in ("x", "out", "state", "kept", "weight", "bias")),
        *((f"{name}_bits", INTEGER) for name in LISTS),
        *((f"{name}_stride", INTEGER) for name in LISTS),
        *((name, INTEGER) for name in ("num_slots", "pad_slot", "start_by_row", "kept_tokens")),
        *((name, INTEGER) for name in ("batch", "num_tokens", "dim", "width", "state_len")),
        *((name, INTEGER) for name in ("silu", "rows")),
    ),
    instances=(
        *(
            Instance(f"{name}_columns{columns}", f"{kind}, {columns}", threads=THREADS)
            for name, kind in TYPES
            for columns in STATE_LENS
        ),
        Instance("any", "float, 0", threads=THREADS),
    ),
    headers=("marks.cuh", "conv.cuh", "decode.cuh"),
)
