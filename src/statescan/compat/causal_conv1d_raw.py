# SPDX-License-Identifier: Apache-2.0
"""``causal_conv1d_cuda`` in all its generations, and ``causal_conv1d.cpp_functions``.

The raw functions grew over the releases; the number of arguments tells which one a caller was
written for. Everything runs through the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan.compat.causal_conv1d import causal_conv1d_fn
from statescan.compat.causal_conv1d import causal_conv1d_update as _update
from statescan.errors import ArgumentError


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """The convolution without a graph; writes ``final_states_out`` in place if given."""
    with torch.no_grad():
        result = causal_conv1d_fn(
            *(x, weight, bias, seq_idx, initial_states, final_states_out is not None),
            *(final_states_out, _activation(silu_activation)),
        )
    return result[0] if isinstance(result, tuple) else result


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias, dinitial_states); writes ``dx`` in place if given."""
    inputs = (x, weight, bias, initial_states if return_dinitial_states else None)
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        before = leaves[3] if return_dinitial_states else initial_states
        result = causal_conv1d_fn(
            *(leaves[0], leaves[1], leaves[2], seq_idx, before),  # type: ignore[arg-type]
            *(dfinal_states is not None, None, _activation(silu_activation)),
        )
        outputs = result if isinstance(result, tuple) else (result,)
        received = (dout,) if dfinal_states is None else (dout, dfinal_states)
        given = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(outputs, given, received, allow_unused=True))
    grads = [None if leaf is None else next(found) for leaf in leaves]
    new_dx, dweight, dbias, dinitial_states = grads
    assert new_dx is not None
    assert dweight is not None
    return new_dx if dx is None else dx.copy_(new_dx), dweight, dbias, dinitial_states


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """The decode step; writes ``conv_state`` in place."""
    with torch.no_grad():
        return _update(
            *(x, conv_state, weight, bias, _activation(silu_activation)),
            *(cache_seqlens, conv_state_indices),
        )


def causal_conv1d_fwd(*args: Any) -> Tensor | None:
    """``causal_conv1d_cuda.causal_conv1d_fwd`` of any release, told apart by its arguments.

    4: (x, weight, bias, silu). 5: seq_idx after bias. 7: (x, weight, bias, seq_idx,
    initial_states, final_states_out, silu). These return out. 8: out before final_states_out,
    written in place; returns None.
    """
    if len(args) == 4:
        return causal_conv1d_fwd_function(*args[:3], None, None, None, args[3])
    if len(args) == 5:
        return causal_conv1d_fwd_function(*args[:4], None, None, args[4])
    if len(args) == 7:
        return causal_conv1d_fwd_function(*args)
    if len(args) == 8:
        args[5].copy_(causal_conv1d_fwd_function(*args[:5], *args[6:]))
        return None
    raise _unknown("causal_conv1d_fwd", args, "4, 5, 7 or 8")


def causal_conv1d_bwd(*args: Any) -> list[Tensor | None] | None:
    """``causal_conv1d_cuda.causal_conv1d_bwd`` of any release.

    6: (x, weight, bias, dout, dx, silu). 7: seq_idx after dout. 10: (x, weight, bias, dout,
    seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu). These return the
    gradients as a list. 12: dx, dweight, dbias and dinitial_states are given instead and written
    in place; returns None.
    """
    if len(args) == 6:
        found = causal_conv1d_bwd_function(*args[:4], None, None, None, args[4], False, args[5])
        return list(found)[:3]
    if len(args) == 7:
        found = causal_conv1d_bwd_function(*(*args[:5], None, None, args[5], False, args[6]))
        return list(found)[:3]
    if len(args) == 10:
        return list(causal_conv1d_bwd_function(*args))
    if len(args) == 12:
        dx, dweight, dbias, dinitial_states = args[7:11]
        wanted = dinitial_states is not None
        found = causal_conv1d_bwd_function(*(*args[:7], dx, wanted, args[11]))
        for target, grad in zip((dweight, dbias, dinitial_states), found[1:]):
            if target is not None and grad is not None:
                target.copy_(grad)
        return None
    raise _unknown("causal_conv1d_bwd", args, "6, 7, 10 or 12")


def causal_conv1d_update(*args: Any) -> Tensor | None:
    """``causal_conv1d_cuda.causal_conv1d_update`` of any release.

    5: (x, conv_state, weight, bias, silu). 6: cache_seqlens after it. 7: conv_state_indices after
    that. These return out. 8: out before silu, written in place; returns None.
    """
    if 5 <= len(args) <= 7:
        return causal_conv1d_update_function(*args, *(None,) * (7 - len(args)))
    if len(args) == 8:
        args[4].copy_(causal_conv1d_update_function(*args[:4], *args[5:]))
        return None
    raise _unknown("causal_conv1d_update", args, "5, 6, 7 or 8")


def _activation(silu: bool) -> str | None:
    return "silu" if silu else None


def _unknown(name: str, args: tuple[Any, ...], known: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: got {len(args)} positional arguments.\n"
        f"The releases of causal_conv1d_cuda take {known}.\n"
        "Call causal_conv1d.causal_conv1d_fn, whose arguments have names."
    )
