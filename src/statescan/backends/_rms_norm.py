# SPDX-License-Identifier: Apache-2.0
"""RMS norm of activations over one axis, and its gradients, in the dtype of its input.

Only what mamba_inner needs of a norm: no gate, no residual, no groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens in one sum: short ones are never shared between threads, whose number would order them.
_TOKENS = 2048


def rms_norm(values: Tensor, weight: Tensor, eps: float, axis: int) -> Tensor:
    """values / sqrt(mean of their squares + eps) * weight.

    Args:
        values: (batch, seqlen, features) or (batch, features, seqlen), in the dtype of the
            arithmetic.
        weight: (features,).
        eps: Added to the mean square.
        axis: The axis of the features, -1 or -2.
    """
    weight = _along(weight.to(values.dtype), axis)
    out = torch.empty_like(values)
    # A row at a time, so that the squares take the memory of one row only.
    for row, result in zip(values.unbind(0), out.unbind(0)):
        torch.mul(row, _scale(row, eps, axis), out=result).mul_(weight)
    return out


def rms_norm_gradient(
    dout: Tensor, values: Tensor, weight: Tensor, eps: float, axis: int
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm``: dvalues, and dweight in the dtype of the arithmetic.

    With s = 1 / sqrt(mean(v^2) + eps) and g = dout weight: dv = s (g - v s^2 mean(g v)), and
    dweight is the sum of dout v s over everything but ``axis``.
    """
    weight = _along(weight.to(values.dtype), axis)
    dvalues = torch.empty_like(values)
    dweight = torch.zeros(values.shape[axis], dtype=values.dtype, device=values.device)
    for drow, row, result in zip(dout.unbind(0), values.unbind(0), dvalues.unbind(0)):
        scale = _scale(row, eps, axis)
        gain = drow.to(row.dtype) * row * scale
        for part in gain.split(_TOKENS, -3 - axis):
            dweight += part.sum(-3 - axis)
        share = gain.mul_(weight).mean(axis, keepdim=True).mul_(scale)
        torch.mul(drow, weight, out=result).sub_(row * share).mul_(scale)
    return dvalues, dweight


def _along(weight: Tensor, axis: int) -> Tensor:
    """The weight such that it broadcasts along ``axis`` of one row."""
    return weight if axis == -1 else weight.unsqueeze(-1)


def _scale(row: Tensor, eps: float, axis: int) -> Tensor:
    """1 / sqrt(mean square + eps) of one row."""
    return row.square().mean(axis, keepdim=True).add_(eps).rsqrt_()
