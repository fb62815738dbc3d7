# SPDX-License-Identifier: Apache-2.0
"""Adapts ``causal_conv1d_update_ref`` to the signature of backends.

The step itself is in ``statescan.reference.causal_conv1d_update``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.reference.causal_conv1d_update import causal_conv1d_update_ref


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    dst_conv_state_indices: Tensor | None,
    intermediate_states: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    silu: bool,
    pad_slot_id: int,
) -> None:
    """``statescan.causal_conv1d_update``; writes conv_state, intermediate_states and out."""
    causal_conv1d_update_ref(
        *(x, conv_state, weight, bias),
        activation="silu" if silu else None,
        cache_seqlens=cache_seqlens,
        conv_state_indices=conv_state_indices,
        dst_conv_state_indices=dst_conv_state_indices,
        pad_slot_id=pad_slot_id,
        intermediate_states=intermediate_states,
        num_accepted_tokens=num_accepted_tokens,
        out=out,
    )
