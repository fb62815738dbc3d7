# SPDX-License-Identifier: Apache-2.0
"""The decode step of the SSM state under mamba_ssm's name and argument order; only renaming."""

from __future__ import annotations

from torch import Tensor

from statescan import ops
from statescan.compat._gradients import without_graph
from statescan.reference.selective_state_update import selective_state_update_ref as _reference


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``statescan.selective_state_update`` in the original's order; writes ``state`` in place.

    D and dt_bias may really be left out, softplus is the scan's, and slots outside the pool are
    refused on a CPU. Like the original it carries no gradient; with grad mode on it says so once.

    Args:
        state: (batch or slots, dim, dstate), or (batch or slots, nheads, headdim, dstate).
        x, dt, z: (batch, dim), or (batch, nheads, headdim).
        A: (dim, dstate), or (nheads, headdim, dstate).
        B, C: (batch, dstate), or (batch, ngroups, dstate).
        D, dt_bias: (dim,), or (nheads, headdim).
        dt_softplus: Pass dt + dt_bias through softplus.
        state_batch_indices: (batch,) slot of each row; a negative one is padding.
        dst_state_batch_indices, pad_slot_id, out, backend: As
            ``statescan.selective_state_update`` takes them.

    Returns:
        out, like x.
    """
    state, x, dt, A, B, C, D, z, dt_bias = without_graph(  # type: ignore[assignment]
        "selective_state_update", state, x, dt, A, B, C, D, z, dt_bias
    )
    return ops.selective_state_update(
        *(state, x, dt, A, B, C),
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=bool(dt_softplus),
        state_batch_indices=state_batch_indices,
        dst_state_batch_indices=dst_state_batch_indices,
        pad_slot_id=pad_slot_id,
        out=out,
        backend=backend,
    )


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """The same in plain torch; writes ``state`` in place."""
    return _reference(*(state, x, dt, A, B, C), D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)
