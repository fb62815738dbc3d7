# SPDX-License-Identifier: Apache-2.0
"""The step size of a state space model: dt + bias through softplus, its slope, and the gate.

Pointwise functions of activations only. They are built from operations whose bits do not depend
on where torch cuts a tensor between its threads (``exp`` and ``log1p`` have one code for the ends
of a part and its middle; ``softplus``, ``sigmoid``, ``silu`` and ``exp2`` have two).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Above this softplus is the identity; in float32 rounding makes it so.
_IDENTITY = 20.0


def softplus(values: Tensor) -> Tensor:
    """log(1 + exp(values)), exact in both tails, as a new tensor.

    The logarithm is never below its argument but by rounding, so the larger of both is the one
    up to 20 and the other above.
    """
    return values.clamp(max=_IDENTITY).exp_().log1p_().maximum(values)


def softplus_slope(values: Tensor) -> Tensor:
    """Derivative of ``softplus``: the logistic function, 1 where softplus is the identity."""
    slope = logistic(values)
    if slope.dtype == torch.float64:
        slope.masked_fill_(values > _IDENTITY, 1)
    return slope


def logistic(values: Tensor) -> Tensor:
    """1 / (1 + exp(-values)), as a new tensor."""
    return torch.neg(values).exp_().add_(1).reciprocal_()
