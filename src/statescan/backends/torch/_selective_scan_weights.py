# SPDX-License-Identifier: Apache-2.0
"""B and C of a selective scan: constant, per token, or per token and group, behind one face.

Only products with states and sums over states, channels or tokens; no recurrence.

Sums are elementwise products and additions, not matrix products: ``torch.bmm`` is 0.1 ns an
element faster, but its result may depend on the number of threads, and on the user's settings
for TF32 and bfloat16 products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from statescan.backends.torch._selective_scan_blocks import pieces, time_first, time_last
from statescan.backends.torch._selective_scan_steps import accumulate
from statescan.backends.torch.sequences import SequencePlan

# Smaller groups are handled channel by channel: a product for each would mostly be overhead.
_SMALL_GROUP = 32


class Weights:
    """One of B and C, as it is given.

    Attributes:
        constant: The same for all tokens, (dstate, dim).
        group_size: Channels that share a value.
        whole: Channels that a block must not cut apart.
    """

    def __init__(self, tensor: Tensor, dim: int, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.dtype = dtype
        self.constant = tensor.t().to(dtype).contiguous() if tensor.dim() == 2 else None
        ngroups = dim if tensor.dim() == 2 else tensor.shape[1]
        self.group_size = dim // max(1, ngroups)
        self.per_channel = self.group_size < _SMALL_GROUP
        self.whole = max(1, self.group_size) if self.per_channel else 1

    def load(self, plan: SequencePlan, rows: slice, start: int, stop: int) -> LoadedWeights:
        """The values of a chunk; zero at padding, whatever is stored there."""
        if self.constant is not None:
            return LoadedWeights(self.constant[None, None], None)
        values = time_first(plan.take(self.tensor[rows], rows, start, stop), self.dtype)
        if plan.padding is not None:
            values.masked_fill_(plan.padding[rows, start:stop].t()[:, :, None, None], 0)
        values = values.transpose(2, 3)
        if not self.per_channel:
            return LoadedWeights(values, self.group_size)
        return LoadedWeights(values.repeat_interleave(self.group_size, dim=3), None)

    def new_gradient(self, rows: int, steps: int) -> Tensor:
        """Zeros to collect a chunk's gradient in, (steps, rows, dstate, ngroups)."""
        shape = (steps, rows, self.tensor.shape[1], self.tensor.shape[2])
        return self.tensor.new_zeros(shape, dtype=self.dtype).transpose(2, 3)

    def add_gradient(
        self,
        gradient: Tensor,
        states: Tensor,
        values: Tensor,
        channels: slice,
        scratch: Tensor,
        piece: int,
    ) -> None:
        """Add the sum of states times values over what shares a weight; overwrites ``scratch``."""
        if self.constant is not None:
            accumulate(gradient[:, channels], states, values)
            return
        parts = pieces(piece, gradient, states, values[:, :, None], scratch)
        for gradient_part, states_part, values_part, out in parts:
            self._sum_over_channels(
                gradient_part, torch.mul(states_part, values_part, out=out), channels
            )

    def _sum_over_channels(self, gradient: Tensor, product: Tensor, channels: slice) -> None:
        if self.per_channel:
            groups = slice(channels.start // self.whole, channels.stop // self.whole)
            parts = product.unflatten(3, (-1, self.whole))
            gradient[..., groups] += parts.sum(4) if self.whole > 1 else parts.squeeze(4)
        else:
            for group, span in _groups(channels, self.group_size):
                gradient[..., group] += product[..., span].sum(3)

    def store_gradient(
        self,
        target: Tensor,
        gradient: Tensor,
        plan: SequencePlan,
        rows: slice,
        start: int,
        stop: int,
    ) -> None:
        """Write the gradient of a chunk of per-token weights to its place in ``target``."""
        tokens = target[rows]
        plan.put(tokens, rows, start, stop, time_last(gradient.transpose(2, 3), tokens))


class LoadedWeights:
    """B or C of one chunk: (steps, rows, dstate, dim) or, by groups, (.., dstate, ngroups)."""

    def __init__(self, values: Tensor, group_size: int | None) -> None:
        self.values = values
        self.group_size = group_size

    def adjoint(self) -> LoadedWeights:
        """The weights by which gradients travel back."""
        if not self.values.is_complex():
            return self
        return LoadedWeights(self.values.conj_physical(), self.group_size)

    def spread(self, values: Tensor, channels: slice, out: Tensor, piece: int) -> None:
        """out = weights times (steps, rows, dim) values, for every state."""
        for weight, span in self._parts(channels, len(out)):
            parts = pieces(piece, weight, values[:, :, None, span], out[..., span])
            for weight_part, values_part, out_part in parts:
                torch.mul(values_part, weight_part, out=out_part)

    def read(self, states: Tensor, channels: slice) -> Tensor:
        """Real part of the sum over dstate of weights times states, (steps, rows, dim)."""
        total = states.new_zeros((*states.shape[:2], states.shape[3]))
        for weight, span in self._parts(channels, len(states)):
            # One state of all tokens at a time: less is written than by products and their sum.
            parts = zip(states[..., span].unbind(2), weight.unbind(2), strict=True)
            out = total[..., span]
            for states_part, weight_part in parts:
                out.addcmul_(states_part, weight_part)
        return total.real.contiguous() if total.is_complex() else total

    def output(self, states: Tensor, channels: slice) -> Tensor:
        """``read``, twice for complex states: each stands for itself and its conjugate twin."""
        total = self.read(states, channels)
        return total.mul_(2) if states.is_complex() else total

    def _parts(self, channels: slice, steps: int) -> Iterator[tuple[Tensor, slice]]:
        """Weights that broadcast against a span of the block's channels, and the span."""
        values = self.values.expand(steps, -1, -1, -1)
        if self.group_size is None:
            yield values[..., channels], slice(0, channels.stop - channels.start)
            return
        for group, span in _groups(channels, self.group_size):
            yield values[..., group, None], span


def _groups(channels: slice, group_size: int) -> Iterator[tuple[int, slice]]:
    """The groups that lie in a block of channels, wholly or in part, and where."""
    for group in range(channels.start // group_size, -(-channels.stop // group_size)):
        start = max(group * group_size, channels.start)
        stop = min((group + 1) * group_size, channels.stop)
        yield group, slice(start - channels.start, stop - channels.start)
