# SPDX-License-Identifier: Apache-2.0
"""The inside of a Mamba-1 block, put together from the references of convolution and scan.

No maths of the scan or the convolution is repeated here.
"""

from contextlib import nullcontext
from typing import TypedDict

import torch
import torch.nn.functional as F

from statescan.reference.causal_conv1d import causal_conv1d_ref
from statescan.reference.discretize import compute_dtype
from statescan.reference.selective_scan import selective_scan_ref


class _Order(TypedDict):
    """How tokens are grouped and walked, the same for convolution and scan."""

    seq_idx: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    reverse: bool


def mamba_inner_ref(
    xz: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    dt_proj_weight: torch.Tensor,
    A: torch.Tensor,
    *,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    b_proj_bias: torch.Tensor | None = None,
    c_proj_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    activation: str | None = "silu",
    out_proj_weight: torch.Tensor | None = None,
    out_proj_bias: torch.Tensor | None = None,
    b_norm_weight: torch.Tensor | None = None,
    c_norm_weight: torch.Tensor | None = None,
    dt_norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    conv_initial_states: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    reverse: bool = False,
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split xz, convolve x, project it to dt, B and C, scan with z as gate, project the result.

    Args:
        xz: (batch, 2 dim, seqlen), x before z.
        conv_weight: (dim, width); conv_bias: (dim,).
        x_proj_weight: (dt_rank + B part + C part, dim). A part is dstate wide, for complex A
            2 dstate with real and imaginary parts interleaved; it is missing where the constant
            B or C (dim, dstate) is given.
        dt_proj_weight: (dim, dt_rank).
        b_proj_bias, c_proj_bias: added to the projected part, as wide as it is.
        b_norm_weight, c_norm_weight: as wide as the projected part, for an RMS norm of it.
        dt_norm_weight: (dim,) for an RMS norm of dt over dim, before dt_bias.
        out_proj_weight: (d_model, dim); out_proj_bias: (d_model,).
        The others: as in `selective_scan_ref` and `causal_conv1d_ref`.

    Returns:
        out (batch, dim, seqlen), or (batch, seqlen, d_model) with out_proj_weight, 0 at padding;
        with return_final_states also the final states of the convolution and of the scan.
    """
    weights = (conv_weight, conv_bias, x_proj_weight, dt_proj_weight, A, B, C, D, dt_bias)
    biases = (b_proj_bias, c_proj_bias, out_proj_weight, out_proj_bias)
    norms = (b_norm_weight, c_norm_weight, dt_norm_weight)
    compute = compute_dtype(xz, *weights, *biases, *norms, conv_initial_states, initial_states)
    work = torch.float64 if compute == torch.float64 else xz.dtype
    dim, dt_rank = dt_proj_weight.shape
    order: _Order = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "reverse": reverse}

    x, conv_final_states = causal_conv1d_ref(
        xz[:, :dim].to(work),
        conv_weight,
        conv_bias,
        activation=activation,
        initial_states=conv_initial_states,
        return_final_states=True,
        **order,
    )
    projected = _linear(x.transpose(1, 2), x_proj_weight)
    if seq_idx is not None:
        # Padding projects to 0, where an RMS norm with eps 0 has no gradient. Nothing reads it,
        # so any other number will do.
        projected = torch.where(seq_idx[:, :, None] < 0, torch.ones_like(projected), projected)
    dt = _linear(projected[:, :, :dt_rank], dt_proj_weight)
    dt = _rms_norm(dt, dt_norm_weight, norm_eps, compute)
    part = A.shape[1] * (2 if A.is_complex() else 1)
    if B is None:
        columns = projected[:, :, dt_rank : dt_rank + part]
        B = _weights(columns, b_proj_bias, b_norm_weight, norm_eps, compute, A.is_complex())
    if C is None:
        columns = projected[:, :, projected.shape[2] - part :]
        C = _weights(columns, c_proj_bias, c_norm_weight, norm_eps, compute, A.is_complex())

    out, final_states = selective_scan_ref(
        x,
        dt.transpose(1, 2),
        A,
        B,
        C,
        D=D,
        z=xz[:, dim:].to(work),
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        initial_states=initial_states,
        return_final_states=True,
        **order,
    )
    if out_proj_weight is not None:
        out = _linear(out.transpose(1, 2), out_proj_weight, out_proj_bias)
        if seq_idx is not None:
            out = torch.where(seq_idx[:, :, None] < 0, torch.zeros_like(out), out)
    if not return_final_states:
        return out.to(xz.dtype)
    return out.to(xz.dtype), conv_final_states.to(xz.dtype), final_states


def _linear(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A projection in the dtype of its input, whatever autocast would prefer."""
    device = tokens.device.type
    known = torch.amp.is_autocast_available(device)
    with torch.autocast(device, enabled=False) if known else nullcontext():
        return F.linear(
            tokens, weight.to(tokens.dtype), None if bias is None else bias.to(tokens.dtype)
        )


def _weights(
    columns: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    compute: torch.dtype,
    is_complex: bool,
) -> torch.Tensor:
    """The scan's B or C (batch, dstate, seqlen) from its columns of the projection."""
    columns = columns.to(compute)
    if bias is not None:
        columns = columns + bias.to(compute)
    columns = _rms_norm(columns, norm_weight, eps, compute)
    if is_complex:
        columns = torch.complex(columns[..., 0::2], columns[..., 1::2])
    return columns.transpose(1, 2)


def _rms_norm(
    tensor: torch.Tensor, weight: torch.Tensor | None, eps: float, compute: torch.dtype
) -> torch.Tensor:
    """The tensor over its root mean square along the last axis, times weight if there is one."""
    if weight is None:
        return tensor
    tensor = tensor.to(compute)
    mean_square = tensor.square().mean(dim=-1, keepdim=True)
    return tensor * torch.rsqrt(mean_square + eps) * weight.to(compute)
