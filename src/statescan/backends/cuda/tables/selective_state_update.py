# SPDX-License-Identifier: Apache-2.0
"""The decode step of the SSM state: parameters and instances, no launch."""

from __future__ import annotations

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel
from statescan.backends.cuda.tables.causal_conv1d_fwd import TYPES

THREADS = 128

CHANNELS = 2
"""Channels that a group of lanes has at once on the road of channels, 4 states a lane."""

HEAD_VECTORS = 4
"""Vectors of 4 states that a lane has of a channel on the road of heads."""

PAIRS = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
)
"""Formats of states and of activations that plain instances exist for."""

ANY_VECTORS = (1, 8)
"""Vectors of a lane in the instances for all other calls."""

MOST_STATES = 32 * 4 * ANY_VECTORS[-1]
"""More are for another backend."""

TABLES = ("state", "start", "kept", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out")
LISTS = ("read", "write", "accepted")
AXES = {
    "state": ("row", "head", "channel", "state"),
    "start": ("row", "head", "channel", "state"),
    "kept": ("row", "token", "head", "channel", "state"),
    "x": ("row", "token", "head", "channel"),
    "dt": ("row", "token", "head", "channel"),
    "A": ("head", "channel", "state"),
    "B": ("row", "token", "group", "state"),
    "C": ("row", "token", "group", "state"),
    "D": ("head", "channel"),
    "z": ("row", "token", "head", "channel"),
    "dt_bias": ("head", "channel"),
    "out": ("row", "token", "head", "channel"),
}

_NUMBERS = dict(TYPES)

KERNEL = Kernel(
    stem="selective_state_update",
    fields=(
        *((name, POINTER) for name in (*TABLES, *LISTS)),
        *((f"{name}_{axis}_stride", INTEGER) for name in TABLES for axis in AXES[name]),
        *((f"{name}_dtype", INTEGER) for name in TABLES if name != "start"),
        *((f"{name}_vectors", INTEGER) for name in ("state", "start", "kept", "A", "B", "C")),
        *((f"{name}_bits", INTEGER) for name in LISTS),
        *((f"{name}_stride", INTEGER) for name in LISTS),
        *((name, INTEGER) for name in ("num_slots", "pad_slot", "start_by_row", "kept_tokens")),
        *((name, INTEGER) for name in ("batch", "num_tokens", "num_heads", "head_channels")),
        *((name, INTEGER) for name in ("dstate", "B_heads", "C_heads", "dt_softplus", "A_is_log")),
        *((name, INTEGER) for name in ("lanes", "head_tiles", "tile_channels")),
    ),
    instances=(
        *(
            Instance(
                f"{state}_{activation}_{road}",
                f"{number}, {_NUMBERS[state]}, {_NUMBERS[activation]}, {count}",
                threads=THREADS,
                min_blocks=5,
            )
            for state, activation in PAIRS
            for number, road, count in ((1, "channels", CHANNELS), (2, "heads", HEAD_VECTORS))
        ),
        *(
            Instance(f"{state}_any{vectors}", f"0, {number}, {number}, {vectors}", THREADS)
            for state, number in TYPES
            for vectors in ANY_VECTORS
        ),
    ),
    headers=("marks.cuh", "conv.cuh", "decode.cuh", "state_update_plain.cuh"),
)
