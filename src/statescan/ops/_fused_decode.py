# SPDX-License-Identifier: Apache-2.0
"""Parts of a decode step that a backend may run at once: a mixer, all layers, a linear layer.

They are shortcuts without a meaning of their own: what they compute is what their callers in ``nn``
and ``models`` compute from ops and torch where no backend offers them, or where torch
watches (``_plans.py``). A backend offers no plan for shapes that do not fit together, so that these
reach the checks of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from statescan.backends.base import OpRequest
from statescan.dispatch.select import choose
from statescan.ops._library import dtype_name
from statescan.ops._plans import Plan, find_plan, keep_plan, run_plan


def fused_mamba_step(
    hidden: Tensor, conv_state: Tensor, ssm_state: Tensor, weights: Sequence[Tensor | None]
) -> Tensor | None:
    """One step of a mixer on hidden (batch, d_model), states in place; None where not offered.

    Args:
        hidden: The mixer's input.
        conv_state: (batch, dim, state_len).
        ssm_state: (batch, dim, dstate).
        weights: in_proj's weight and bias, the convolution's (dim, width) and bias, x_proj's
            weight, dt_proj's weight and bias, A_log, D, out_proj's weight and bias.
    """
    return _run(
        "mamba_step",
        (hidden, conv_state, ssm_state, *weights),
        hidden.shape[1],
        (conv_state, ssm_state),
    )


def fused_mamba_stack(
    hidden: Tensor, final_norm: Tensor, layers: Sequence[Sequence[Tensor | None]], eps: float
) -> Tensor | None:
    """One step of a stack of layers on hidden (batch, d_model), with RMS norms; None: not offered.

    Args:
        hidden: The embeddings of one token a row.
        final_norm: Weight of the norm after the last layer.
        layers: Of each layer its norm's weight, conv_state and ssm_state, which are updated in
            place, and the weights of ``fused_mamba_step``.
        eps: Of all norms.
    """
    flat = tuple(tensor for layer in layers for tensor in layer)
    states = [tensor for layer in layers for tensor in layer[1:3] if tensor is not None]
    return _run("mamba_stack", (hidden, final_norm, *flat), hidden.shape[1], states, (eps,))


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x W^T + bias for x (batch, columns), few rows; None where no backend offers it."""
    return _run("vector_linear", (x, weight, bias), weight.shape[0], ())


def _run(
    op: str,
    tensors: tuple[Tensor | None, ...],
    width: int,
    states: Sequence[Tensor],
    options: tuple[float, ...] = (),
) -> Tensor | None:
    """Run the plan of a call, made on its first occurrence; the result has ``width`` columns."""
    first = tensors[0]
    if first is None or first.device.type not in ("cpu", "cuda"):
        return None
    if torch.is_autocast_enabled(first.device.type):
        return None
    given = [tensor for tensor in tensors if tensor is not None]
    absent = tuple([tensor is None for tensor in tensors])
    key, plan = find_plan(op, given, (*options, *absent))
    if key is None:
        return None
    out = first.new_empty((first.shape[0], width))
    if plan is None:
        plan = keep_plan(key, partial(_make_plan, op, options, (*tensors, out)))
    if plan is None:
        return None
    return out if run_plan(plan, (*given, out), states) else None


def _make_plan(
    op: str, options: tuple[float, ...], tensors: tuple[Tensor | None, ...]
) -> Plan | None:
    """The plan of the backend that would run such a call, if it has one."""
    dtypes = {str(i): dtype_name(t.dtype) for i, t in enumerate(tensors) if t is not None}
    # Not an op that can be asked for: the backend is the one that would run the state's step.
    device = next(t.device.type for t in tensors if t is not None)
    backend, _ = choose("auto", OpRequest("selective_state_update", device, dtypes))
    make = backend.plan(op)
    plan: Plan | None = None if make is None else make(*options, *tensors)
    return plan
