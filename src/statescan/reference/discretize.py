# SPDX-License-Identifier: Apache-2.0
"""Maths that the references share: working dtype, step size, one step of the state, its readout.

Loops over tokens and everything about packing, slots or layouts belong in the op files.
"""

from typing import overload

import torch
import torch.nn.functional as F


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The real dtype of all arithmetic: float64 if any tensor is float64 or complex128."""
    wide = (torch.float64, torch.complex128)
    if any(tensor is not None and tensor.dtype in wide for tensor in tensors):
        return torch.float64
    return torch.float32


def state_dtype(A: torch.Tensor, compute: torch.dtype) -> torch.dtype:
    """The dtype of SSM states: complex exactly if A is."""
    return compute.to_complex() if A.is_complex() else compute


@overload
def upcast(tensor: torch.Tensor, compute: torch.dtype) -> torch.Tensor: ...
@overload
def upcast(tensor: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor | None: ...
def upcast(tensor: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor | None:
    """The tensor in the working precision; complex stays complex, None stays None.

    Done once for each argument, so that autograd adds up its gradient in that precision too.
    """
    if tensor is None:
        return None
    return tensor.to(compute.to_complex() if tensor.is_complex() else compute)


def step_size(dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool) -> torch.Tensor:
    """dt + dt_bias, through softplus if asked; dt_bias must broadcast against dt.

    Softplus is log1p(exp(dt)), which keeps its relative accuracy for very negative dt where
    log(1 + exp(dt)) is 0, and the identity above 20, where exp would sooner or later overflow.
    """
    if dt_bias is not None:
        dt = dt + dt_bias
    return F.softplus(dt, beta=1.0, threshold=20.0) if dt_softplus else dt


def advance_state(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor
) -> torch.Tensor:
    """One token: state <- exp(dt A) state + dt B x.

    The decay is the zero-order hold and the input term the Euler step of the continuous system
    (Gu and Dao 2023, Mamba, section 2 and algorithm 2). x and dt are (..., dim), the others
    broadcast to (..., dim, dstate).
    """
    return torch.exp(dt[..., None] * A) * state + (dt * x)[..., None] * B


def read_state(state: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """The sum over dstate of C state; for complex states twice its real part.

    A complex state stands for itself and its conjugate twin, whose imaginary parts cancel.
    """
    total = (C * state).sum(dim=-1)
    return 2 * total.real if total.is_complex() else total
