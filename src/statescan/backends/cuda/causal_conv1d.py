# SPDX-License-Identifier: Apache-2.0
"""Launches the causal convolution kernels: chooses how they walk, and cuts the sums into parts.

The algorithms are described in ``kernels/cuda/causal_conv1d_fwd.cu`` and ``_bwd.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.backends.cuda._strides import NAMES, address, aligned, dtype, strides
from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.sequences import MOST_BLOCKS, Sequences, list_sequences
from statescan.backends.cuda.tables import causal_conv1d_bwd as bwd_table
from statescan.backends.cuda.tables import causal_conv1d_fwd as fwd_table
from statescan.backends.cuda.tables.causal_conv1d_fwd import STEP_CHANNELS, VECTOR
from statescan.backends.outputs import causal_conv1d_fwd_outputs, empty_gradients

_MOST_TAPS = 8
_THREADS = 128
_MOST_BLOCKS_YZ = 65535

# Of the kernels over rows: tokens that a warp takes, fewer if there would not be enough warps.
_ROW_PARTS, _ENOUGH_WARPS = (4096, 2048, 1024, 512), 1 << 13

# Of those over channel-last: blocks that a card of 132 multiprocessors has at once, by direction
# (the tables' min_blocks), the share of them that has enough loads under way, and the least tokens
# that a thread takes. A thread walks at the pace of memory's latency, so a last round of few blocks
# would take as long as a full one.
_FWD_BLOCKS, _BWD_BLOCKS = 132 * 5, 132 * 4
_ENOUGH_SHARE, _MOST_ROUNDS = 0.7, 4
_LEAST_STRETCH = 32
_LEAST_PART = 128

# Of the backward for any width: at most so many parts.
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
    channels = fwd_table.WALK_CHANNELS[_taps(width)]
    road = _road(width, x, out, channels=channels)
    lead = _lead(x) if road == "rows" else 0
    if road == "any":
        part_size, part_rows, blocks = 0, 0, min(-(-x.numel() // _THREADS), MOST_BLOCKS)
        grid = (blocks, 1, 1)
    else:
        part_size, part_rows, grid = _cut(road, x, lead, channels, _FWD_BLOCKS)
    values = (
        *(address(t) for t in (x, out, weight, bias, initial_states, final_states)),
        *sequences.fields(),
        *(*x.stride(), *out.stride(), *weight.stride(), *strides(bias, 1)),
        *(*strides(initial_states, 3), *map(dtype, (x, weight, bias, initial_states))),
        *(*x.shape, width, silu, reverse, lead, road == "rows", part_size, part_rows),
    )
    launch("causal_conv1d_fwd", _instance(road, x, width), x.device, grid, values)
    if _leaves_steps(road, (x,), initial_states, sequences):
        launch("causal_conv1d_fwd", "steps", x.device, _step_grid(x, grid), values)
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
    channels = bwd_table.WALK_CHANNELS[_taps(width)]
    road = _road(width, x, dout, dx, channels=channels)
    lead = _lead(x) if road == "rows" else 0
    if road == "any":
        parts, part_size, part_rows, grid = _cut_pieces(x)
    else:
        part_size, part_rows, grid = _cut(road, x, lead, channels, _BWD_BLOCKS)
        parts = grid[1]
    partials = torch.empty((parts, width + 1, x.shape[1]), dtype=torch.float32, device=x.device)
    values = (
        *(address(t) for t in (dout, x, dx, weight, bias, initial_states, dfinal_states)),
        *(0 if initial_states is None else dinitial.data_ptr(), partials.data_ptr()),
        *(dweight.data_ptr(), 0 if bias is None else dbias.data_ptr(), *sequences.fields()),
        *(*dout.stride(), *x.stride(), *dx.stride(), *weight.stride(), *strides(bias, 1)),
        *(*strides(initial_states, 3), *strides(dfinal_states, 3)),
        *strides(None if initial_states is None else dinitial, 3),
        *map(dtype, (dout, x, weight, bias, initial_states, dfinal_states)),
        *(*x.shape, width, silu, reverse, lead, road == "rows", parts, part_size, part_rows),
    )
    launch("causal_conv1d_bwd", _instance(road, x, width), x.device, grid, values)
    if _leaves_steps(road, (x, dout, dx), initial_states, sequences):
        steps = _MOST_TAPS if road == "walk_any" else _taps(width)
        launch("causal_conv1d_bwd", f"steps_taps{steps}", x.device, _step_grid(x, grid), values)
    sums = min(-(-x.shape[1] // 32) * (width + 1), MOST_BLOCKS)
    launch("causal_conv1d_bwd", "sums", x.device, (sums, 1, 1), values)
    return dx, dweight, dbias, dinitial


def _road(width: int, *tensors: Tensor, channels: int) -> str:
    """How to walk: along rows, along time, along time with any strides, or token by token."""
    if width > _MOST_TAPS:
        return "any"
    batch, _, seqlen = tensors[0].shape
    neighbours = all(t.shape[2] == 1 or t.stride(2) == 1 for t in tensors)
    if neighbours and seqlen < 2**30 and batch < 2**31:
        return "rows"
    dense = all(t.shape[1] == 1 or t.stride(1) == 1 for t in tensors)
    dense = dense and tensors[0].shape[1] % channels == 0
    if dense and all(aligned(t, channels, (0, 2)) for t in tensors):
        return "walk"
    return "walk_any"


def _instance(road: str, x: Tensor, width: int) -> str:
    if road in ("any", "walk_any"):
        return road
    return f"{road}_{NAMES[x.dtype]}_taps{_taps(width)}"


def _taps(width: int) -> int:
    """Taps of the instances that serve a width."""
    return 4 if width == 4 else _MOST_TAPS


def _lead(x: Tensor) -> int:
    """Most tokens that a row may have before its first one, where rows begin at 16 bytes."""
    return 0 if aligned(x, VECTOR, (0, 1)) else 16 // x.element_size() - 1


def _cut(
    road: str, x: Tensor, lead: int, channels: int, at_once: int
) -> tuple[int, int, tuple[int, int, int]]:
    """Tokens of a part, its rows and the grid, whose second axis counts parts.

    From the shape alone, since parts order the sums of a backward. Parts of several rows have these
    whole. ``channels`` and ``at_once`` (blocks) are for threads that walk along time.
    """
    batch, dim, seqlen = x.shape
    if road == "rows":
        blocks = -(-dim // (_THREADS // 32))
        for size in _ROW_PARTS:
            if batch * dim * (seqlen + lead) >= _ENOUGH_WARPS * size:
                break
        least = size
    else:
        blocks = -(-dim // (_THREADS * (1 if road == "walk_any" else channels)))
        size = _stretch(batch * blocks, seqlen, at_once)
        least = min(size, _LEAST_PART)
    while True:
        part_rows = min(batch, max(1, least // (seqlen + lead)))
        parts = -(-batch // part_rows) * -(-(seqlen + lead) // size)
        if parts <= _MOST_BLOCKS_YZ:
            return size, part_rows, (blocks, parts, 1)
        size, least = 2 * size, 2 * size


def _stretch(blocks: int, seqlen: int, at_once: int) -> int:
    """Tokens that a thread walks, where ``blocks`` would do with whole rows each."""
    most, best, best_share = max(1, seqlen // _LEAST_STRETCH), seqlen, 0.0
    for rounds in range(1, _MOST_ROUNDS + 1):
        pieces = min(most, max(1, rounds * at_once // blocks))
        # Whole batches of tokens, or all.
        size = -(-seqlen // (pieces * VECTOR)) * VECTOR
        total = blocks * -(-seqlen // size)
        share = total / (at_once * -(-total // at_once))
        if share > best_share:
            best, best_share = size, share
        if share > _ENOUGH_SHARE:
            break
    return best


def _cut_pieces(x: Tensor) -> tuple[int, int, int, tuple[int, int, int]]:
    """Parts, pieces of 32 tokens in one, 0 and the grid, where a warp takes any width."""
    batch, dim, seqlen = x.shape
    pieces = batch * -(-seqlen // 32)
    size = -(-pieces // _MOST_PARTS)
    parts = -(-pieces // size)
    return parts, size, 0, (min(-(-parts * dim // (_THREADS // 32)), MOST_BLOCKS), 1, 1)


def _leaves_steps(
    road: str, tensors: tuple[Tensor, ...], initial_states: Tensor | None, sequences: Sequences
) -> bool:
    """Whether there may be tokens that the kernel of the road leaves to the one for steps."""
    if road == "any":
        return False
    if initial_states is not None or sequences.memory is not None:
        return True
    if road != "rows":
        return False
    whole = tensors[0].shape[2] % VECTOR == 0
    return not (whole and all(aligned(t, VECTOR, (0, 1)) for t in tensors))


def _step_grid(x: Tensor, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Blocks of the kernel for steps beside those of the other one, for the same parts."""
    return -(-x.shape[1] // STEP_CHANNELS), grid[1], 1


def _like(dout: Tensor, x: Tensor, dx: Tensor) -> Tensor:
    """``dout`` as it is if one kernel can read it beside x, else a copy in the layout of dx."""
    if dout.dtype == x.dtype:
        for axis in (1, 2):
            if x.stride(axis) == 1 and dx.stride(axis) == 1 and dout.stride(axis) == 1:
                return dout
    return torch.empty_like(dx).copy_(dout)
