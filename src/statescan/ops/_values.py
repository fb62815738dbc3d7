# SPDX-License-Identifier: Apache-2.0
"""Checks the values inside index tensors; called by the registered ops, before any write.

Only CPU tensors are read: on an accelerator a look at the values would stop the stream, so
there kernels clamp instead. Shapes and dtypes are checked in ``_shapes.py``.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from statescan.errors import ArgumentError, SlotIndexError


def check_cu_seqlens(op: str, cu_seqlens: Tensor | None, seqlen: int) -> None:
    """Refuse cu_seqlens that do not start at 0, fall, or end elsewhere than at seqlen."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu":
        return
    values = cu_seqlens.tolist()
    falls = any(later < earlier for earlier, later in pairwise(values))
    if values[0] == 0 and values[-1] == seqlen and not falls:
        return
    shown = str(values) if len(values) <= 8 else f"[{values[0]}, {values[1]}, ..., {values[-1]}]"
    raise ArgumentError(
        f"{op}: argument 'cu_seqlens' is {shown}.\n"
        f"It must start at 0, never fall, and end at seqlen {seqlen}.\n"
        "Build it as the cumulative sum of the sequence lengths with a 0 in front."
    )


def check_slots(
    op: str,
    name: str,
    indices: Tensor | None,
    destinations: Tensor | None,
    num_slots: int,
    pad_slot_id: int,
) -> None:
    """Refuse slot indices past the pool, and a slot that two rows would write.

    Padding rows are not judged: what their other index holds is never used.

    Args:
        op: Name of the public function, for messages.
        name: Name of the argument ``indices``; that of ``destinations`` starts with "dst_".
        indices: (batch,) slots that rows read, and write unless ``destinations`` says otherwise.
        destinations: (batch,) slots that rows write.
        num_slots: How many slots the pool has.
        pad_slot_id: The value that marks a padding row, as negative ones do.
    """
    given = [(name, indices), (f"dst_{name}", destinations)]
    named = [(n, t.tolist()) for n, t in given if t is not None and t.device.type == "cpu"]
    rows = _real_rows(tuple(values for _, values in named), pad_slot_id)
    for argument, values in named:
        slots = [values[row] for row in rows]
        beyond = [slot for slot in slots if slot >= num_slots]
        if beyond:
            raise SlotIndexError(
                f"{op}: argument '{argument}' holds slot {beyond[0]}.\n"
                f"The state pool has {num_slots} slots, 0 to {num_slots - 1}.\n"
                "Use a slot inside the pool, or a negative one for a padding row."
            )
        written = argument != name or destinations is None
        if written and len(set(slots)) != len(slots):
            twice = next(slot for slot in slots if slots.count(slot) > 1)
            raise SlotIndexError(
                f"{op}: argument '{argument}' names slot {twice} twice.\n"
                "Each row must write a slot of its own: the result would depend on the order.\n"
                "Give every row its own destination slot, or run the rows in separate calls."
            )


def check_accepted(
    op: str,
    accepted: Tensor | None,
    ntokens: int,
    slots: tuple[Tensor | None, Tensor | None],
    pad_slot_id: int,
) -> None:
    """Refuse num_accepted_tokens outside 0 to the tokens that intermediate_states can hold.

    ``slots`` are the indices of ``check_slots``: padding rows are not judged here either.
    """
    if accepted is None or accepted.device.type != "cpu":
        return
    counts = _counts(accepted, slots, pad_slot_id)
    wrong = [count for count in counts if not 0 <= count <= ntokens]
    if wrong:
        raise ArgumentError(
            f"{op}: argument 'num_accepted_tokens' holds {wrong[0]}.\n"
            f"intermediate_states holds {ntokens} tokens, so it must be from 0 to {ntokens}.\n"
            "Give the number of tokens of the previous call that were accepted."
        )


def check_seen(
    op: str,
    cache_seqlens: Tensor | None,
    slots: tuple[Tensor | None, Tensor | None],
    pad_slot_id: int,
) -> None:
    """Refuse negative cache_seqlens, which would wrap to the ring's end; padding rows aside."""
    if cache_seqlens is None or cache_seqlens.device.type != "cpu":
        return
    wrong = [count for count in _counts(cache_seqlens, slots, pad_slot_id) if count < 0]
    if wrong:
        raise ArgumentError(
            f"{op}: argument 'cache_seqlens' holds {wrong[0]}.\n"
            "It counts the tokens that a row has seen, so it must be at least 0.\n"
            "Give a padding row a negative slot index instead."
        )


def _counts(
    counts: Tensor, slots: tuple[Tensor | None, Tensor | None], pad_slot_id: int
) -> list[int]:
    """The numbers of the rows that are not padding."""
    values: list[int] = counts.tolist()
    named = tuple(t.tolist() for t in slots if t is not None and t.device.type == "cpu")
    return [values[row] for row in _real_rows(named, pad_slot_id)] if named else values


def _real_rows(indices: tuple[list[int], ...], pad_slot_id: int) -> list[int]:
    """The rows none of whose slots marks padding."""
    pairs = enumerate(zip(*indices))
    return [row for row, slots in pairs if all(0 <= slot != pad_slot_id for slot in slots)]
