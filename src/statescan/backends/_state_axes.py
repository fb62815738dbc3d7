# SPDX-License-Identifier: Apache-2.0
"""Where the axes of selective_state_update's arguments lie, for both of its forms.

Mamba-1's channels are cut into as many heads as B and C have groups, so that both forms of the op
are one to a kernel. Strides only: what a kernel's struct looks like is for its launcher.
"""

from __future__ import annotations

import math

from torch import Tensor


class StateAxes:
    """The heads, channels and tokens of one form of the op, and strides along them.

    Attributes:
        headed: Whether the state is (slots, nheads, headdim, dstate), not (slots, dim, dstate).
        several: Whether x carries an axis of tokens.
        num_tokens: Its length, else 1.
        num_heads, head_channels: Heads, and channels of each.
        B_heads, C_heads: Heads that share a group of B or of C.
    """

    def __init__(self, state: Tensor, x: Tensor, B: Tensor, C: Tensor) -> None:
        self.headed = state.dim() == 4
        self.several = x.dim() == state.dim()
        self.num_tokens = 1
        if self.several:
            self.num_tokens = x.shape[1] if self.headed else x.shape[2]
        plain = 2 + self.several
        group_axis = 1 + (self.several and self.headed)
        groups = [t.shape[group_axis] if t.dim() > plain else 1 for t in (B, C)]
        if self.headed:
            self.num_heads, self.head_channels = state.shape[1:3]
        else:
            self.num_heads = math.lcm(*groups)
            self.head_channels = state.shape[1] // self.num_heads
        self.B_heads, self.C_heads = (self.num_heads // count for count in groups)

    def of_channels(self, strides: tuple[int, ...]) -> tuple[int, int]:
        """Strides of heads and of channels, from those of (nheads, headdim) or (dim,)."""
        if self.headed:
            return strides[0], strides[1]
        return strides[0] * self.head_channels, strides[0]

    def of_tokens(self, tensor: Tensor) -> tuple[int, int, int, int]:
        """Strides of rows, tokens, heads and channels of x, dt, z or out."""
        strides = tensor.stride()
        if not self.several:
            return (strides[0], 0, *self.of_channels(strides[1:]))
        if self.headed:
            return (strides[0], strides[1], *self.of_channels(strides[2:]))
        return (strides[0], strides[2], *self.of_channels(strides[1:]))

    def of_weights(self, tensor: Tensor) -> tuple[int, int, int, int]:
        """Strides of rows, tokens, groups and states of B or C."""
        strides = tensor.stride()
        token = group = 0
        if self.several:
            token = strides[1 if self.headed else -1]
        state = strides[-1 if self.headed or not self.several else -2]
        if tensor.dim() > 2 + self.several:
            group = strides[2 if self.several and self.headed else 1]
        return strides[0], token, group, state
