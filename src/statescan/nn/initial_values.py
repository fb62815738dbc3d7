# SPDX-License-Identifier: Apache-2.0
"""Initial values of a mixer's own parameters, drawn as the originals draw them.

Rules for a whole language model are in ``models.initialise``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from statescan.errors import ArgumentError
from statescan.nn.precision import full_precision_dtype


@torch.no_grad()
def initialise_time_step(
    dt_proj: nn.Linear, dt_init: str, bound: float, dt_min: float, dt_max: float, floor: float
) -> None:
    """Draw ``dt_proj``'s weight and replace its bias, in place.

    After softplus the bias alone gives time steps that are log-uniform between dt_min and dt_max.
    """
    if dt_init not in ("random", "constant") or not 0 < dt_min <= dt_max:
        raise ArgumentError(
            f"Mamba: got dt_init={dt_init!r}, dt_min={dt_min}, dt_max={dt_max}.\n"
            "dt_init must be 'random' or 'constant', and 0 < dt_min <= dt_max.\n"
            "Leave them out for the values of the paper."
        )
    weight = dt_proj.weight
    if dt_init == "random":
        weight.uniform_(-bound, bound)
    else:
        weight.fill_(bound)
    wide = full_precision_dtype(weight.dtype)
    uniform = torch.rand(weight.shape[0], device=weight.device, dtype=wide)
    low, high = math.log(dt_min), math.log(dt_max)
    dt = torch.exp(uniform * (high - low) + low).clamp(min=floor)
    # The inverse of softplus, written so that small dt keep their digits.
    dt_proj.bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))


def initial_A_log(d_inner: int, d_state: int, like: Tensor) -> nn.Parameter:  # noqa: N802
    """A = -(1, 2, ..., d_state) in every channel, as its logarithm."""
    rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=like.device)
    A_log = torch.log(rates).to(full_precision_dtype(like.dtype))
    return nn.Parameter(A_log.repeat(d_inner, 1))


def initial_D(d_inner: int, like: Tensor) -> nn.Parameter:  # noqa: N802
    """The skip starts as the identity."""
    wide = full_precision_dtype(like.dtype)
    return nn.Parameter(torch.ones(d_inner, device=like.device, dtype=wide))
