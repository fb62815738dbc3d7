# SPDX-License-Identifier: Apache-2.0
"""Cuts a selective scan into blocks, and moves tokens between tensors and time-first blocks.

Sizes and copies only: the recurrence is in ``_selective_scan_steps.py``.

A block is some rows, channels and a chunk of time; its states are [steps, rows, dstate, dim], so
that one step is one contiguous slice and the innermost loops of torch run over channels. (With
dstate innermost each broadcast product pays torch's loop overhead every 16 elements.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from statescan.backends.torch._sharing import UNSHARED

# Most elements of a chunk's tokens, and of one step of its states: torch keeps operations of that
# size on the calling thread, and waking others would cost as much as the operation.
_CPU_TOKENS = 1 << 15
_CPU_STEP = UNSHARED
# Most states of a chunk; two buffers of this size live at a time in the forward, three in the
# backward.
_CPU_CHUNK = 1 << 20
_DEVICE_TOKENS = 1 << 24
_DEVICE_STEP = 1 << 22
_DEVICE_CHUNK = 1 << 24
# Steps for which there is always room: blocks get fewer channels rather than shorter chunks. With
# dstate up to 16 saved states are this far apart, so that the backward finds each chunk's first
# state saved. (1 x 1536 x 512 x 16 on one Zen 3 core, 16 and 64 steps: forward 83 and 80 ms,
# backward 277 and 196 ms.)
_USUAL_STEPS = 64


@dataclass(frozen=True)
class Blocks:
    """How a scan is cut; the same for equal shapes, whatever the number of threads."""

    rows: list[slice]
    channels: list[slice]
    steps: int
    seqlen: int

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """(start, stop) of the chunks of time between two steps."""
        stop = self.seqlen if stop is None else stop
        for first in range(start, stop, self.steps):
            yield first, min(first + self.steps, stop)

    @property
    def largest(self) -> tuple[int, int]:
        """Rows and channels of the largest block."""
        return (
            max((part.stop - part.start for part in self.rows), default=0),
            max((part.stop - part.start for part in self.channels), default=0),
        )


def cut(x: Tensor, dstate: int, most_steps: int, align: int) -> Blocks:
    """Blocks for activations like ``x``.

    Args:
        x: (batch, dim, seqlen).
        dstate: States a channel.
        most_steps: Upper bound of a chunk, a multiple of 64.
        align: Channels that must not be cut apart.
    """
    batch, dim, seqlen = x.shape
    tokens, step, chunk = _CPU_TOKENS, _CPU_STEP, _CPU_CHUNK
    if x.device.type != "cpu":
        tokens, step, chunk = _DEVICE_TOKENS, _DEVICE_STEP, _DEVICE_CHUNK
    most = max(1, min(tokens // _USUAL_STEPS, step // max(1, dstate)))
    row_count = _even(batch, max(1, most // max(1, dim)))
    width = _even(dim, most)
    width = max(align, (width + align - 1) // align * align)
    size = max(1, row_count * min(width, dim))
    steps = min(tokens // size, chunk // (size * max(1, dstate)))
    if steps >= most_steps:
        steps = most_steps
    else:
        steps = max(8, min(_USUAL_STEPS, 1 << max(0, steps.bit_length() - 1)))
    return Blocks(_slices(batch, row_count), _slices(dim, width), steps, seqlen)


def _even(total: int, most: int) -> int:
    """Size of the parts when ``total`` is cut into as few parts of at most ``most`` as possible."""
    count = max(1, (total + most - 1) // most)
    return max(1, (total + count - 1) // count)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def time_first(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """A fresh dense copy of (rows, ..., steps) as (steps, rows, ...) in ``dtype``.

    torch transposes a dense matrix at 0.7e9 to 1.2e9 elements a second on one core and a strided
    one at 0.15e9, hence the copy before the copy (1536 x 64 of 1536 x 2048, float32, Zen 3).
    """
    if dtype.is_complex and not piece.is_complex():
        piece = piece.to(dtype)
    lead, steps = piece.shape[:-1], piece.shape[-1]
    out = torch.empty((steps, *lead), dtype=dtype, device=piece.device)
    if piece.dim() == 3 and piece.stride(1) == 1:
        return out.copy_(piece.permute(2, 0, 1))
    matrix = piece.to(dtype).contiguous().view(lead.numel(), steps)
    out.view(steps, lead.numel()).copy_(matrix.t())
    return out


def time_last(values: Tensor, like: Tensor) -> Tensor:
    """Dense (steps, rows, ...) as (rows, ..., steps), ready to be written to ``like``."""
    order = (*range(1, values.dim()), 0)
    if like.dim() == 3 and like.stride(1) == 1:
        return values.permute(order)
    steps, lead = values.shape[0], values.shape[1:]
    out = values.new_empty((*lead, steps))
    out.view(lead.numel(), steps).copy_(values.reshape(steps, lead.numel()).t())
    return out


def fold(values: Tensor, axis: int) -> Tensor:
    """Sum over ``axis`` by halving, in place but for the last addition, which is a new tensor.

    ``torch.sum`` adds in an order that can depend on the number of threads; this one cannot.
    """
    size = values.shape[axis]
    while size > 2:
        half = (size + 1) // 2
        upper = values.narrow(axis, half, size - half)
        values.narrow(axis, 0, size - half).add_(upper)
        size = half
    if size == 2:
        return values.select(axis, 0) + values.select(axis, 1)
    return values.select(axis, 0).clone() if size == 1 else values.sum(axis)


def pieces(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in pieces of ``size`` along their first axis, side by side."""
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def save_states(target: Tensor, state: Tensor) -> None:
    """Write (rows, dstate, dim) states as (rows, dim, dstate).

    Row by row, since torch transposes dense matrices several times faster than other tensors.
    """
    for row, values in zip(target, state, strict=True):
        row.copy_(values.t())


def load_states(saved: Tensor) -> Tensor:
    """(rows, dim, dstate) states as a new (rows, dstate, dim) tensor."""
    states = saved.new_empty((saved.shape[0], saved.shape[2], saved.shape[1]))
    for row, values in zip(states, saved, strict=True):
        row.copy_(values.t())
    return states
