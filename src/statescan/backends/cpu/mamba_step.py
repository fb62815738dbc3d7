# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel for one decode step of a whole Mamba-1 mixer.

The algorithm is described in ``kernels/cpu/mamba_step.c``. It is the composition in
``nn.Mamba.step`` with fewer launches; nothing is offered here that that does not define.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from statescan.backends.cpu import abi, threads
from statescan.backends.cpu import causal_conv1d_update as conv
from statescan.backends.cpu import selective_state_update as state
from statescan.backends.cpu._workspace import floats
from statescan.backends.cpu.vector_linear import MOST_ROWS, matrix, rows, vector

_OUT_ROWS = 32


def mamba_step_plan(*tensors: Any) -> Callable[[Sequence[Tensor]], None] | None:
    """A function of hidden, the states, the weights and out for calls of this form.

    None if they are not offered. It is for one thread at a time: its workspace is its own.
    """
    found = describe(*tensors)
    if found is None:
        return None
    form, kept = found
    run = abi.kernel("mamba_step")
    listed = abi.address_list((tensors[0], tensors[14], *tensors[1:14]))

    def planned(tensors: Sequence[Tensor], _keep: tuple[Tensor, ...] = kept) -> None:
        hidden, *rest, out = tensors
        run(form, listed(hidden, out, *rest))

    return planned


def describe(
    hidden: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_proj_weight: Tensor,
    dt_proj_weight: Tensor,
    dt_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    out: Tensor,
) -> tuple[bytes, tuple[Tensor, ...]] | None:
    """The packed struct of a step and the memory that it names; None if it is not offered."""
    # What is refused here, shared memory of states too, the ops refuse with the reason.
    if any(t.dim() != 3 or 0 in t.stride() for t in (conv_state, ssm_state)):
        return None
    batch, d_model = hidden.shape
    dim, dstate = ssm_state.shape[1:]
    weights = (in_proj_weight, x_proj_weight, dt_proj_weight, out_proj_weight)
    matrices = [matrix(weight) for weight in weights]
    if None in matrices or not 0 < batch <= MOST_ROWS or 0 in (dim, d_model, dstate):
        return None
    width, rank, state_len = conv_weight.shape[1], dt_proj_weight.shape[1], conv_state.shape[2]
    wanted = (
        *((conv_state, (batch, dim, max(state_len, width - 1))), (ssm_state, (batch, dim, dstate))),
        *((in_proj_weight, (2 * dim, d_model)), (in_proj_bias, (2 * dim,))),
        *((conv_weight, (dim, width)), (conv_bias, (dim,)), (dt_proj_weight, (dim, rank))),
        *((x_proj_weight, (rank + 2 * dstate, dim)), (dt_bias, (dim,)), (D, (dim,))),
        *((A_log, (dim, dstate)), (out_proj_weight, (d_model, dim)), (out_proj_bias, (d_model,))),
        (out, (batch, d_model)),
    )
    if any(tensor is not None and tensor.shape != shape for tensor, shape in wanted):
        return None
    projected = x_proj_weight.shape[0]
    workspace = floats(batch * (d_model + 5 * dim + projected))
    # The kernel points these at its workspace; only their shapes count here.
    x = workspace[: batch * dim].view(batch, dim)
    B = workspace[: batch * dstate].view(batch, dstate)
    slots = (0, 0, 0, -1)
    conv_form, conv_scratch = conv.describe(
        x, conv_state, conv_state, conv_weight, conv_bias, None, None, x, True, slots
    )
    state_form, state_scratch = state.describe(
        *(ssm_state, ssm_state, None, x, x, A_log, B, B, D, x, dt_bias, x, True, slots, True)
    )
    count = threads.workers()
    sizes = (t.numel() * t.element_size() // count for t in (conv_scratch, state_scratch))
    scratch_bytes = -(-max(*sizes, 4 * batch * (_OUT_ROWS + max(dim, d_model))) // 64) * 64
    scratch = torch.empty(count * scratch_bytes, dtype=torch.uint8, device="cpu")
    form = abi.pack(
        "mamba_step",
        *(rows(hidden), rows(out), vector(in_proj_bias), vector(out_proj_bias)),
        *(fields for fields in matrices if fields is not None),
        *(abi.words_of(conv_form), abi.words_of(state_form)),
        (count, scratch.data_ptr(), scratch_bytes),
        *(workspace.data_ptr(), batch, d_model, dim),
    )
    return form, (scratch, workspace)
