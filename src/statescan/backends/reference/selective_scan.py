# SPDX-License-Identifier: Apache-2.0
"""Adapts ``selective_scan_ref`` to the signature of backends.

The scan itself is in ``statescan.reference.selective_scan``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan.backends.outputs import compute_dtype, selective_scan_fwd_outputs
from statescan.backends.reference._gradients import gradients
from statescan.backends.torch import selective_scan as torch_scan
from statescan.reference.selective_scan import selective_scan_ref


def selective_scan_fwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    reverse: bool,
    save_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, final_states and chunk_states of ``statescan.selective_scan``."""
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    compute = compute_dtype(*inputs)
    outputs = selective_scan_fwd_outputs(x, A, cu_seqlens, save_states, compute)
    out, final_states, chunk_states = outputs
    with torch.no_grad():
        results = _scan(*inputs, seq_idx, cu_seqlens, dt_softplus, reverse)
        out.copy_(results[0])
        final_states.copy_(results[1])
    if save_states:
        # A traced graph may run its backward on another backend, which reads them.
        chunk_states.copy_(
            torch_scan.selective_scan_fwd(
                *(*inputs, seq_idx, cu_seqlens, dt_softplus, reverse, save_states)
            )[2]
        )
    return outputs


def selective_scan_bwd(
    dout: Tensor,
    dfinal_states: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_states: Tensor,
    dt_softplus: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Gradients of x, dt, A, B, C, D, z, dt_bias and initial_states; chunk_states is not needed."""
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states)

    def forward(*leaves: Any) -> tuple[Tensor, Tensor]:
        return _scan(*leaves, seq_idx, cu_seqlens, dt_softplus, reverse)

    return gradients(forward, inputs, (dout, dfinal_states))


def _scan(*args: Any) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, reverse = args
    out, final_states = selective_scan_ref(
        *(x, dt, A, B, C),
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        return_final_states=True,
    )
    return out, final_states
