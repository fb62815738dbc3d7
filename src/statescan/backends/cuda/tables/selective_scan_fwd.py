# SPDX-License-Identifier: Apache-2.0
"""The forward selective scan on CUDA: its parameters, and which shapes are compiled.

Which instance serves a call is decided in ``backends/cuda/selective_scan.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel


class Shape(NamedTuple):
    """How the work is laid out in a block of threads.

    Attributes:
        lanes: Lanes that share channels.
        states: States of a channel that a lane owns.
        channels: Channels that lanes share.
        steps: Steps that a warp walks at once.
        tile: Tokens of B and C that a block of threads holds at once.
        ahead: Steps that decays are made ahead.
        warps: Warps of a block of threads.
        blocks: Blocks of threads that shall fit on a multiprocessor.
    """

    lanes: int
    states: int
    channels: int
    steps: int
    tile: int
    ahead: int
    warps: int
    blocks: int

    @property
    def block_channels(self) -> int:
        """Channels of a block of threads."""
        return self.warps * self.channels * 32 // self.lanes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: two tiles of B and of C, and two blocks of pairs."""
        groups = max(1, self.lanes * self.states // 4)
        floats = 4 * self.tile * 4 * (groups | 1)
        return 4 * (floats + 2 * self.block_channels * 2 * (self.steps + 2))


DTYPES = ("float", "bf16", "f16")
"""The formats of x, dt, z, B, C and out."""

SHAPES = {
    "s4": Shape(1, 4, 1, 8, 64, 0, 4, 3),
    "s8": Shape(2, 4, 1, 16, 64, 0, 4, 3),
    "s16": Shape(4, 4, 1, 16, 32, 0, 4, 4),
    "s16_many": Shape(2, 8, 1, 16, 32, 0, 4, 4),
    "s16_few": Shape(8, 2, 1, 32, 64, 2, 4, 4),
    "s32": Shape(8, 4, 1, 16, 32, 0, 4, 3),
    "s64": Shape(8, 8, 2, 16, 16, 0, 4, 2),
    "s128": Shape(16, 8, 1, 16, 16, 0, 4, 3),
    "s256": Shape(16, 16, 1, 16, 16, 0, 4, 2),
}
"""Named by the states that fit; for up to 16 also for many and for few channels."""

_HALF = ("s16", "s16_many", "s16_few")
"""Shapes that float16 has its own instances of; elsewhere it is cast to float32."""

_VECTOR_ONLY = ("s16_many", "s16_few")

_FIRST_PASSES = (("s16_many", "vector_summary"), ("s16", "summary"), ("s64", "vector_summary"))
"""For time cut into stretches."""

_FIELDS = (
    *((name, POINTER) for name in ("x", "dt", "z", "out", "B", "C", "A", "D", "dt_bias")),
    *((name, POINTER) for name in ("initial_states", "final_states", "chunk_states")),
    *((name, POINTER) for name in ("marks", "workspace")),
    *(
        (f"{tensor}_{axis}_stride", INTEGER)
        for tensor in ("x", "dt", "z", "out")
        for axis in ("batch", "dim", "seqlen")
    ),
    *(
        (f"{tensor}_{axis}_stride", INTEGER)
        for tensor in ("B", "C")
        for axis in ("batch", "group", "dstate", "seqlen")
    ),
    *((name, INTEGER) for name in ("B_group_size", "C_group_size", "B_constant", "C_constant")),
    *((name, INTEGER) for name in ("batch", "dim", "seqlen", "dstate", "state_row")),
    *((name, INTEGER) for name in ("chunk_size", "num_chunks", "unit_channels")),
    *((name, INTEGER) for name in ("blocks_per_unit", "blocks_per_row")),
    *((name, INTEGER) for name in ("num_stretches", "stretch_steps")),
    *((name, INTEGER) for name in ("marks_stride", "dt_softplus", "weights_mode")),
    *((name, INTEGER) for name in ("vector_states", "decay_shift")),
    *((f"{tensor}_item_stride", INTEGER) for tensor in ("x", "dt", "z", "out")),
    *((name, INTEGER) for name in ("item_teams", "item_steps")),
)

_KINDS = {
    "vector": "true",
    "any": "false",
    "constant": "false, true",
    "summary": "false, false, true",
    "vector_summary": "true, false, true",
}
"""Template arguments behind the shape: VECTOR, CONSTANT, SUMMARY."""


def _instance(dtype: str, name: str, kind: str) -> Instance:
    shape = SHAPES[name]
    wide = dtype == "float"
    # Raw tokens in float32 take twice the registers.
    blocks = 3 if wide and name in _VECTOR_ONLY else shape.blocks
    return Instance(
        suffix=f"{'f32' if wide else dtype}_{name}_{kind}",
        template=", ".join((dtype, *map(str, shape[:-1]), _KINDS[kind])),
        threads=32 * shape.warps,
        min_blocks=2 if kind == "constant" else blocks,
        shared_bytes=shape.shared_bytes,
    )


def _kinds(name: str) -> tuple[str, ...]:
    return ("vector",) if name in _VECTOR_ONLY else ("vector", "any")


def _formats(name: str) -> tuple[str, ...]:
    return DTYPES if name in _HALF else DTYPES[:2]


KERNEL = Kernel(
    stem="selective_scan_fwd",
    fields=_FIELDS,
    instances=(
        *(
            _instance(dtype, name, kind)
            for name in SHAPES
            for kind in _kinds(name)
            for dtype in _formats(name)
        ),
        *(_instance("float", name, "constant") for name in ("s16", "s256")),
        *(_instance(dtype, name, kind) for name, kind in _FIRST_PASSES for dtype in _formats(name)),
    ),
    headers=("marks.cuh", "scan.cuh", "scan_weights.cuh", "scan_tokens.cuh"),
)
