# SPDX-License-Identifier: Apache-2.0
"""``mamba_inner_fn`` and the forms that forks made of it, under their names and argument order.

Only renaming and putting ops together; their arithmetic is elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from statescan import ops
from statescan.compat._callers import context_of_caller
from statescan.compat.layer_norm import normalise
from statescan.errors import ArgumentError


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    conv_initial_states: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    return_final_states: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """The body of a Mamba-1 mixer: ``statescan.mamba_inner`` in the original's order.

    dt is normalised after its projection, as in the original. Unlike there, gradients pass
    through the three norms and reach their weights, and out_proj_bias gets one.

    Args:
        xz: (batch, 2 * dim, seqlen).
        conv1d_weight: (dim, 1, width), or (dim, width).
        conv1d_bias: (dim,) or None.
        x_proj_weight: (dt_rank + dstate + dstate, dim).
        delta_proj_weight: (dim, dt_rank).
        out_proj_weight: (d_model, dim).
        out_proj_bias: (d_model,) or None.
        A: (dim, dstate), float32 or complex64.
        B, C: (dim, dstate), constants instead of projected ones.
        D, delta_bias: (dim,).
        B_proj_bias, C_proj_bias: As long as the projected B and C.
        delta_softplus: Pass the step size through softplus.
        checkpoint_lvl: 0 or 1. Both give the same numbers; the backward always makes the
            convolution's output and dt again, which is the original's level 1.
        b_rms_weight, c_rms_weight, dt_rms_weight: Weights of RMS norms of B, C and dt.
        b_c_dt_rms_eps: Added to the mean square in them.
        conv_initial_states, initial_states, seq_idx, cu_seqlens, reverse, return_final_states,
            backend: As ``statescan.mamba_inner`` takes them; the original has none of them.

    Returns:
        (batch, seqlen, d_model), with ``return_final_states`` also the conv's and the scan's.
    """
    _check_level("mamba_inner_fn", checkpoint_lvl)
    if seq_idx is cu_seqlens is None:
        batch, _, seqlen = xz.shape
        _, seq_idx, cu_seqlens = context_of_caller(batch, 0, seqlen, 0)
    return ops.mamba_inner(
        _autocast(xz),
        _taps(conv1d_weight),
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        A,
        B=B,
        C=C,
        D=D,
        dt_bias=delta_bias,
        b_proj_bias=B_proj_bias,
        c_proj_bias=C_proj_bias,
        dt_softplus=bool(delta_softplus),
        out_proj_weight=out_proj_weight,
        out_proj_bias=out_proj_bias,
        b_norm_weight=b_rms_weight,
        c_norm_weight=c_rms_weight,
        dt_norm_weight=dt_rms_weight,
        norm_eps=b_c_dt_rms_eps,
        conv_initial_states=conv_initial_states,
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        return_final_states=return_final_states,
        backend=backend,
    )


def mamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``mamba_inner_fn`` on the reference backend: plain torch, token by token."""
    return mamba_inner_fn(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        out_proj_weight,
        out_proj_bias,
        A,
        B=B,
        C=C,
        D=D,
        delta_bias=delta_bias,
        B_proj_bias=B_proj_bias,
        C_proj_bias=C_proj_bias,
        delta_softplus=delta_softplus,
        backend="reference",
    )


def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Vim's form without the output projection; returns (batch, dim, seqlen)."""
    _check_level("mamba_inner_fn_no_out_proj", checkpoint_lvl)
    return ops.mamba_inner(
        *(_autocast(xz), _taps(conv1d_weight), conv1d_bias, x_proj_weight, delta_proj_weight, A),
        B=B,
        C=C,
        D=D,
        dt_bias=delta_bias,
        b_proj_bias=B_proj_bias,
        c_proj_bias=C_proj_bias,
        dt_softplus=bool(delta_softplus),
    )


def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
) -> Tensor:
    """Vim's form that scans both ways: A from the first token on, A_b from the last, summed.

    Convolution, B, C and dt are shared by both directions. Other arguments as ``mamba_inner_fn``.
    """
    _check_level("bimamba_inner_fn", checkpoint_lvl)
    xz = _autocast(xz)
    x, z = xz.chunk(2, dim=1)
    x = ops.causal_conv1d(x, _taps(conv1d_weight), conv1d_bias, activation="silu")  # type: ignore[assignment]
    rank, dstate = delta_proj_weight.shape[1], A.shape[1]
    parts = (rank, *(dstate for given in (B, C) if given is None))
    split = list(F.linear(x.transpose(1, 2), x_proj_weight.to(x.dtype)).split(parts, dim=-1))
    dt = F.linear(split.pop(0), delta_proj_weight.to(x.dtype)).transpose(1, 2)
    B = _projected(split, B_proj_bias) if B is None else B
    C = _projected(split, C_proj_bias) if C is None else C
    out = torch.zeros_like(x)
    for decay, reverse in ((A, False), (A_b, True)):
        out = out + ops.selective_scan(  # type: ignore[operator]
            *(x, dt, decay, B, C),
            D=D,
            z=z,
            dt_bias=delta_bias,
            dt_softplus=bool(delta_softplus),
            reverse=reverse,
        )
    bias = None if out_proj_bias is None else out_proj_bias.to(out.dtype)
    return F.linear(out.transpose(1, 2), out_proj_weight.to(out.dtype), bias)


class MambaInnerFn:
    """The original's autograd function, of which programs call ``apply``."""

    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> Any:
        """``mamba_inner_fn`` of the same arguments."""
        return mamba_inner_fn(*args, **kwargs)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-6,
    is_rms_norm: bool = True,
) -> Tensor:
    """RMS norm, or layer norm, of the last axis in float32; returns x's dtype."""
    return normalise(x, weight, bias, eps, is_rms_norm).to(x.dtype)


def _projected(split: list[Tensor], bias: Tensor | None) -> Tensor:
    part = split.pop(0)
    part = part if bias is None else part + bias.to(part.dtype)
    return part.transpose(1, 2)


def _taps(conv1d_weight: Tensor) -> Tensor:
    return conv1d_weight.squeeze(1) if conv1d_weight.dim() == 3 else conv1d_weight


def _autocast(xz: Tensor) -> Tensor:
    """xz as the projection before it would have made it inside an autocast region."""
    kind = xz.device.type
    if xz.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return xz.to(torch.get_autocast_dtype(kind))
    return xz


def _check_level(name: str, checkpoint_lvl: int) -> None:
    if checkpoint_lvl not in (0, 1):
        raise ArgumentError(
            f"{name}: got checkpoint_lvl={checkpoint_lvl!r}.\n"
            "It must be 0 or 1, which give the same numbers here.\n"
            "Leave it out."
        )
