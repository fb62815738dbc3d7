# SPDX-License-Identifier: Apache-2.0
"""The causal convolution of one or a few new tokens in torch, state in place.

Slots, padding rows and rollback belong in ``backends/_decode.py``.

Everything that is read is read before the first write, so x, out and the states may share memory.
Columns of states are taken as views: putting state and tokens into one tensor first takes twice as
long, since torch copies runs of a few elements one by one.

One token is 10 calls of torch, 13 with indices. Microseconds a call on a Xeon server with torch
2.11, batch 1, width 4, float32: 32 for 64 channels (47 with indices), 43 for 1536, 63 for 5120.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from statescan.backends._decode import find_slots
from statescan.backends.outputs import compute_dtype
from statescan.backends.torch._pointwise import silu_, upcast


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
    """``statescan.causal_conv1d_update``; states and ``out`` are written in place."""
    slots = find_slots(
        x.shape[0], conv_state.shape[0], conv_state_indices, dst_conv_state_indices, pad_slot_id
    )
    if slots is None:
        out.zero_()
        return
    dtype = compute_dtype(x, conv_state, weight, bias, intermediate_states)
    start = slots.start(conv_state, intermediate_states, num_accepted_tokens)
    tokens = [upcast(token, dtype) for token in _tokens(slots.take(x))]
    if cache_seqlens is None:
        taps, states = _push(upcast(start, dtype), tokens, weight.shape[1] - 1)
    else:
        position = slots.take(cache_seqlens).to(torch.int64)
        taps, states = _push_ring(upcast(start, dtype), tokens, weight.shape[1] - 1, position)
    columns = upcast(weight, dtype).unbind(1)
    bias = None if bias is None else upcast(bias, dtype)
    results = [_convolve(taps[t:], columns, bias) for t in range(len(tokens))]
    last = states(len(tokens)) if num_accepted_tokens is None else start
    history = []
    if intermediate_states is not None:
        history = [states(t) for t in range(1, len(tokens) + 1)]
    slots.store(conv_state, last)
    if intermediate_states is not None and history:
        slots.record(intermediate_states, slice(0, len(history)), torch.stack(history, 1))
    for target, result in zip(_tokens(out), results):
        slots.finish(target, silu_(result) if silu else result)


def _tokens(tensor: Tensor) -> tuple[Tensor, ...]:
    """(batch, dim) of each token."""
    return (tensor,) if tensor.dim() == 2 else tensor.unbind(2)


def _push(
    start: Tensor, tokens: list[Tensor], halo: int
) -> tuple[list[Tensor], Callable[[int], Tensor]]:
    """The ``halo`` inputs before the first token and all tokens; the state after t of them."""
    state_len = start.shape[2]
    inputs = [*start.unbind(2), *tokens]

    def state(number: int) -> Tensor:
        kept = inputs[number : number + state_len]
        return torch.stack(kept, 2) if kept else start

    return inputs[state_len - halo :], state


def _push_ring(
    start: Tensor, tokens: list[Tensor], halo: int, position: Tensor
) -> tuple[list[Tensor], Callable[[int], Tensor]]:
    """The same for rings; ``position`` (batch,) is the number of tokens that each has seen."""
    batch, dim, state_len = start.shape
    ages = torch.arange(-halo, len(tokens), device=start.device)
    columns = (position[:, None, None] + ages).remainder(state_len).expand(batch, dim, -1)
    states = [start]
    for column, token in zip(columns[..., halo:].split(1, 2), tokens):
        states.append(states[-1].scatter(2, column, token.unsqueeze(2)))
    return [*start.gather(2, columns[..., :halo]).unbind(2), *tokens], states.__getitem__


def _convolve(taps: list[Tensor], weight: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    """(batch, dim) result for the token that the last weight (dim,) meets."""
    if bias is None:
        total = taps[0] * weight[0]
    else:
        total = torch.addcmul(bias, taps[0], weight[0])
    for tap, column in zip(taps[1:], weight[1:]):
        total.addcmul_(tap, column)
    return total
