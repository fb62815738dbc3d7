# SPDX-License-Identifier: Apache-2.0
"""Slots of the two decode ops: which state each row reads and writes, padding rows and rollback.

Works with any state shape (slots, ...); no arithmetic on states belongs here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Where the rows of one call find and leave their states; None stands for "row b, slot b".

    A padding row works as a copy of a real row: it reads that row's inputs and state, and writes
    the same numbers to the same place. So no padding state is touched, and on accelerators the
    host need not know how many rows are real.

    Attributes:
        rows: (batch,) the row that each one works as; None when all are real.
        read, write: (batch,) slots.
        real: (batch,) whether a row is real; None when all are.
    """

    rows: Tensor | None
    read: Tensor | None
    write: Tensor | None
    real: Tensor | None

    def take(self, tensor: Tensor) -> Tensor:
        """A (batch, ...) input with padding rows replaced."""
        return tensor if self.rows is None else tensor[self.rows]

    def start(
        self, pool: Tensor, intermediate_states: Tensor | None, accepted: Tensor | None
    ) -> Tensor:
        """The states (batch, ...) that rows start from.

        The pool itself if each row goes on in its own slot, else a copy.
        """
        if self.read is not None:
            states = pool[self.read]
        else:
            states = pool if self.write is None else pool.clone()
        if accepted is None or intermediate_states is None or intermediate_states.shape[1] == 0:
            return states
        row = self.rows
        if row is None:
            row = torch.arange(accepted.shape[0], device=pool.device)
        count = accepted[row].to(torch.int64)
        kept = intermediate_states[row, (count - 1).clamp(0, intermediate_states.shape[1] - 1)]
        return torch.where((count > 0).view(-1, *[1] * (pool.dim() - 1)), kept, states)

    def store(self, pool: Tensor, states: Tensor) -> None:
        """Write (batch, ...) states to their slots, in the pool's dtype."""
        if self.write is None:
            pool.copy_(states)
            return
        states = states.to(pool.dtype)
        if self.real is not None and pool.device.type != "cpu":
            # If there is nothing but padding, every row works as row 0 and gives its slot back
            # what it held.
            states = torch.where(self.real.any(), states, pool[self.write])
        pool[self.write] = states

    def record(self, intermediate_states: Tensor, tokens: slice, states: Tensor) -> None:
        """Note the (batch, tokens, ...) states after some tokens."""
        if self.rows is None:
            intermediate_states[:, tokens] = states
            return
        states = states.to(intermediate_states.dtype)
        if intermediate_states.device.type != "cpu" and self.real is not None:
            states = torch.where(self.real.any(), states, intermediate_states[self.rows, tokens])
        intermediate_states[self.rows, tokens] = states

    def finish(self, out: Tensor, values: Tensor) -> None:
        """Write (batch, ...) results, 0 for padding rows."""
        if self.real is not None:
            values = values.masked_fill(~self.real.view(-1, *[1] * (values.dim() - 1)), 0.0)
        out.copy_(values)


_ALL_ROWS = Slots(None, None, None, None)


def find_slots(
    batch: int,
    num_slots: int,
    indices: Tensor | None,
    dst_indices: Tensor | None,
    pad_slot_id: int,
) -> Slots | None:
    """The slots of a call; None when it is known that no row is real.

    A row is padding if either of its indices is negative or ``pad_slot_id``.
    """
    if batch == 0:
        return None
    if indices is None and dst_indices is None:
        return _ALL_ROWS
    given = [slots.to(torch.int64) for slots in (indices, dst_indices) if slots is not None]
    if given[0].device.type == "cpu":
        marks = [[0 <= slot != pad_slot_id for slot in slots.tolist()] for slots in given]
        flags = [all(pair) for pair in zip(*marks)]
        if not any(flags):
            return None
        if all(flags):
            return Slots(None, None if indices is None else given[0], given[-1], None)
        real = torch.tensor(flags)
    else:
        real = torch.stack([(slots >= 0) & (slots != pad_slot_id) for slots in given]).all(0)
    row = torch.arange(batch, device=real.device)
    rows = torch.where(real, row, real.to(torch.int8).argmax())
    # Indices are not checked on accelerators: clamping keeps wrong ones inside the pool.
    read, write = (slots[rows].clamp(0, num_slots - 1) for slots in (given[0], given[-1]))
    return Slots(rows, rows if indices is None else read, write, real)
