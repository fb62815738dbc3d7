# SPDX-License-Identifier: Apache-2.0
"""The recurrence of a block, forwards and backwards, one torch operation a step.

Only what happens inside a block and where sequences meet; blocks are cut and filled elsewhere.
"""

from __future__ import annotations

from math import e, log2
from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends.torch._selective_scan_blocks import fold, pieces
from statescan.backends.torch.sequences import Boundary

# Elements of which torch gives all to one thread, and of twice as many half to each of two.
_HALF = 1 << 15


class Ends(NamedTuple):
    """The states at both ends of sequences, as (num_states, dstate, dim) views of some channels.

    ``entering`` is what a sequence starts from, ``leaving`` where its last state goes. Either may
    be None: zeros, or unwanted. The backward uses the same with the roles exchanged.
    """

    entering: Tensor | None
    leaving: Tensor | None

    def of(self, channels: slice) -> Ends:
        """The same states, of some channels only."""
        return Ends(*(None if part is None else part[..., channels] for part in self))

    def pass_through(self, states: slice) -> None:
        """A sequence without tokens leaves what it starts from."""
        if self.leaving is not None:
            self.leaving[states] = 0 if self.entering is None else self.entering[states]


def fill_decay(dt: Tensor, rate: Tensor, out: Tensor, piece: int) -> None:
    """out = exp(dt A) for (steps, rows, dim) dt and (dstate, dim) ``decay_rate(A)``.

    ``piece`` is the number of steps that an operation may cover; it does not change the result.
    """
    for dt_piece, out_piece in pieces(piece, dt[:, :, None], out):
        torch.mul(dt_piece, rate, out=out_piece)
    if out.is_complex():
        out.exp_()
    elif out.device.type != "cpu":
        out.exp2_()
    else:
        _exp2_(out.view(-1), shared=piece == len(out))


def _exp2_(values: Tensor, shared: bool) -> None:
    """Powers of two in place, with equal bits however many threads share it.

    The vector code of torch and the scalar code for what is left over round differently, so each
    thread's part must be whole vectors. It is if two threads share 65536 elements, and if nothing
    is shared; what is left over after whole vectors is then the same, at the end of all.
    """
    size = 2 * _HALF if shared else _HALF
    for part in values.split(size):
        for piece in part.split(size if len(part) == size else _HALF - 32):
            piece.exp2_()


def decay_rate(A: Tensor, state: torch.dtype) -> Tensor:
    """(dim, dstate) A as (dstate, dim) in the dtype of the states, real A for powers of two.

    On CPUs torch's ``exp2`` is up to twice as fast as its ``exp`` (1.2e9 against 0.65e9 a second on
    one Zen 3 core, float32); where the result underflows, ten times.
    """
    if not A.is_complex():
        A = A.to(torch.float64 if A.device.type == "cpu" else state) * log2(e)
    return A.t().to(state).contiguous()


def walk(
    decay: Tensor, states: Tensor, boundaries: dict[int, Boundary], first: int, ends: Ends
) -> dict[int, Tensor]:
    """Run the recurrence over a chunk.

    Args:
        decay: (steps, rows, dstate, dim).
        states: (steps + 1, ...): the state before the chunk, then the inputs of its steps, which
            the states replace.
        boundaries: Where sequences meet, by step of the whole scan.
        first: The chunk's first step.
        ends: Initial states to enter, final states to write.

    Returns:
        The states that entered where a sequence begins, by step of the chunk.
    """
    entered = {}
    state, *inputs = states.unbind(0)
    for step, (factor, new) in enumerate(zip(decay.unbind(0), inputs, strict=True)):
        boundary = boundaries.get(first + step)
        if boundary is not None:
            state = entered[step] = cross(boundary, state, ends)
        state = new.addcmul_(factor, state)
    return entered


def walk_back(
    decay: Tensor,
    gradients: Tensor,
    carry: Tensor,
    boundaries: dict[int, Boundary],
    first: int,
    ends: Ends,
) -> Tensor:
    """The recurrence of the gradients of the states, from a chunk's last step to its first.

    Args:
        decay: (steps, rows, dstate, dim), conjugate if complex.
        gradients: Likewise: what each state receives from its own token; the whole replaces it.
        carry: What the last state receives from later tokens.
        boundaries: Where sequences meet.
        first: The chunk's first step.
        ends: Gradients of final states to enter, gradients of initial states to write.

    Returns:
        What the state before the chunk receives.
    """
    steps = zip(reversed(decay.unbind(0)), reversed(gradients.unbind(0)), strict=True)
    factor: Tensor | None = None
    later = carry
    step = first + decay.shape[0]
    for next_factor, gradient in steps:
        boundary = boundaries.get(step) if factor is not None else None
        if factor is None:
            gradient.add_(later)
        elif boundary is None:
            gradient.addcmul_(factor, later)
        else:
            gradient.add_(cross_back(boundary, factor * later, ends))
        factor, later = next_factor, gradient
        step -= 1
    carry = later if factor is None else factor * later
    boundary = boundaries.get(first)
    return carry if boundary is None else cross_back(boundary, carry, ends)


def accumulate(total: Tensor, states: Tensor, values: Tensor) -> None:
    """Add the sum over steps and rows of states times values to ``total``, (dstate, dim).

    Args:
        total: Changed.
        states: (steps, rows, dstate, dim).
        values: (steps, rows, dim).
    """
    by_row = torch.zeros_like(states[0])
    for state, value in zip(states.unbind(0), values[:, :, None].unbind(0), strict=True):
        by_row.addcmul_(state, value)
    total += fold(by_row, 0)


def cross(boundary: Boundary, state: Tensor, ends: Ends) -> Tensor:
    """The state after a boundary: old sequences hand theirs over, new ones enter with their own.

    Rows are overwritten, never scaled by zero, so that a NaN stays in its sequence.
    """
    for rows, index in boundary.ends:
        if ends.leaving is not None:
            ends.leaving[index] = state[rows]
    state = state.clone()
    for rows, start in boundary.begins:
        if ends.entering is None or start is None:
            state[rows] = 0
        else:
            state[rows] = ends.entering[start]
    return state


def cross_back(boundary: Boundary, carry: Tensor, ends: Ends) -> Tensor:
    """What the states before a boundary receive; changes ``carry``.

    What reached the beginning of a sequence goes to its initial state, and the end of the one
    before receives the gradient of its final state.
    """
    for rows, start in boundary.begins:
        if ends.leaving is not None and start is not None:
            ends.leaving[start] = carry[rows]
        carry[rows] = 0
    for rows, index in boundary.ends:
        if ends.entering is not None:
            carry[rows] += ends.entering[index]
    return carry
