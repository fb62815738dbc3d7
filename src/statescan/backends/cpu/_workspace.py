# SPDX-License-Identifier: Apache-2.0
"""Memory that kernels work in: scratch for each thread, and sums in parts that are added up.

Nothing here knows an op; how much an op needs is said in its own module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.backends.cpu import threads
from statescan.backends.native import vector_bytes


def workers(scratch_vectors: int) -> tuple[tuple[int, int, int], Tensor]:
    """``struct statescan_workers`` and the memory it points to, which the caller must keep."""
    count = threads.workers()
    scratch_bytes = scratch_vectors * vector_bytes()
    scratch = torch.empty(count * scratch_bytes, dtype=torch.uint8, device="cpu")
    return (count, scratch.data_ptr(), scratch_bytes), scratch


def floats(*shape: int) -> Tensor:
    """Memory for float32 numbers, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def add_up(parts: Tensor) -> Tensor:
    """Sum over the first axis by additions in a fixed order, whatever the number of threads."""
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total
