# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm with residual, dropout and a parallel branch, under mamba_ssm's names.

Plain torch in float32; the gated norms of Mamba-2 are not here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan.errors import ArgumentError


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """Norm of the last axis of ``dropout(x * rowscale) + dropout(x1) + residual``.

    Args:
        x: (..., d).
        weight, bias: (d,).
        residual: Like x, any floating dtype, which the sum then has.
        x1: A parallel branch, added to x; excludes rowscale.
        weight1, bias1: (d,), a second norm of the same sum.
        eps: Added to the variance, or mean square.
        dropout_p: Probability of dropping a value of x, and of x1.
        rowscale: Leading axes of x, multiplies it.
        prenorm: Return the sum too.
        residual_in_fp32: Without a residual, keep the sum in float32.
        is_rms_norm: RMS norm instead of layer norm.
        return_dropout_mask: Return what was kept of x and of x1 (None without x1) too.

    Returns:
        out in x's dtype; then, where asked for, the second norm, the sum and the masks.
    """
    if x1 is not None and rowscale is not None:
        raise ArgumentError(
            "layer_norm_fn: arguments 'x1' and 'rowscale' are both given.\n"
            "A parallel branch has no scale of rows.\nLeave one of them out."
        )
    scaled = x if rowscale is None else x * rowscale.unsqueeze(-1)
    total, mask = _dropout(scaled, dropout_p)
    mask1 = None
    if x1 is not None:
        kept1, mask1 = _dropout(x1, dropout_p)
        total = _wide(total) + _wide(kept1)
    if residual is not None:
        total = (_wide(total) + _wide(residual)).to(residual.dtype)
    else:
        total = total.float() if residual_in_fp32 and total.dtype.itemsize < 4 else total
        total = total if residual_in_fp32 else total.to(x.dtype)
    outputs: list[Tensor | None] = [normalise(total, weight, bias, eps, is_rms_norm).to(x.dtype)]
    if weight1 is not None:
        outputs.append(normalise(total, weight1, bias1, eps, is_rms_norm).to(x.dtype))
    if prenorm:
        outputs.append(total)
    if return_dropout_mask:
        outputs += [mask, mask1]
    first = outputs[0]
    assert first is not None
    return first if len(outputs) == 1 else tuple(outputs)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """``layer_norm_fn`` with ``is_rms_norm=True``."""
    return layer_norm_fn(
        *(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm),
        *(residual_in_fp32, True, return_dropout_mask),
    )


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """``layer_norm_fn`` where given masks say what dropout keeps; ``upcast`` widens the sum."""
    return _with_masks(
        *(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm),
        *(dropout_mask, dropout_mask1, upcast, False),
    )


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """``layer_norm_ref`` with RMS norm."""
    return _with_masks(
        *(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm),
        *(dropout_mask, dropout_mask1, upcast, True),
    )


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """The norm, then a linear map; with ``prenorm`` also the sum that was normalised."""
    normed, total = layer_norm_fn(
        *(x, norm_weight, norm_bias, residual),
        eps=eps,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )
    assert normed is not None
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else normed.dtype
    bias = None if linear_bias is None else linear_bias.to(dtype)
    out = F.linear(normed.to(dtype), linear_weight.to(dtype), bias)
    return (out, total) if prenorm else out


class RMSNorm(nn.Module):
    """RMS norm with optional dropout and residual; ``weight`` (hidden_size,), no bias.

    Args:
        hidden_size: Length of the last axis.
        eps: Added to the mean square.
        dropout_p: Dropped share of the input while training.
        device, dtype: Of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """``rms_norm_fn`` with this weight; with ``prenorm`` (out, sum)."""
        dropped = self.drop.p if self.drop is not None and self.training else 0.0
        return rms_norm_fn(
            *(x, self.weight, None),
            residual=residual,
            eps=self.eps,
            dropout_p=dropped,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )


class LayerNormFn:
    """The original's autograd function, of which programs call ``apply``."""

    apply = staticmethod(layer_norm_fn)


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms_norm: bool
) -> Tensor:
    """Norm of the last axis in float32, or float64 if x has it."""
    wide = _wide(x)
    weight = weight.to(wide.dtype)
    bias = None if bias is None else bias.to(wide.dtype)
    if not is_rms_norm:
        return F.layer_norm(wide, wide.shape[-1:], weight, bias, eps)
    normed = F.rms_norm(wide, wide.shape[-1:], weight, eps)
    return normed if bias is None else normed + bias


def _with_masks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    eps: float,
    dropout_p: float,
    rowscale: Tensor | None,
    prenorm: bool,
    mask: Tensor | None,
    mask1: Tensor | None,
    upcast: bool,
    is_rms_norm: bool,
) -> Tensor | tuple[Tensor | None, ...]:
    """The reference: masks are applied here, and dropout left to ``layer_norm_fn`` without."""
    if mask is not None and dropout_p > 0.0:
        x = x.masked_fill(~mask, 0.0) / (1.0 - dropout_p)
        x1 = x1 if x1 is None or mask1 is None else x1.masked_fill(~mask1, 0.0) / (1.0 - dropout_p)
        dropout_p = 0.0
    dtype = x.dtype
    if upcast:
        x = _wide(x)
        x1, residual = (None if t is None else _wide(t) for t in (x1, residual))
    elif residual is not None:
        residual = residual.to(x.dtype)
    results = layer_norm_fn(
        *(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm),
        is_rms_norm=is_rms_norm,
    )
    norms = 1 if weight1 is None else 2
    if isinstance(results, Tensor):
        return results.to(dtype)
    return tuple(
        result.to(dtype) if place < norms and result is not None else result
        for place, result in enumerate(results)
    )


def _dropout(x: Tensor, probability: float) -> tuple[Tensor, Tensor | None]:
    """x with some values dropped and the rest scaled up, and which were kept."""
    if probability <= 0.0:
        return x, None
    kept = torch.rand(x.shape, device=x.device) >= probability
    return x.masked_fill(~kept, 0.0) / (1.0 - probability), kept


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
