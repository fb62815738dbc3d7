# SPDX-License-Identifier: Apache-2.0
"""Slots of the two decode ops as the kernels read them.

No arithmetic: at most a copy of the states that rows start from, or other memory for the output,
where rows would read what others write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.backends.outputs import overlaps


def starting_pool(pool: Tensor, read: Tensor | None, write: Tensor | None) -> tuple[Tensor, bool]:
    """The states that rows start from, and whether they lie there by row instead of by slot.

    With slots of their own to write to, a row may write what another row of the same launch has
    yet to read, and the host cannot see whether one does: the rows' states are then copied first.
    """
    if write is None:
        return pool, False
    if read is None:
        return pool.clone(), False
    return pool.index_select(0, read.clamp(0, pool.shape[0] - 1)), True


def list_fields(*lists: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Width of the integers of each list in bits, and their strides."""
    bits = tuple(64 if t is not None and t.dtype == torch.int64 else 32 for t in lists)
    return bits, tuple(0 if t is None else t.stride(0) for t in lists)


def separate(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """``out``, or memory like it where rows would write what other rows have yet to read."""
    return torch.empty_like(out) if overlaps(out, *inputs) else out


def meets(first: Tensor, second: Tensor | None) -> bool:
    """Whether two tensors may have memory in common."""
    if second is None:
        return False
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride())
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()
