# SPDX-License-Identifier: Apache-2.0
"""Adapts ``selective_state_update_ref`` to the signature of backends.

The step itself is in ``statescan.reference.selective_state_update``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.reference.selective_state_update import selective_state_update_ref


@torch.no_grad()
def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_batch_indices: Tensor | None,
    dst_state_batch_indices: Tensor | None,
    intermediate_states: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    dt_softplus: bool,
    pad_slot_id: int,
) -> None:
    """``statescan.selective_state_update``; writes ssm_state, intermediate_states and out."""
    selective_state_update_ref(
        *(ssm_state, x, dt, A, B, C),
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        state_batch_indices=state_batch_indices,
        dst_state_batch_indices=dst_state_batch_indices,
        pad_slot_id=pad_slot_id,
        intermediate_states=intermediate_states,
        num_accepted_tokens=num_accepted_tokens,
        out=out,
    )
