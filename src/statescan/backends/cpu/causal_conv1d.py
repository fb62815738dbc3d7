# SPDX-License-Identifier: Apache-2.0
"""Launches the causal convolution kernels: prepares small tensors, cuts the sums into parts.

The algorithms are described in ``kernels/cpu/causal_conv1d_fwd.c`` and ``_bwd.c``.
"""

from __future__ import annotations

from torch import Tensor

from statescan.backends.cpu import abi
from statescan.backends.cpu._workspace import add_up, floats, workers
from statescan.backends.cpu.sequences import list_sequences
from statescan.backends.outputs import causal_conv1d_fwd_outputs, empty_gradients

# Of kernels/cpu: tokens a tile holds, blocks a task may have; tiles, and tables [width] of a block.
_STEPS, _BLOCKS = 64, 16
_FORWARD_TILES, _FORWARD_TABLES = 2, 2
_BACKWARD_TILES, _BACKWARD_TABLES = 4, 5

# A task of the backward has up to 64 channels, which are 16 blocks of the shortest vectors. Rows
# and tokens are cut until there are tasks for many threads, but not into less than 256 tokens.
_PART_CHANNELS, _LEAST_TOKENS, _ENOUGH_TASKS = 64, 256, 64


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
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    out, final_states = causal_conv1d_fwd_outputs(x, weight, cu_seqlens)
    sequences = list_sequences(batch, seqlen, seq_idx, cu_seqlens, reverse)
    sequences.pass_through(final_states, initial_states)
    if x.numel() == 0:
        return out, final_states
    small = [abi.dense(tensor) for tensor in (weight, bias, initial_states)]
    threads, _scratch = workers(_vectors(_FORWARD_TILES, _FORWARD_TABLES, width))
    abi.call(
        "causal_conv1d_fwd",
        *(abi.tensor3(x), abi.tensor3(out), sequences.fields(), threads),
        *(abi.address(tensor) for tensor in (*small, final_states)),
        *(dim, width, int(silu)),
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
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    dx, dweight, dbias, dinitial_states = empty_gradients(x, weight, bias, initial_states)
    sequences = list_sequences(batch, seqlen, seq_idx, cu_seqlens, reverse)
    if x.numel() == 0:
        for gradient in (dweight, dbias):
            gradient.zero_()
        if initial_states is not None:
            sequences.pass_through(dinitial_states, dfinal_states)
        return dx, dweight, dbias, dinitial_states
    part_tokens, row_groups = _cut_sums(batch, dim, seqlen)
    sums = row_groups * -(-seqlen // part_tokens)
    weight_sums, bias_sums = floats(sums, dim, width), floats(sums, dim)
    states = None if initial_states is None else floats(*initial_states.shape)
    small = [abi.dense(t) for t in (weight, bias, initial_states, dfinal_states)]
    threads, _scratch = workers(_vectors(_BACKWARD_TILES, _BACKWARD_TABLES, width))
    abi.call(
        "causal_conv1d_bwd",
        *(abi.tensor3(tensor) for tensor in (dout, x, dx)),
        *(sequences.fields(), threads),
        *(abi.address(tensor) for tensor in (*small, states, weight_sums, bias_sums)),
        *(dim, width, int(silu), _PART_CHANNELS, part_tokens, row_groups),
    )
    dweight.copy_(add_up(weight_sums))
    if bias is not None:
        dbias.copy_(add_up(bias_sums))
    if states is not None:
        sequences.pass_through(states, dfinal_states)
        dinitial_states.copy_(states)
    return dx, dweight, dbias, dinitial_states


def _cut_sums(batch: int, dim: int, seqlen: int) -> tuple[int, int]:
    """Tokens of a part and groups of rows, from the shape alone since they order the sums."""
    tasks = -(-dim // _PART_CHANNELS)
    row_groups = max(1, min(batch, _ENOUGH_TASKS // tasks))
    parts = max(1, min(seqlen // _LEAST_TOKENS, _ENOUGH_TASKS // (tasks * row_groups)))
    return -(-seqlen // (parts * _STEPS)) * _STEPS, row_groups


def _vectors(tiles: int, tables: int, width: int) -> int:
    """Vectors of scratch memory that a worker needs."""
    return tiles * (_STEPS + width) + _BLOCKS * tables * width
