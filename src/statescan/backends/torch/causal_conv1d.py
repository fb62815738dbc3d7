# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution over sequences in torch, forward and hand-written backward.

Cutting into blocks and the taps themselves belong in ``_conv_blocks.py``.

With lag k counted against the direction of processing and taps[k] = weight[width - 1 - k],
pre[t] = bias + sum over k of taps[k] x[t - k], over the k that stay inside t's sequence, plus the
initial state's part. The backward recomputes pre block by block, so that no more than a block is
held, and with dpre = dout silu'(pre) sums by the token that a tap meets:
dx[s] = sum over k of taps[k] dpre[s + k] and dtaps[k] = sum over s of dpre[s + k] x[s].

Taps are shifted multiply-adds, since a depthwise ``F.conv1d`` is slower. Milliseconds, both with
SiLU, on a Xeon server with torch 2.11, 2 x 1536 x 2048 in float32, width 4:

    layout, threads          forward: here, F.conv1d    forward and backward: here, autograd
    channel-first, 1 and 8        21, 38    3.4, 8.1            75, 149    13, 48
    channel-last, 1 and 8         34, 72    8.4, 12            114, 297    31, 62
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends.outputs import causal_conv1d_fwd_outputs, empty_gradients
from statescan.backends.torch._conv_blocks import Conv, Stretch, cut_channels, cut_time, prepare
from statescan.backends.torch._conv_plan import Plan
from statescan.backends.torch._pointwise import select, silu_, silu_gradient_

# States summed in one call, few enough that torch does not share the sum between threads.
_SERIAL_SUM = 4096


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
    conv = prepare(x, weight, bias, initial_states, seq_idx, cu_seqlens, reverse)
    for rows, low, high in cut_time(x, len(conv.taps)):
        where = conv.stretch(rows, low, high)
        for channels in cut_channels(x, rows, high - low):
            values = conv.preactivation(where, channels, *conv.load(where, channels))
            if silu:
                silu_(values)
            if conv.plan.padded and where.masks is not None:
                values = select(values, where.masks[0])
            out[rows, channels, low:high] = values
    _keep_final_states(final_states, x, initial_states, conv.plan)
    return out, final_states


def _keep_final_states(
    final_states: Tensor, x: Tensor, initial_states: Tensor | None, plan: Plan
) -> None:
    """The last width - 1 tokens of each sequence; earlier columns from its initial state, or 0."""
    rows, times, states, columns = plan.tails
    final_states.zero_()
    final_states[states, :, columns] = x[rows, :, times]
    if initial_states is not None:
        sources, source_columns, states, columns = plan.carried
        carried = initial_states[sources, :, source_columns]
        final_states[states, :, columns] = carried.to(final_states.dtype)


class _Sums(NamedTuple):
    """Gradients that gather over blocks, in the dtype of the arithmetic.

    ``heads`` (num_states, dim, width - 1) holds dpre of the first tokens after each initial state.
    """

    weight: Tensor
    bias: Tensor
    heads: Tensor | None


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
    dx, dweight, dbias, dinitial_states = empty_gradients(x, weight, bias, initial_states)
    conv = prepare(x, weight, bias, initial_states, seq_idx, cu_seqlens, reverse)
    heads = None if conv.from_states is None else torch.zeros_like(conv.from_states)
    sums = _Sums(
        torch.zeros(weight.shape, dtype=conv.dtype, device=x.device),
        torch.zeros(weight.shape[:1], dtype=conv.dtype, device=x.device),
        heads,
    )
    for rows, low, high in cut_time(x, len(conv.taps)):
        # Tokens low to high reach forward into outputs that belong to the neighbouring stretch.
        where = conv.stretch(rows, *conv.reach(low, high, -conv.step))
        tails = None
        if dfinal_states is not None:
            tails = conv.plan.tails.within(rows, low, high)
        for channels in cut_channels(x, rows, high - low):
            dtokens = _block_gradient(conv, where, channels, low, high, dout, silu, sums)
            if tails is not None and dfinal_states is not None:
                kept = dfinal_states[tails.states, channels, tails.columns]
                dtokens[tails.rows, :, tails.times] += kept.to(conv.dtype)
            dx[rows, channels, low:high] = dtokens
    if initial_states is not None:
        dstates = _state_gradient(conv, initial_states, dfinal_states, weight, sums)
        dinitial_states.copy_(dstates)
    dweight.copy_(sums.weight)
    if bias is not None:
        dbias.copy_(sums.bias)
    return dx, dweight, dbias, dinitial_states


def _block_gradient(
    conv: Conv,
    where: Stretch,
    channels: slice,
    low: int,
    high: int,
    dout: Tensor,
    silu: bool,
    sums: _Sums,
) -> Tensor:
    """dx of tokens low to high; adds their part to ``sums``. ``where`` holds what they reach."""
    tokens, first = conv.load(where, channels)
    dpre = dout[where.rows, channels, where.low : where.high].to(conv.dtype)
    if silu:
        dpre = silu_gradient_(conv.preactivation(where, channels, tokens, first), dpre)
    if conv.plan.padded and where.masks is not None:
        dpre = select(dpre, where.masks[0])
    if where.heads is not None and sums.heads is not None:
        rows, times, states, columns = where.heads
        sums.heads[states, channels, columns] = dpre[rows, :, times]
    own = dpre[..., low - where.low : high - where.low]
    if conv.bias is not None:
        sums.bias[channels] += _sum_tokens(own)
    dtokens = own * conv.taps[0][channels]
    for lag in range(len(conv.taps)):
        shift = lag * conv.step
        start, stop = max(low, -shift), min(high, conv.x.shape[2] - shift)
        if start >= stop:
            continue
        later = slice(start + shift - where.low, stop + shift - where.low)
        effect = dpre[..., later]
        product = effect * tokens[..., start - first : stop - first]
        if where.masks is not None:
            product = select(product, where.masks[lag][..., later])
            effect = select(effect, where.masks[lag][..., later])
        sums.weight[channels, -1 - lag] += _sum_tokens(product)
        if lag > 0:
            dtokens[..., start - low : stop - low].addcmul_(effect, conv.taps[lag][channels])
    return dtokens


def _sum_tokens(values: Tensor) -> Tensor:
    """(rows, channels, time) summed to (channels,), in an order that the shape alone fixes.

    torch shares a sum between threads, and so lets their number choose the order, when one
    result is made of more than 32768 numbers; the cuts of ``_conv_blocks.py`` stay below.
    """
    return values.sum(2).sum(0)


def _state_gradient(
    conv: Conv,
    initial_states: Tensor,
    dfinal_states: Tensor | None,
    weight: Tensor,
    sums: _Sums,
) -> Tensor:
    """Gradient of initial states, whose column c meets tap w at token c - w; adds to dweight."""
    heads = sums.heads if sums.heads is not None else torch.zeros_like(initial_states)
    states, taps = initial_states.to(conv.dtype), weight.to(conv.dtype)
    dstates = torch.zeros_like(heads)
    absent = torch.ones(heads.shape[0], 1, heads.shape[2], dtype=torch.bool, device=heads.device)
    absent[conv.plan.heads.states, :, conv.plan.heads.columns] = False
    for tap in range(heads.shape[2]):
        reached = heads.shape[2] - tap
        effect = heads[..., :reached]
        dstates[..., tap:].addcmul_(effect, taps[:, tap, None])
        product = (effect * states[..., tap:]).masked_fill_(absent[..., :reached], 0.0)
        for part in product.split(_SERIAL_SUM):
            sums.weight[:, tap] += _sum_tokens(part)
    if dfinal_states is not None:
        sources, source_columns, finals, columns = conv.plan.carried
        carried = dfinal_states[finals, :, columns]
        dstates[sources, :, source_columns] += carried.to(conv.dtype)
    return dstates
