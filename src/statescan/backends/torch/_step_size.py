# SPDX-License-Identifier: Apache-2.0
"""The step size of a state space model: softplus for tensors that torch shares between threads.

Pointwise functions of activations only. ``F.softplus`` rounds differently at the ends of a
thread's part and in its middle (scalar and vector code, torch 2.13 on x86); ``exp`` and ``log1p``
do not.
"""

from __future__ import annotations

from torch import Tensor

# Above this softplus is the identity.
_IDENTITY = 20.0


def softplus(values: Tensor) -> Tensor:
    """log(1 + exp(values)), exact in both tails, as a new tensor.

    The logarithm is never below its argument but by rounding, so the larger of both is the one
    up to 20 and the other above.
    """
    return values.clamp(max=_IDENTITY).exp_().log1p_().maximum(values)
