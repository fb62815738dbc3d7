# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel for one or a few new tokens of the causal convolution, states in place.

The algorithm is described in ``kernels/cuda/causal_conv1d_update.cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statescan.backends.cuda._slots import extent, list_fields, meets, separate, starting_pool
from statescan.backends.cuda._strides import NAMES, address, dtype, strides
from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.sequences import MOST_BLOCKS
from statescan.backends.cuda.tables.base import packer
from statescan.backends.cuda.tables.causal_conv1d_update import CHANNELS, STATE_LENS, THREADS

_TAPS = 4
# A thread of the dense instances takes so many rows, so that it reads the taps once for all, as
# long as that leaves so many blocks.
_MOST_ROWS, _ENOUGH_BLOCKS = 4, 1 << 10
_MOST_BLOCKS_Y = 65535


class _Form(NamedTuple):
    """What calls of one form share: the instance, its grid, and the fields after the addresses."""

    instance: str
    grid: tuple[int, int, int]
    rest: bytes


def causal_conv1d_update_plan(*args: Any) -> Callable[[Sequence[Tensor]], None]:
    """A function that runs calls like this one: same shapes, strides, dtypes, options, device.

    It takes the tensors that are given, from x to out. It is for calls without indices, rings and
    kept states, whose output lies apart.
    """
    x, conv_state, weight, bias = args[:4]
    out, silu, pad_slot_id = args[9:12]
    forms = [
        _describe(
            *(x, conv_state, conv_state, weight, bias, None, out, silu, pad_slot_id),
            *(None, None, None, None, False, fits),
        )
        for fits in (False, True)
    ]
    device = x.device
    x_bytes, out_bytes, state_bytes = (extent(tensor) for tensor in (x, out, conv_state))
    has_bias = bias is not None

    def planned(tensors: Sequence[Tensor]) -> None:
        x, state, taps, *base, out = [tensor.data_ptr() for tensor in tensors]
        if (x < state + state_bytes and state < x + x_bytes) or (
            x < out + out_bytes and out < x + x_bytes
        ):
            given = tensors if has_bias else (*tensors[:3], None, tensors[-1])
            long_road: Any = causal_conv1d_update
            long_road(*given[:4], *(None,) * 5, given[4], silu, pad_slot_id)
            return
        bias = base[0] if base else 0
        # A plan is made from strides; vectors need addresses that fit too.
        form = forms[(x | state | taps | bias | out) % 16 == 0]
        addresses = (x, out, state, state, 0, taps, bias, 0, 0, 0, 0)
        launch("causal_conv1d_update", form.instance, device, form.grid, addresses, None, form.rest)

    return planned


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
    if x.shape[0] == 0 or x.shape[1] == 0:
        return
    read, write = conv_state_indices, dst_conv_state_indices
    start, by_row = starting_pool(conv_state, read, write)
    positions = cache_seqlens if conv_state.shape[2] > 0 else None
    # A thread writes results and states while it still reads its tokens.
    if meets(x, conv_state) or meets(x, intermediate_states):
        x = x.clone()
    result = torch.empty_like(out) if meets(out, x) else separate(out, weight, bias)
    tensors = (x, result, conv_state, start, intermediate_states, weight, bias)
    lists = (read, write, num_accepted_tokens, positions)
    form = _describe(
        *(x, conv_state, start, weight, bias, intermediate_states, result, silu, pad_slot_id),
        *(*lists, by_row, _all_aligned(x, result, conv_state, start, weight, bias)),
    )
    addresses = tuple(address(tensor) for tensor in (*tensors, *lists))
    launch("causal_conv1d_update", form.instance, x.device, form.grid, addresses, None, form.rest)
    if result is not out:
        out.copy_(result)


def _all_aligned(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _describe(
    x: Tensor,
    conv_state: Tensor,
    start: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    out: Tensor,
    silu: bool,
    pad_slot_id: int,
    read: Tensor | None,
    write: Tensor | None,
    accepted: Tensor | None,
    positions: Tensor | None,
    by_row: bool,
    fits: bool,
) -> _Form:
    """The form of a call; ``fits`` says whether the addresses are multiples of 16."""
    batch, dim = x.shape[:2]
    num_tokens = x.shape[2] if x.dim() == 3 else 1
    width, state_len = weight.shape[1], conv_state.shape[2]
    plain = kept is None and accepted is None and positions is None and num_tokens == 1
    rows, grid = 1, (min(-(-batch * dim // THREADS), MOST_BLOCKS), 1, 1)
    instance = "any"
    if fits and plain and _is_dense(x, conv_state, start, weight, bias, out):
        groups = -(-dim // (CHANNELS * THREADS))
        rows = max(1, min(_MOST_ROWS, batch * groups // _ENOUGH_BLOCKS))
        instance = f"{NAMES[x.dtype]}_columns{state_len}"
        grid = (groups, min(-(-batch // rows), _MOST_BLOCKS_Y), 1)
    bits, list_strides = list_fields(read, write, accepted, positions)
    numbers = (
        *(*_tokens(x), *_tokens(out), *conv_state.stride(), *start.stride(), *strides(kept, 4)),
        *(*weight.stride(), *strides(bias, 1)),
        *map(dtype, (x, out, conv_state, kept, weight, bias)),
        *(*bits, *list_strides, conv_state.shape[0], pad_slot_id, int(by_row)),
        0 if kept is None else kept.shape[1],
        *(batch, num_tokens, dim, width, state_len, int(silu), rows),
    )
    return _Form(instance, grid, packer(len(numbers)).pack(*numbers))


def _is_dense(
    x: Tensor, conv_state: Tensor, start: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> bool:
    """Whether vectors may move everything, as far as shapes, strides and dtypes tell."""
    dim, state_len = conv_state.shape[1:]
    if state_len not in STATE_LENS or weight.shape[1] != _TAPS or dim % CHANNELS:
        return False
    states, given = (conv_state, start), (conv_state, start, weight, bias, out)
    if any(t is not None and t.dtype != x.dtype for t in given):
        return False
    if any(t.stride(1) != state_len or t.stride(2) != 1 for t in states):
        return False
    if weight.stride() != (_TAPS, 1) or (bias is not None and bias.stride(0) != 1):
        return False
    if any(t.stride(1) != 1 for t in (x, out)):
        return False
    return all(t.stride(0) % CHANNELS == 0 for t in (*states, x, out))


def _tokens(tensor: Tensor) -> tuple[int, ...]:
    """Strides of (batch, dim) or (batch, dim, ntokens)."""
    return tensor.stride() if tensor.dim() == 3 else (*tensor.stride(), 0)
