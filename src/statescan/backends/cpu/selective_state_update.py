# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel for one or a few decode steps of the SSM state, in place.

Both forms of the op are one to the kernel (``backends/_state_axes.py``). The algorithm is described
in ``kernels/cpu/selective_state_update.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from statescan.backends._state_axes import StateAxes
from statescan.backends.cpu import abi, threads
from statescan.backends.cpu._slots import separate, slot_fields, starting_pool
from statescan.backends.native import vector_bytes

_ABSENT = (0, 0, 0, 0, 0, 0, 0)
# Of the kernel: channels of a task, its tables of them, and rows of one number a channel.
_CHANNELS, _TABLES, _ROWS = 64, 2, 4


class _Form(StateAxes):
    """Each argument as ``struct statescan_states``."""

    def tokens(self, tensor: Tensor | None) -> tuple[int, ...]:
        """The struct of x, dt, z or out."""
        if tensor is None:
            return _ABSENT
        return (tensor.data_ptr(), *self.of_tokens(tensor), 0, abi.DTYPES[tensor.dtype])

    def weights(self, tensor: Tensor) -> tuple[int, ...]:
        """The same of B or C, whose heads are groups."""
        row, token, group, state = self.of_weights(tensor)
        return (tensor.data_ptr(), row, token, group, 0, state, abi.DTYPES[tensor.dtype])

    def per_channel(self, tensor: Tensor | None) -> tuple[int, ...]:
        """The same of D and dt_bias."""
        if tensor is None:
            return _ABSENT
        where = (0, 0, *self.of_channels(tensor.stride()), 0)
        return (tensor.data_ptr(), *where, abi.DTYPES[tensor.dtype])

    def states(self, tensor: Tensor | None, rows: int, tokens: int) -> tuple[int, ...]:
        """The same of a table of states with ``rows`` and ``tokens`` axes in front."""
        if tensor is None:
            return _ABSENT
        strides = tensor.stride()
        leading = (strides[0] if rows else 0, strides[1] if tokens else 0)
        where = (*leading, *self.of_channels(strides[rows + tokens :]), strides[-1])
        return (tensor.data_ptr(), *where, abi.DTYPES[tensor.dtype])


def selective_state_update_plan(*args: Any) -> Callable[[Sequence[Tensor]], None]:
    """A function that runs calls like this one: same shapes, strides, dtypes, options, threads.

    It takes the tensors that are given, from ssm_state to out. It is for calls without indices
    and kept states, and for one thread at a time: its scratch memory is its own.
    """
    ssm_state, x, dt, A, B, C, D, z, dt_bias = args[:9]
    out, dt_softplus, pad_slot_id = args[13:16]
    form, _scratch = describe(
        *(ssm_state, ssm_state, None, x, dt, A, B, C, D, z, dt_bias, out),
        *(dt_softplus, (0, 0, 0, pad_slot_id)),
    )
    run = abi.kernel("selective_state_update")
    listed = abi.address_list((ssm_state, ssm_state, None, *args[1:9], out))

    def planned(tensors: Sequence[Tensor], _keep: Tensor = _scratch) -> None:
        run(form, listed(tensors[0], *tensors))

    return planned


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_batch_indices: Tensor | None,
    dst_state_batch_indices: Tensor | None,
    intermediate_states: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    dt_softplus: bool,
    pad_slot_id: int,
) -> None:
    """``statescan.selective_state_update``; states and ``out`` are written in place."""
    if x.shape[0] == 0 or ssm_state.shape[1] == 0:
        return
    slots, _lists = slot_fields(
        state_batch_indices, dst_state_batch_indices, num_accepted_tokens, pad_slot_id
    )
    start = starting_pool(ssm_state, state_batch_indices, dst_state_batch_indices)
    result = separate(out, x, dt, A, B, C, D, z, dt_bias)
    tensors = (ssm_state, start, intermediate_states, x, dt, A, B, C, D, z, dt_bias, result)
    form, _scratch = describe(*tensors, dt_softplus, slots)
    abi.kernel("selective_state_update")(form, abi.addresses(*tensors))
    if result is not out:
        out.copy_(result)


def describe(
    ssm_state: Tensor,
    start: Tensor,
    intermediate_states: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor,
    dt_softplus: bool,
    slots: tuple[int, int, int, int],
    A_is_log: bool = False,
) -> tuple[bytes, Tensor]:
    """The packed struct of a call and the scratch memory that it names."""
    form = _Form(ssm_state, x, B, C)
    dstate = ssm_state.shape[-1]
    lanes = vector_bytes() // 4
    padded = -(-dstate // lanes) * lanes
    floats = (_ROWS + lanes) * _CHANNELS + (_TABLES * _CHANNELS + 2) * padded
    count = threads.workers()
    scratch = torch.empty(count * floats, dtype=torch.float32, device="cpu")
    packed = abi.pack(
        "selective_state_update",
        *(form.states(ssm_state, 1, 0), form.states(start, 1, 0)),
        form.states(intermediate_states, 1, 1),
        *(form.tokens(x), form.tokens(dt), form.states(A, 0, 0)),
        *(form.weights(B), form.weights(C), form.per_channel(D), form.tokens(z)),
        *(form.per_channel(dt_bias), form.tokens(out), slots),
        (count, scratch.data_ptr(), 4 * floats),
        *(x.shape[0], form.num_tokens, form.num_heads, form.head_channels, dstate),
        *(form.B_heads, form.C_heads, int(dt_softplus), int(A_is_log)),
    )
    return packed, scratch
