# SPDX-License-Identifier: Apache-2.0
"""Norms with a gate, in groups of channels, under the names of mamba_ssm's layernorm_gated.

Plain torch in float32, for any width; no norm with a residual here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan.compat.layer_norm import normalise
from statescan.errors import ArgumentError


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """``norm(x) * silu(z)``, or ``norm(x * silu(z))``, over groups of the last axis.

    Args:
        x: (..., d).
        weight, bias: (d,).
        z: Like x, the gate; None for none.
        eps: Added to the variance, or mean square, of each group.
        group_size: Channels of a group, all by default.
        norm_before_gate: Which of the two comes first.
        is_rms_norm: RMS norm instead of layer norm.

    Returns:
        Like x, in its dtype.
    """
    width = x.shape[-1]
    group_size = width if group_size is None else group_size
    if group_size < 1 or width % group_size:
        raise ArgumentError(
            f"layernorm_fn: got group_size={group_size} for {width} channels.\n"
            "It must divide the last axis of x.\nLeave it out for one group."
        )
    wide = x if x.dtype == torch.float64 else x.float()
    gate = None if z is None else F.silu(z.to(wide.dtype))
    if gate is not None and not norm_before_gate:
        wide = wide * gate
    grouped = wide.unflatten(-1, (-1, group_size))
    ones = wide.new_ones(group_size)
    normed = normalise(grouped, ones, None, eps, is_rms_norm).flatten(-2)
    normed = normed * weight.to(wide.dtype)
    normed = normed if bias is None else normed + bias.to(wide.dtype)
    if gate is not None and norm_before_gate:
        normed = normed * gate
    return normed.to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """``layernorm_fn`` with ``is_rms_norm=True``."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """The same function; it computes in float32 whatever ``upcast`` says."""
    return rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate)


class LayerNorm(nn.Module):
    """``layernorm_fn`` with a weight and a bias of its own."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise x (..., hidden_size), gated by z if given."""
        return layernorm_fn(
            *(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)
        )


class RMSNorm(nn.Module):
    """``rmsnorm_fn`` with a weight of its own and no bias."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise x (..., hidden_size), gated by z if given."""
        return rmsnorm_fn(
            *(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)
        )
