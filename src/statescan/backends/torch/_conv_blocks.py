# SPDX-License-Identifier: Apache-2.0
"""The convolution's blocks: how work is cut to fit a cache, and the taps of one block.

What is done with a block's values is in ``causal_conv1d.py``, where sequences lie in
``_conv_plan.py``.

A block is some rows, channels and a stretch of time. Cuts along time and rows depend on the
shapes alone, since sums follow them; channels are cut to suit the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends.outputs import compute_dtype, is_channel_last
from statescan.backends.torch._conv_plan import Places, Plan, make_plan
from statescan.backends.torch._pointwise import keep_mask, select

# Elements in a block, for each thread: 512 KiB of float32 for a core's cache. On accelerators the
# number of launches counts instead.
_CPU_BLOCK = 1 << 17
_DEVICE_BLOCK = 1 << 24
_TIME_CHANNEL_FIRST = 2048
_TIME_CHANNEL_LAST = 256
# In the backward each stretch recomputes width - 1 tokens of its neighbour: at most an eighth more.
_LEAST_WIDTHS = 8
# Most tokens, and most rows, in one sum: torch shares longer ones between threads.
_MOST_TOKENS = 1 << 14
_MOST_ROWS = 1 << 12


class Stretch(NamedTuple):
    """Tokens ``low`` to ``high`` of some rows.

    ``masks[k]`` tells whether the k-th token before each one is in its sequence; None where all
    are. ``heads`` are the tokens that meet initial states.
    """

    rows: slice
    low: int
    high: int
    masks: list[Tensor] | None
    heads: Places | None


class Conv(NamedTuple):
    """One call's operands in the dtype of its arithmetic.

    Attributes:
        x: As given.
        taps: (dim, 1) weights by lag: how many tokens before the current one they meet.
        bias: (dim, 1), or None.
        from_states: (num_states, dim, width - 1) what initial states add to the first tokens.
        plan: Where sequences lie.
        step: 1, or -1 when sequences are walked from their ends.
        dtype: Of the arithmetic.
    """

    x: Tensor
    taps: list[Tensor]
    bias: Tensor | None
    from_states: Tensor | None
    plan: Plan
    step: int
    dtype: torch.dtype

    def reach(self, low: int, high: int, step: int) -> tuple[int, int]:
        """``low`` to ``high`` widened by the taps' reach: back in time for step 1, else ahead."""
        halo = len(self.taps) - 1
        if step > 0:
            return max(0, low - halo), high
        return low, min(self.x.shape[2], high + halo)

    def stretch(self, rows: slice, low: int, high: int) -> Stretch:
        """The tokens with their masks, so that these are made once for all channels."""
        masks = None
        if self.plan.positions is not None:
            positions = self.plan.positions[rows, None, low:high]
            masks = [keep_mask(positions >= lag, self.dtype) for lag in range(len(self.taps))]
        heads = None if self.from_states is None else self.plan.heads.within(rows, low, high)
        return Stretch(rows, low, high, masks, heads)

    def load(self, where: Stretch, channels: slice) -> tuple[Tensor, int]:
        """The tokens that a stretch's taps meet, and the time of the first of them."""
        first, end = self.reach(where.low, where.high, self.step)
        return self.x[where.rows, channels, first:end].to(self.dtype), first

    def preactivation(self, where: Stretch, channels: slice, tokens: Tensor, first: int) -> Tensor:
        """bias + taps, of tokens that ``load`` gave. Undefined at padding."""
        low, high = where.low, where.high
        now, tap = tokens[..., low - first : high - first], self.taps[0][channels]
        values = now * tap if self.bias is None else torch.addcmul(self.bias[channels], now, tap)
        for lag in range(1, len(self.taps)):
            shift = lag * self.step
            start, stop = max(low, shift), min(high, self.x.shape[2] + shift)
            if start >= stop:
                continue
            earlier = tokens[..., start - shift - first : stop - shift - first]
            if where.masks is not None:
                earlier = select(earlier, where.masks[lag][..., start - low : stop - low])
            values[..., start - low : stop - low].addcmul_(earlier, self.taps[lag][channels])
        if where.heads is not None and self.from_states is not None:
            rows, times, states, columns = where.heads
            values[rows, :, times] += self.from_states[states, channels, columns]
        return values


def prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> Conv:
    """The operands of one call."""
    dtype = compute_dtype(x, weight, bias, initial_states)
    weight = weight.to(dtype)
    taps = list(weight.flip(1).unsqueeze(2).unbind(1))
    from_states = None
    if initial_states is not None:
        from_states = _contributions(initial_states.to(dtype), weight)
    plan = make_plan(x, weight.shape[1], seq_idx, cu_seqlens, reverse)
    column = None if bias is None else bias.to(dtype)[:, None]
    return Conv(x, taps, column, from_states, plan, -1 if reverse else 1, dtype)


def _contributions(states: Tensor, weight: Tensor) -> Tensor:
    """What states, as the tokens before the first, add to tokens 0 to width - 2."""
    total = torch.zeros_like(states)
    for tap in range(states.shape[2]):
        reached = states.shape[2] - tap
        total[..., :reached].addcmul_(states[..., tap:], weight[:, tap, None])
    return total


def cut_time(x: Tensor, width: int) -> Iterator[tuple[slice, int, int]]:
    """(rows, low, high) of every stretch of a (batch, dim, seqlen) tensor."""
    batch, dim, seqlen = x.shape
    block = _CPU_BLOCK if x.device.type == "cpu" else _DEVICE_BLOCK
    time = _TIME_CHANNEL_LAST if is_channel_last(x) else _TIME_CHANNEL_FIRST
    if x.device.type != "cpu" or dim * time < block:
        time = min(block // max(dim, 1), _MOST_TOKENS)
    time = min(max(time, _LEAST_WIDTHS * width, 1), max(seqlen, 1))
    rows = min(max(block // max(dim * time, 1), 1), _MOST_ROWS)
    for row in range(0, batch, rows):
        for low in range(0, seqlen, time):
            yield slice(row, min(row + rows, batch)), low, min(low + time, seqlen)


def cut_channels(x: Tensor, rows: slice, length: int) -> Iterator[slice]:
    """Channels of each block; no sum runs over channels, so this cut leaves no trace in results."""
    dim = x.shape[1]
    on_cpu = x.device.type == "cpu"
    block = _CPU_BLOCK * torch.get_num_threads() if on_cpu else _DEVICE_BLOCK
    group = max(block // max((rows.stop - rows.start) * length, 1), 1)
    for channel in range(0, dim, group):
        yield slice(channel, min(channel + group, dim))
