# SPDX-License-Identifier: Apache-2.0
"""Adapts ``causal_conv1d_ref`` to the signature of backends.

The convolution itself is in ``statescan.reference.causal_conv1d``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan.backends.outputs import causal_conv1d_fwd_outputs
from statescan.backends.reference._gradients import gradients
from statescan.reference.causal_conv1d import causal_conv1d_ref


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """out and final_states of ``statescan.causal_conv1d``."""
    out, final_states = causal_conv1d_fwd_outputs(x, weight, cu_seqlens)
    with torch.no_grad():
        inputs = (x, weight, bias, initial_states)
        results = _convolve(*inputs, seq_idx, cu_seqlens, silu, reverse)
    return out.copy_(results[0]), final_states.copy_(results[1])


def causal_conv1d_bwd(
    dout: Tensor,
    dfinal_states: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Gradients of x, weight, bias and initial_states."""

    def forward(*leaves: Any) -> tuple[Tensor, Tensor]:
        return _convolve(*leaves, seq_idx, cu_seqlens, silu, reverse)

    return gradients(forward, (x, weight, bias, initial_states), (dout, dfinal_states))


def _convolve(*args: Any) -> tuple[Tensor, Tensor]:
    x, weight, bias, initial_states, seq_idx, cu_seqlens, silu, reverse = args
    out, final_states = causal_conv1d_ref(
        *(x, weight, bias),
        activation="silu" if silu else None,
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        return_final_states=True,
    )
    return out, final_states
