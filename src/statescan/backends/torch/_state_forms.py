# SPDX-License-Identifier: Apache-2.0
"""The two forms of the state update seen as one: heads of channels that share B and C.

Only views are made here (and repeats of B and C over heads); no arithmetic.

Mamba-1's channels are cut into as many heads as B and C together have groups, so that its usual
single group becomes one head of all channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """The tensors of a call in one form.

    Attributes:
        state: (slots, heads, channels, dstate).
        x, dt, z, out: (batch, ntokens, heads, channels).
        A: (heads, channels, dstate).
        B, C: (batch, ntokens, heads or 1, 1, dstate).
        D, dt_bias: (heads, channels).
        intermediate_states: (batch, kept_tokens, heads, channels, dstate).

    Axes of A, dt and dt_bias along which nothing changes may have shrunk to 1.
    """

    state: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    intermediate_states: Tensor | None
    out: Tensor


def common_form(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    intermediate_states: Tensor | None,
    out: Tensor,
) -> Step:
    """The tensors of a call of either form as a ``Step``."""
    headed = state.dim() == 4
    several = x.dim() == state.dim()
    B, C = _grouped(B, headed, several), _grouped(C, headed, several)
    heads = state.shape[1] if headed else math.lcm(B.shape[2], C.shape[2])
    channels = state.shape[2] if headed else state.shape[1] // heads

    def split(tensor: Tensor, axis: int) -> Tensor:
        """Heads and channels as two axes."""
        if headed:
            return tensor
        shape = tensor.shape
        return tensor.view(*shape[:axis], heads, channels, *shape[axis + 1 :])

    def activation(tensor: Tensor) -> Tensor:
        tensor = split(tensor, 1)
        if not several:
            return tensor.unsqueeze(1)
        return tensor if headed else tensor.permute(0, 3, 1, 2)

    return Step(
        state=split(state, 1),
        x=activation(x),
        dt=_shrink(activation(dt), 3),
        A=_shrink(split(A, 0), 1, 2),
        B=_per_head(B, heads),
        C=_per_head(C, heads),
        D=None if D is None else split(D, 0),
        z=None if z is None else activation(z),
        dt_bias=None if dt_bias is None else _shrink(split(dt_bias, 0), 1),
        intermediate_states=None if intermediate_states is None else split(intermediate_states, 2),
        out=activation(out),
    )


def _grouped(weight: Tensor, headed: bool, several: bool) -> Tensor:
    """B or C as (batch, ntokens, ngroups, dstate)."""
    if headed:
        weight = weight if several else weight.unsqueeze(1)
        return weight if weight.dim() == 4 else weight.unsqueeze(2)
    weight = weight if several else weight.unsqueeze(-1)
    weight = weight if weight.dim() == 4 else weight.unsqueeze(1)
    return weight.permute(0, 3, 1, 2)


def _per_head(weight: Tensor, heads: int) -> Tensor:
    """(batch, ntokens, heads or 1, 1, dstate) from (batch, ntokens, ngroups, dstate)."""
    ngroups = weight.shape[2]
    if ngroups not in (1, heads):
        weight = weight.repeat_interleave(heads // ngroups, dim=2)
    return weight.unsqueeze(3)


def _shrink(tensor: Tensor, *axes: int) -> Tensor:
    """One entry of axes that are expanded, such as A of Mamba-2: one exponential does for all."""
    for axis in axes:
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
