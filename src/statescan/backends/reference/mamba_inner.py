# SPDX-License-Identifier: Apache-2.0
"""Adapts ``mamba_inner_ref`` to the signature of backends.

The formula itself is in ``statescan.reference.mamba_inner``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan.backends.outputs import compute_dtype, mamba_inner_fwd_outputs
from statescan.backends.reference._gradients import gradients
from statescan.backends.torch import mamba_inner as torch_inner
from statescan.reference.mamba_inner import mamba_inner_ref

_TENSORS = (
    *("xz", "conv_weight", "conv_bias", "x_proj_weight", "dt_proj_weight", "A", "B", "C", "D"),
    *("dt_bias", "b_proj_bias", "c_proj_bias", "out_proj_weight", "out_proj_bias"),
    *("b_norm_weight", "c_norm_weight", "dt_norm_weight", "conv_initial_states"),
    *("initial_states", "seq_idx", "cu_seqlens"),
)
_NUM_GRADIENTS = len(_TENSORS) - 2


def mamba_inner_fwd(*args: Any) -> tuple[Tensor, ...]:
    """out, conv_final_states, final_states, x_dbl, chunk_states and gated.

    Args:
        args: The 21 tensors in the order of the op's schema, dt_softplus, silu, norm_eps,
            reverse, save_states.
    """
    tensors, (*options, save_states) = args[: len(_TENSORS)], args[len(_TENSORS) :]
    named = dict(zip(_TENSORS, tensors, strict=True))
    outputs = mamba_inner_fwd_outputs(
        *(named["xz"], named["conv_weight"], named["x_proj_weight"], named["A"]),
        *(named["out_proj_weight"], named["cu_seqlens"], save_states),
        compute_dtype(*tensors[:_NUM_GRADIENTS]),
    )
    with torch.no_grad():
        results = _run(tensors, options)
    for output, result in zip(outputs[:3], results, strict=True):
        output.copy_(result)
    if save_states:
        # A traced graph may run its backward on another backend, which reads them.
        made = torch_inner.mamba_inner_fwd(*args)[3:]
        for saved, value in zip(outputs[3:], made, strict=True):
            saved.copy_(value)
    return outputs


def mamba_inner_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of the 19 tensors from xz to initial_states.

    Args:
        args: Gradients of the 3 results, the 21 tensors, x_dbl, chunk_states and gated (not
            needed here), dt_softplus, silu, norm_eps, reverse.
    """
    douts, tensors = args[:3], args[3 : 3 + len(_TENSORS)]
    options, packing = args[-4:], tensors[_NUM_GRADIENTS:]
    return gradients(
        lambda *inputs: _run((*inputs, *packing), options), tensors[:_NUM_GRADIENTS], douts
    )


def _run(tensors: tuple[Any, ...], options: Any) -> tuple[Tensor, ...]:
    dt_softplus, silu, norm_eps, reverse = options
    named = dict(zip(_TENSORS, tensors, strict=True))
    results = mamba_inner_ref(
        **named,
        dt_softplus=dt_softplus,
        activation="silu" if silu else None,
        norm_eps=norm_eps,
        reverse=reverse,
        return_final_states=True,
    )
    return tuple(results)
