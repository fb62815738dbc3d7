# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel for one or a few new tokens of the causal convolution, states in place.

The algorithm is described in ``kernels/cpu/causal_conv1d_update.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from statescan.backends.cpu import abi, threads
from statescan.backends.cpu._slots import separate, slot_fields, starting_pool
from statescan.backends.native import vector_bytes


def causal_conv1d_update_plan(*args: Any) -> Callable[[Sequence[Tensor]], None]:
    """A function that runs calls like this one: same shapes, strides, dtypes, options, threads.

    It takes the tensors that are given, from x to out. It is for calls without indices, rings and
    kept states, and for one thread at a time: its scratch memory is its own.
    """
    x, conv_state, weight, bias = args[:4]
    slots = (0, 0, 0, args[11])
    form, _scratch = describe(
        x, conv_state, conv_state, weight, bias, None, None, args[9], args[10], slots
    )
    run = abi.kernel("causal_conv1d_update")
    listed = abi.address_list((x, args[9], conv_state, conv_state, None, weight, bias))

    def planned(tensors: Sequence[Tensor], _keep: Tensor = _scratch) -> None:
        x, state, *weights, out = tensors
        run(form, listed(x, out, state, state, *weights))

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
    slots, _lists = slot_fields(
        conv_state_indices, dst_conv_state_indices, num_accepted_tokens, pad_slot_id
    )
    start = starting_pool(conv_state, conv_state_indices, dst_conv_state_indices)
    positions = None
    if cache_seqlens is not None and conv_state.shape[2] > 0:
        positions = cache_seqlens.to(torch.int64).contiguous()
    result = separate(out, x, weight, bias)
    form, _scratch = describe(
        *(x, conv_state, start, weight, bias, positions, intermediate_states, result, silu, slots)
    )
    tensors = (x, result, conv_state, start, intermediate_states, weight, bias)
    abi.kernel("causal_conv1d_update")(form, abi.addresses(*tensors))
    if result is not out:
        out.copy_(result)


def describe(
    x: Tensor,
    conv_state: Tensor,
    start: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    intermediate_states: Tensor | None,
    out: Tensor,
    silu: bool,
    slots: tuple[int, int, int, int],
) -> tuple[bytes, Tensor]:
    """The packed struct of a call and the scratch memory that it names."""
    batch, dim = x.shape[:2]
    num_tokens = x.shape[2] if x.dim() == 3 else 1
    width, state_len = weight.shape[1], conv_state.shape[2]
    kept, kept_stride = abi.ABSENT, 0
    if intermediate_states is not None:
        row, kept_stride, channel, column = intermediate_states.stride()
        kept = (0, row, channel, column, abi.DTYPES[intermediate_states.dtype])
    scratch_bytes = (2 * width + state_len + num_tokens) * vector_bytes()
    count = threads.workers()
    scratch = torch.empty(count * scratch_bytes, dtype=torch.uint8, device="cpu")
    packed = abi.pack(
        "causal_conv1d_update",
        *(_tokens(x), _tokens(out), abi.tensor3(conv_state), abi.tensor3(start), kept),
        (0, 0, *weight.stride(), abi.DTYPES[weight.dtype]),
        abi.ABSENT if bias is None else (0, 0, bias.stride(0), 0, abi.DTYPES[bias.dtype]),
        *(slots, (count, scratch.data_ptr(), scratch_bytes), abi.address(positions), kept_stride),
        *(batch, num_tokens, dim, width, state_len, int(silu)),
    )
    return packed, scratch


def _tokens(tensor: Tensor) -> tuple[int, ...]:
    """``struct statescan_tensor`` of (batch, dim) or (batch, dim, ntokens)."""
    if tensor.dim() == 3:
        return abi.tensor3(tensor)
    return (tensor.data_ptr(), *tensor.stride(), 0, abi.DTYPES[tensor.dtype])
