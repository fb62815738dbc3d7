# SPDX-License-Identifier: Apache-2.0
"""Pointwise functions whose bits do not depend on how many threads share the work.

torch splits large tensors between threads wherever the count falls, and runs the ends of each
part with scalar code; for ``silu``, ``sigmoid`` and ``softplus`` that code rounds differently from
the vector code (torch 2.13, x86). ``exp`` and ``log1p`` have one code for both, and the operations
of IEEE arithmetic are exact, so large tensors get functions built from those. No packing here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from statescan.backends.torch import _step_size

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
# torch gives up to 32768 elements to one thread: no cut, so its own functions are safe there.
_ONE_THREAD = 1 << 14


def upcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the dtype of the arithmetic; complex stays complex."""
    if tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def silu_(values: Tensor) -> Tensor:
    """values / (1 + exp(-values)), in place."""
    if _is_safe(values):
        return F.silu(values, inplace=True)
    return values.div_(torch.neg(values).exp_().add_(1.0))


def silu(values: Tensor) -> Tensor:
    """values / (1 + exp(-values)), in new memory."""
    return F.silu(values) if _is_safe(values) else silu_(values.clone())


def softplus(values: Tensor) -> Tensor:
    """log(1 + exp(values)), exact in both tails, in new memory."""
    return F.softplus(values) if _is_safe(values) else _step_size.softplus(values)


def silu_gradient_(values: Tensor, dout: Tensor) -> Tensor:
    """Gradient of silu at ``values`` times ``dout``; overwrites ``values`` and returns it."""
    gate = torch.neg(values).exp_().add_(1.0).reciprocal_()
    return values.mul_(1.0 - gate).add_(1.0).mul_(gate).mul_(dout)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """left * right; two complex factors by real products, whose rounding is the same everywhere."""
    if not (left.is_complex() and right.is_complex()):
        return left * right
    real = left.real * right.real - left.imag * right.imag
    return torch.complex(real, left.real * right.imag + left.imag * right.real)


def keep_mask(condition: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask for ``select``: all bits set where ``condition`` holds, none elsewhere."""
    return condition.to(_BITS[dtype]).neg_()


def select(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where the mask is set, +0 elsewhere, whatever stood there (NaN too).

    A bitwise "and" is a selection that torch vectorises: 4e9 elements a second on one core where
    ``torch.where`` and ``masked_fill`` reach 0.8e9.
    """
    bits = _BITS[values.dtype]
    return torch.bitwise_and(values.view(bits), mask).view(values.dtype)


def _is_safe(values: Tensor) -> bool:
    return values.device.type != "cpu" or values.numel() <= _ONE_THREAD
