# SPDX-License-Identifier: Apache-2.0
"""The naive algorithms: what one writes first in PyTorch, kept as the mark to measure against.

Benchmarks and quickstart time them; the truth that results are judged by is in ``reference``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def selective_scan_naive(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """Make every step's decay and input as (batch, dim, seqlen, dstate), then walk time.

    Args:
        x, dt, z: (batch, dim, seqlen); dt passes through softplus after ``dt_bias``, (dim,).
        A: (dim, dstate).
        B, C: (batch, dstate, seqlen).
        D: (dim,).
    """
    step = F.softplus(dt + dt_bias.unsqueeze(-1))
    decay = torch.exp(step.unsqueeze(-1) * A.unsqueeze(1))
    entering = (step * x).unsqueeze(-1) * B.transpose(1, 2).unsqueeze(1)
    state = torch.zeros_like(decay[:, :, 0])
    outputs = []
    for token in range(x.shape[2]):
        state = decay[:, :, token] * state + entering[:, :, token]
        outputs.append((state * C[:, None, :, token]).sum(dim=-1))
    y = torch.stack(outputs, dim=2) + D.unsqueeze(-1) * x
    return (y * F.silu(z)).to(x.dtype)


def selective_state_update_naive(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """One token of the same; ``ssm_state`` (batch, dim, dstate) is updated in place."""
    step = F.softplus(dt + dt_bias)
    decay = torch.exp(step.unsqueeze(-1) * A)
    entering = (step * x).unsqueeze(-1) * B.unsqueeze(1)
    ssm_state.copy_(decay * ssm_state + entering)
    y = (ssm_state * C.unsqueeze(1)).sum(dim=-1) + D * x
    return (y * F.silu(z)).to(x.dtype)


def causal_conv1d_naive(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Torch's own convolution, padded on both sides and cut, then SiLU; weight (dim, width)."""
    dim, width = weight.shape
    padded = F.conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=dim)
    return F.silu(padded[..., : x.shape[2]])


def causal_conv1d_update_naive(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """One token (batch, dim); ``conv_state`` (batch, dim, width - 1) is updated in place."""
    window = torch.cat((conv_state, x.unsqueeze(-1)), dim=-1)
    conv_state.copy_(window[..., 1:])
    return F.silu((window * weight).sum(dim=-1) + bias)


def mamba_inner_naive(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj_weight: Tensor,
    dt_proj_weight: Tensor,
    A: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    out_proj_weight: Tensor,
) -> Tensor:
    """The parts one after the other: convolution, projections, naive scan, output projection."""
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_naive(x, conv_weight, conv_bias)
    dt_rank, dstate = dt_proj_weight.shape[1], A.shape[1]
    projected = F.linear(x.transpose(1, 2), x_proj_weight)
    low_dt, B, C = projected.split((dt_rank, dstate, dstate), dim=-1)
    dt = F.linear(low_dt, dt_proj_weight).transpose(1, 2)
    y = selective_scan_naive(
        *(x, dt, A, B.transpose(1, 2), C.transpose(1, 2)), D=D, z=z, dt_bias=dt_bias
    )
    return F.linear(y.transpose(1, 2), out_proj_weight)
