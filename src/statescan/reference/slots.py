# SPDX-License-Identifier: Apache-2.0
"""Which slot each row of a decode step reads and writes, padding rows and rollback.

Shared by both update references; no arithmetic on states here. What is written carries no
gradient: only the outputs of a step are differentiable.
"""

from dataclasses import dataclass

import torch

from statescan.errors import ArgumentError


@dataclass(frozen=True)
class RowSlots:
    """One real row of a decode step.

    Attributes:
        batch_index: Its place in the batch.
        start: A copy of the state that it starts from, in the pool's dtype.
        destination: The slot (a view of the pool) that it writes.
        history: Its part of intermediate_states (a view), or None.
        speculative: Whether the slot keeps the starting state instead of the last one.
    """

    batch_index: int
    start: torch.Tensor
    destination: torch.Tensor
    history: torch.Tensor | None
    speculative: bool

    def record(self, token: int, state: torch.Tensor) -> None:
        """Note the state after a token, for a later call to return to."""
        if self.history is not None:
            self.history[token] = state.detach().to(self.history.dtype)

    def store(self, last: torch.Tensor) -> None:
        """Write the destination slot at the end of the row."""
        self.destination.copy_((self.start if self.speculative else last).detach())


def find_slots(
    pool: torch.Tensor,
    batch: int,
    indices: torch.Tensor | None,
    dst_indices: torch.Tensor | None,
    pad_slot_id: int,
    intermediate_states: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
) -> list[RowSlots]:
    """The rows that are not padding, with their starting states read before anything is written.

    With num_accepted_tokens the tokens of the previous call were guesses. Row b continues from
    the state after the first n = num_accepted_tokens[b] of them, which that call left in
    intermediate_states[b, n - 1], or from its slot if n is 0. The slot then receives this
    starting state, since the new tokens are guesses again.
    """
    if num_accepted_tokens is not None and intermediate_states is None:
        raise ArgumentError(
            "num_accepted_tokens was given without intermediate_states.\n"
            "Pass the intermediate_states that the previous call filled."
        )
    sources = list(range(batch)) if indices is None else indices.tolist()
    destinations = sources if dst_indices is None else dst_indices.tolist()
    # Only a slot that was asked for marks padding, not the number of a row without one.
    asked = [slots.tolist() for slots in (indices, dst_indices) if slots is not None]
    accepted = [0] * batch if num_accepted_tokens is None else num_accepted_tokens.tolist()
    rows = []
    for b, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if any(slots[b] < 0 or slots[b] == pad_slot_id for slots in asked):
            continue
        history = None if intermediate_states is None else intermediate_states[b]
        start = pool[source]
        if history is not None and accepted[b] > 0:
            start = history[accepted[b] - 1]
        rows.append(
            RowSlots(b, start.clone(), pool[destination], history, num_accepted_tokens is not None)
        )
    return rows
