# SPDX-License-Identifier: Apache-2.0
"""The kernel that marks the tokens of packed sequences: parameters and instances, no launch."""

from __future__ import annotations

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel

STRETCH = 1024
"""Tokens that a block takes at once, as in the kernel."""

KERNEL = Kernel(
    stem="sequence_marks",
    fields=(
        *((name, POINTER) for name in ("source", "marks", "occupied")),
        *((name, INTEGER) for name in ("source_is_64", "source_batch_stride")),
        *((name, INTEGER) for name in ("source_seqlen_stride", "batch", "seqlen", "num_seqs")),
        *((name, INTEGER) for name in ("words", "reverse")),
    ),
    instances=(
        Instance("bounds", "true", threads=256),
        Instance("ids", "false", threads=256),
    ),
    headers=("marks.cuh",),
)
