# SPDX-License-Identifier: Apache-2.0
"""Launches the causal convolution kernels: chooses how they walk, and cuts the sums into parts.

The algorithms are described in ``kernels/cuda/causal_conv1d_fwd.cu`` and ``_bwd.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.backends.cuda._strides import NAMES, address, aligned, dtype, strides
from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.sequences import MOST_BLOCKS, list_sequences
from statescan.backends.cuda.tables import causal_conv1d_bwd as bwd_table
from statescan.backends.cuda.tables import causal_conv1d_fwd as fwd_table
from statescan.backends.cuda.tables.causal_conv1d_fwd import VECTOR
from statescan.backends.outputs import causal_conv1d_fwd_outputs, empty_gradients

_MOST_TAPS = 8
_THREADS = 128
_MOST_BLOCKS_YZ = 65535

# Threads that fill the card a few times over: with fewer of them each walks fewer tokens.
_ENOUGH_THREADS = 1 << 18
_ROW_STRETCH = 2048
_STRETCHES = (64, 32, 16)
_PARTS = (256, 128, 64, 32)
_LEAST_PART = 128

# Of the backward over rows: tokens that a warp takes, fewer if there would not be enough of them.
_ROW_PARTS, _ENOUGH_WARPS = (4096, 2048, 1024, 512), 1 << 13
# Of the one for any width: at most so many parts.
_MOST_PARTS = 64


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``final_states`` of ``statescan.causal_conv1d``."""
    out, final_states = causal_conv1d_fwd_outputs(x, weight, cu_seqlens)
    width = weight.shape[1]
    sequences = list_sequences(x, seq_idx, cu_seqlens, reverse)
    sequences.pass_through(final_states, initial_states)
    if x.numel() == 0:
        return out, final_states
    road = _road(width, x, out, channels=fwd_table.WALK_CHANNELS)
    stretch, grid = _cut_rows(road, x)
    launch(
        "causal_conv1d_fwd",
        _instance(road, x, width),
        x.device,
        grid,
        (
            *(address(t) for t in (x, out, weight, bias, initial_states, final_states)),
            *sequences.fields(),
            *(*x.stride(), *out.stride(), *weight.stride(), *strides(bias, 1)),
            *(*strides(initial_states, 3), *map(dtype, (x, weight, bias, initial_states))),
            *(*x.shape, width, silu, reverse, stretch),
        ),
    )
    return out, final_states


def causal_conv1d_bwd(
    dout: Tensor,
    dfinal_states: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dx, dweight, dbias, dinitial_states``; 0 elements where the input is absent."""
    dx, dweight, dbias, dinitial = empty_gradients(x, weight, bias, initial_states)
    sequences = list_sequences(x, seq_idx, cu_seqlens, reverse)
    if initial_states is not None:
        sequences.pass_through(dinitial, dfinal_states)
    if x.numel() == 0:
        for gradient in (dweight, dbias):
            gradient.zero_()
        return dx, dweight, dbias, dinitial
    width = weight.shape[1]
    dout = _like(dout, x, dx)
    road = _road(width, x, dout, dx, channels=bwd_table.WALK_CHANNELS)
    lead = 0 if road != "rows" else _lead(x)
    parts, part_size, part_rows, grid = _cut_sums(road, x, lead)
    partials = torch.empty((parts, width + 1, x.shape[1]), dtype=torch.float32, device=x.device)
    values = (
        *(address(t) for t in (dout, x, dx, weight, bias, initial_states, dfinal_states)),
        *(0 if initial_states is None else dinitial.data_ptr(), partials.data_ptr()),
        *(dweight.data_ptr(), 0 if bias is None else dbias.data_ptr(), *sequences.fields()),
        *(*dout.stride(), *x.stride(), *dx.stride(), *weight.stride(), *strides(bias, 1)),
        *(*strides(initial_states, 3), *strides(dfinal_states, 3)),
        *strides(None if initial_states is None else dinitial, 3),
        *map(dtype, (dout, x, weight, bias, initial_states, dfinal_states)),
        *(*x.shape, width, silu, reverse, lead, parts, part_size, part_rows),
    )
    launch("causal_conv1d_bwd", _instance(road, x, width), x.device, grid, values)
    sums = min(-(-x.shape[1] // 32) * (width + 1), MOST_BLOCKS)
    launch("causal_conv1d_bwd", "sums", x.device, (sums, 1, 1), values)
    return dx, dweight, dbias, dinitial


def _road(width: int, *tensors: Tensor, channels: int) -> str:
    """How to walk: along rows, along time, along time with any strides, or token by token."""
    if width > _MOST_TAPS:
        return "any"
    if all(t.shape[2] == 1 or t.stride(2) == 1 for t in tensors) and tensors[0].shape[2] < 2**30:
        return "rows"
    dense = all(t.shape[1] == 1 or t.stride(1) == 1 for t in tensors)
    dense = dense and tensors[0].shape[1] % channels == 0
    if dense and all(aligned(t, channels, (0, 2)) for t in tensors):
        return "walk"
    return "walk_any"


def _instance(road: str, x: Tensor, width: int) -> str:
    if road in ("any", "walk_any"):
        return road
    return f"{road}_{NAMES[x.dtype]}_taps{4 if width == 4 else 8}"


def _lead(x: Tensor) -> int:
    """Most tokens that a row may have before its first one, where rows begin at 16 bytes."""
    return 0 if aligned(x, VECTOR, (0, 1)) else 16 // x.element_size() - 1


def _cut_rows(road: str, x: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Tokens of a stretch and the grid of a forward, as the kernel describes it."""
    batch, dim, seqlen = x.shape
    if road == "any":
        return 0, (min(-(-x.numel() // _THREADS), MOST_BLOCKS), 1, 1)
    if road == "rows":
        stretch, blocks = _ROW_STRETCH, -(-dim // (_THREADS // 32))
        stretches = -(-(seqlen + _lead(x)) // stretch)
        # A warp takes several short rows: it waits for its taps once.
        together = max(1, min(stretch // seqlen, batch * dim // _ENOUGH_WARPS))
        return stretch, (
            *(blocks, min(stretches, _MOST_BLOCKS_YZ)),
            min(-(-batch // together), _MOST_BLOCKS_YZ),
        )
    else:
        channels = 1 if road == "walk_any" else fwd_table.WALK_CHANNELS
        stretch, _ = _cut(batch * dim // channels, seqlen, _STRETCHES)
        blocks, stretches = -(-dim // (channels * _THREADS)), -(-seqlen // stretch)
    return stretch, (blocks, min(stretches, _MOST_BLOCKS_YZ), min(batch, _MOST_BLOCKS_YZ))


def _cut(lines: int, seqlen: int, choices: tuple[int, ...]) -> tuple[int, int]:
    """Tokens of a stretch such that there are enough threads if possible, and their number."""
    for stretch in choices:
        threads = lines * -(-seqlen // stretch)
        if threads >= _ENOUGH_THREADS:
            break
    return stretch, threads


def _cut_sums(road: str, x: Tensor, lead: int) -> tuple[int, int, int, tuple[int, int, int]]:
    """Parts, size of one and rows of one, from the shape alone since they order the sums; the grid.

    The size counts tokens, or pieces of 32 tokens where a warp takes any width.
    """
    batch, dim, seqlen = x.shape
    if road == "any":
        pieces = batch * -(-seqlen // 32)
        size = -(-pieces // _MOST_PARTS)
        parts = -(-pieces // size)
        return parts, size, 0, (min(-(-parts * dim // (_THREADS // 32)), MOST_BLOCKS), 1, 1)
    if road == "rows":
        for stretch in _ROW_PARTS:
            if dim * batch * (seqlen + lead) >= _ENOUGH_WARPS * stretch:
                break
        blocks, least = -(-dim // (_THREADS // 32)), stretch
    else:
        lines = -(-dim // (1 if road == "walk_any" else bwd_table.WALK_CHANNELS))
        stretch, _ = _cut(batch * lines, seqlen, _PARTS)
        blocks, least = -(-lines // _THREADS), _LEAST_PART
    part_rows = min(batch, max(1, least // (seqlen + lead)))
    parts = -(-batch // part_rows) * -(-(seqlen + lead) // stretch)
    return parts, stretch, part_rows, (blocks, min(parts, _MOST_BLOCKS_YZ), 1)


def _like(dout: Tensor, x: Tensor, dx: Tensor) -> Tensor:
    """``dout`` as it is if one kernel can read it beside x, else a copy in the layout of dx."""
    if dout.dtype == x.dtype:
        for axis in (1, 2):
            if x.stride(axis) == 1 and dx.stride(axis) == 1 and dout.stride(axis) == 1:
                return dout
    return torch.empty_like(dx).copy_(dout)
