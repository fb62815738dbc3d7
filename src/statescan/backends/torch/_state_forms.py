# SPDX-License-Identifier: Apache-2.0
"""The two forms of the state update seen as one: heads of channels that share B and C.

Only views are made here, and repeats of B and C over heads; no arithmetic.

Mamba-1's channels are cut into as many heads as B and C together have groups, or left alone in the
usual case of one. Each call of torch costs about a microsecond, as
much as the arithmetic of a small step: hence tokens by themselves, not an axis of one token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Token(NamedTuple):
    """What belongs to one token of all rows.

    Attributes:
        x, z, out: (batch, *channels).
        dt: The same, or 1 channel where all channels of a head share it.
        B, C: Such that they broadcast against (batch, *channels, dstate).
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor | None
    out: Tensor


class Step(NamedTuple):
    """The tensors of a call in one form; channels are (heads, channels) or just (channels,).

    Attributes:
        state: (slots, *channels, dstate).
        A: (*channels, dstate); axes along which nothing changes may have shrunk to 1.
        D, dt_bias: (*channels,), the latter shrunk like A.
        intermediate_states: (batch, kept_tokens, *channels, dstate).
        tokens: In their order.
    """

    state: Tensor
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    intermediate_states: Tensor | None
    tokens: list[Token]


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

    if headed:
        heads, channels = state.shape[1:3]
    else:
        # B and C may have different numbers of groups: heads must divide into both.
        heads = math.lcm(*(t.shape[1] if t.dim() == 3 + several else 1 for t in (B, C)))
        channels = state.shape[1] // heads

    def split(tensor: Tensor, axis: int) -> Tensor:
        """Heads and channels as two axes, if there are several heads."""
        if headed or heads == 1:
            return tensor
        shape = tensor.shape
        return tensor.view(*shape[:axis], heads, channels, *shape[axis + 1 :])

    def tokens(tensor: Tensor) -> tuple[Tensor, ...]:
        """(batch, ...) of each token."""
        return tensor.unbind(1 if headed else -1) if several else (tensor,)

    gates = (None,) * len(tokens(x)) if z is None else tuple(split(t, 1) for t in tokens(z))
    return Step(
        state=split(state, 1),
        A=_shrink(split(A, 0), -2, -1),
        D=None if D is None else split(D, 0),
        dt_bias=None if dt_bias is None else _shrink(split(dt_bias, 0), -1),
        intermediate_states=None if intermediate_states is None else split(intermediate_states, 2),
        tokens=[
            Token(
                x=split(x_now, 1),
                dt=_shrink(split(dt_now, 1), -1),
                B=_per_channel(B_now, heads, headed),
                C=_per_channel(C_now, heads, headed),
                z=gate,
                out=split(out_now, 1),
            )
            for x_now, dt_now, B_now, C_now, gate, out_now in zip(
                *(tokens(x), tokens(dt), tokens(B), tokens(C), gates, tokens(out))
            )
        ],
    )


def _per_channel(weight: Tensor, heads: int, headed: bool) -> Tensor:
    """(batch, heads or 1, 1, dstate) from (batch[, ngroups], dstate); no heads if there is one."""
    if weight.dim() == 2:
        weight = weight.unsqueeze(1)
    if heads == 1 and not headed:
        return weight
    ngroups = weight.shape[1]
    if 1 < ngroups != heads:
        weight = weight.repeat_interleave(heads // ngroups, dim=1)
    return weight.unsqueeze(2)


def _shrink(tensor: Tensor, *axes: int) -> Tensor:
    """One entry of axes that are expanded, such as A of Mamba-2: one exponential does for all."""
    for axis in axes:
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
