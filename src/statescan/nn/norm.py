# SPDX-License-Identifier: Apache-2.0
"""Normalisation layers that compute in float32 and return their input's dtype.

No gated norm and no kernel choice here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., hidden_size)."""
        wide = _wide(x)
        weight = self.weight.to(wide.dtype)
        return F.rms_norm(wide, (weight.shape[0],), weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm in float32 for any dtype of input and weight."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name torch.nn.LayerNorm uses
        """Normalise the last axes of the input."""
        wide = _wide(input)
        weight = None if self.weight is None else self.weight.to(wide.dtype)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        return F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(input.dtype)
