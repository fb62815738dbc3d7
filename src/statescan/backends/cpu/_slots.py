# SPDX-License-Identifier: Apache-2.0
"""Slots of the two decode ops as the kernels read them; what is checked is checked in ``ops``.

No arithmetic: at most a copy of the pool, or other memory for the output, where rows would read
what others write.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from statescan.backends.outputs import overlaps


def slot_fields(
    read: Tensor | None, write: Tensor | None, accepted: Tensor | None, pad_slot_id: int
) -> tuple[tuple[int, int, int, int], tuple[Tensor | None, ...]]:
    """``struct statescan_slots``, and the tensors that it points into."""
    if read is None and write is None and accepted is None:
        return (0, 0, 0, pad_slot_id), ()
    lists = tuple(_indices(tensor) for tensor in (read, write, accepted))
    first, second, third = (0 if t is None else t.data_ptr() for t in lists)
    return (first, second, third, pad_slot_id), lists


def _indices(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int64).contiguous()


def starting_pool(pool: Tensor, read: Tensor | None, write: Tensor | None) -> Tensor:
    """The pool, or a copy if a row writes a slot that another row reads."""
    if write is None:
        return pool
    sources = list(range(write.shape[0])) if read is None else read.tolist()
    readers = Counter(sources)
    for slot, source in zip(write.tolist(), sources):
        if slot >= 0 and readers[slot] > (slot == source):
            return pool.clone()
    return pool


def separate(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """``out``, or memory like it where rows would write what other rows have yet to read."""
    return torch.empty_like(out) if overlaps(out, *inputs) else out
