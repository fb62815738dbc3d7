# SPDX-License-Identifier: Apache-2.0
"""The causal convolution of one or a few new tokens in torch, state in place.

Slots, padding rows and rollback belong in ``backends/_decode.py``.

Everything that is read is read before the first write, so x, out and the states may share memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.backends._decode import find_slots
from statescan.backends.outputs import compute_dtype
from statescan.backends.torch._pointwise import silu_


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    dst_conv_state_indices: Tensor | None,
    intermediate_states: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    silu: bool,
    pad_slot_id: int,
) -> None:
    """``statescan.causal_conv1d_update``; writes ``conv_state``, ``intermediate_states``, ``out``."""
    slots = find_slots(
        x.shape[0], conv_state.shape[0], conv_state_indices, dst_conv_state_indices, pad_slot_id
    )
    if slots is None:
        out.zero_()
        return
    if x.dim() == 2:
        x, out = x.unsqueeze(2), out.unsqueeze(2)
    dtype = compute_dtype(x, conv_state, weight, bias, intermediate_states)
    tokens = slots.take(x)
    start = slots.start(conv_state, intermediate_states, num_accepted_tokens)
    keep_all = intermediate_states is not None
    halo = weight.shape[1] - 1
    if cache_seqlens is None:
        taps, last, history = _push(start, tokens, halo, dtype, keep_all)
    else:
        position = slots.take(cache_seqlens).to(torch.int64)
        taps, last, history = _push_ring(start, tokens, position, halo, dtype, keep_all)
    values = _convolve(taps, weight.to(dtype), None if bias is None else bias.to(dtype))
    if silu:
        silu_(values)
    slots.store(conv_state, last if num_accepted_tokens is None else start)
    if intermediate_states is not None and history is not None:
        slots.record(intermediate_states, slice(0, history.shape[1]), history)
    slots.finish(out, values)


def _push(
    start: Tensor, tokens: Tensor, halo: int, dtype: torch.dtype, keep_all: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the taps meet, the state after the last token, and (batch, ntokens, ...) all states."""
    state_len, ntokens = start.shape[2], tokens.shape[2]
    window = torch.cat([start, tokens], 2).to(dtype)
    history = None
    if keep_all:
        history = window.unfold(2, state_len, 1)[:, :, 1:].transpose(1, 2)
    return window[..., state_len - halo :], window[..., ntokens:], history


def _push_ring(
    start: Tensor, tokens: Tensor, position: Tensor, halo: int, dtype: torch.dtype, keep_all: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same for rings; ``position`` (batch,) is the number of tokens that each has seen."""
    batch, dim, state_len = start.shape
    start, tokens = start.to(dtype), tokens.to(dtype)
    ages = torch.arange(-halo, tokens.shape[2], device=start.device)
    columns = (position[:, None, None] + ages).remainder(state_len).expand(batch, dim, -1)
    taps = torch.cat([start.gather(2, columns[..., :halo]), tokens], 2)
    states, last = [], start
    for token in range(tokens.shape[2]):
        here = slice(halo + token, halo + token + 1)
        last = last.scatter(2, columns[..., here], taps[..., here])
        states.append(last)
    return taps, last, torch.stack(states, 1) if keep_all and states else None


def _convolve(taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, dim, ntokens) from the tokens and the width - 1 before them."""
    columns = weight.unsqueeze(2).unbind(1)
    ntokens = taps.shape[2] - len(columns) + 1
    first = taps[..., :ntokens]
    if bias is None:
        values = first * columns[0]
    else:
        values = torch.addcmul(bias.unsqueeze(1), first, columns[0])
    for tap in range(1, len(columns)):
        values.addcmul_(taps[..., tap : tap + ntokens], columns[tap])
    return values
