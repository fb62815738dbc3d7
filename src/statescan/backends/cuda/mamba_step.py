# SPDX-License-Identifier: Apache-2.0
"""One decode step of a Mamba-1 mixer: torch's projections around two launches of the decode ops.

It is the composition in ``nn.Mamba.step`` without its small launches: A stays a logarithm, and
nothing is looked at twice. Nothing is offered here that that does not define, and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from statescan.backends.cuda import causal_conv1d_update as conv
from statescan.backends.cuda import selective_state_update as state


def mamba_step_plan(*tensors: Any) -> Callable[[Sequence[Tensor]], None] | None:
    """A function of the tensors given, from hidden to out, for steps of this form.

    Args:
        tensors: hidden, the states, in_proj's weight and bias, the convolution's, x_proj's weight,
            dt_proj's weight and bias, A_log, D, out_proj's weight and bias, and out.

    Returns:
        None where such a step is not offered: the ops then say what is wrong with it.
    """
    if not _is_offered(*tensors):
        return None
    absent = [tensor is None for tensor in tensors]

    def planned(given: Sequence[Tensor]) -> None:
        rest = iter(given)
        listed: list[Any] = [None if missing else next(rest) for missing in absent]
        _step(*listed)

    # The forms of the two launches are found out by the first step and kept.
    hidden, conv_state, ssm_state = tensors[:3]
    dim, dstate = ssm_state.shape[1:]
    batch, rank = hidden.shape[0], tensors[8].shape[1]
    xz = hidden.new_empty((batch, 2 * dim))
    x, z = xz.chunk(2, dim=-1)
    projected = hidden.new_empty((batch, rank + 2 * dstate))
    _, B, C = projected.split((rank, dstate, dstate), dim=-1)
    inner = hidden.new_empty((batch, dim))
    no_lists = (None,) * 5
    convolve = conv.causal_conv1d_update_plan(
        x, conv_state, *tensors[5:7], *no_lists, inner, True, -1
    )
    D, dt_bias = tensors[11], tensors[9]
    advance = state.selective_state_update_plan(
        *(ssm_state, inner, inner, tensors[10], B, C, D, z, dt_bias),
        *(None, None, None, None, inner, True, -1),
        A_is_log=True,
    )

    def _step(
        hidden: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        in_weight: Tensor,
        in_bias: Tensor | None,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        x_weight: Tensor,
        dt_weight: Tensor,
        dt_bias: Tensor | None,
        A_log: Tensor,
        D: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        out: Tensor,
    ) -> None:
        x, z = F.linear(hidden, in_weight, in_bias).chunk(2, dim=-1)
        convolved = torch.empty_like(inner)
        taps = [conv_weight] if conv_bias is None else [conv_weight, conv_bias]
        convolve([x, conv_state, *taps, convolved])
        projected = F.linear(convolved, x_weight)
        dt, B, C = projected.split((rank, dstate, dstate), dim=-1)
        dt = F.linear(dt, dt_weight)
        mixed = torch.empty_like(inner)
        optional = [tensor for tensor in (D, z, dt_bias) if tensor is not None]
        advance([ssm_state, convolved, dt, A_log, B, C, *optional, mixed])
        if out_bias is None:
            torch.mm(mixed, out_weight.t(), out=out)
        else:
            torch.addmm(out_bias, mixed, out_weight.t(), out=out)

    return planned


def _is_offered(
    hidden: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_weight: Tensor,
    dt_weight: Tensor,
    dt_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    out: Tensor,
) -> bool:
    """Whether shapes fit together, states have memory of their own, and torch may project."""
    if any(t.dim() != 3 or 0 in t.stride() for t in (conv_state, ssm_state)):
        return False
    batch, d_model = hidden.shape
    dim, dstate = ssm_state.shape[1:]
    if 0 in (batch, d_model, dim, dstate):
        return False
    width, rank = conv_weight.shape[1], dt_weight.shape[1]
    wanted = (
        *((conv_state, (batch, dim, max(conv_state.shape[2], width - 1))),),
        *((ssm_state, (batch, dim, dstate)), (in_weight, (2 * dim, d_model))),
        *((in_bias, (2 * dim,)), (conv_weight, (dim, width)), (conv_bias, (dim,))),
        *((x_weight, (rank + 2 * dstate, dim)), (dt_weight, (dim, rank)), (dt_bias, (dim,))),
        *((A_log, (dim, dstate)), (D, (dim,)), (out_weight, (d_model, dim))),
        *((out_bias, (d_model,)), (out, (batch, d_model))),
    )
    if any(tensor is not None and tensor.shape != shape for tensor, shape in wanted):
        return False
    projecting = (in_weight, in_bias, x_weight, dt_weight, out_weight, out_bias, out)
    return all(tensor is None or tensor.dtype == hidden.dtype for tensor in projecting)
