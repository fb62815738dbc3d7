# SPDX-License-Identifier: Apache-2.0
"""Slots of the two decode ops as the kernels read them; what is checked is checked in ``ops``.

No arithmetic on states: at most a copy of the pool, where rows would read what others write.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    sources = range(write.shape[0]) if read is None else read.tolist()
    moved = {slot: source for slot, source in zip(write.tolist(), sources) if slot != source}
    return pool.clone() if moved.keys() & set(sources) else pool
