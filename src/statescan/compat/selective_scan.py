# SPDX-License-Identifier: Apache-2.0
"""``selective_scan_fn`` and its kin under mamba_ssm's names and argument order.

Only renaming, and the conversion of the original's complex layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan import ops
from statescan.compat._callers import context_of_caller
from statescan.reference.selective_scan import selective_scan_ref as _reference


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-1's scan as mamba_ssm calls it; ``statescan.selective_scan`` with other names.

    Unlike the original it takes any strides, lengths and mix of dtypes, passes the gradient of
    last_state on, and includes B in last_state when B is constant.

    Args:
        u: (batch, dim, seqlen).
        delta: (batch, dim, seqlen), the step size.
        A: (dim, dstate), float32 or complex64.
        B, C: (dim, dstate), (batch, dstate, seqlen) or (batch, ngroups, dstate, seqlen). With
            complex A the last axis is 2 * seqlen, real and imaginary parts in turn.
        D, delta_bias: (dim,).
        z: (batch, dim, seqlen), the gate.
        delta_softplus: Pass delta + delta_bias through softplus.
        return_last_state: Return the state after the last token too.
        initial_states, seq_idx, cu_seqlens, reverse, backend: As ``statescan.selective_scan``
            takes them; the original has none of them.

    Returns:
        out (batch, dim, seqlen) in u's dtype, or (out, last_state (batch, dim, dstate)).
    """
    if A.is_complex():
        B, C = _complex(B, A), _complex(C, A)
    if initial_states is seq_idx is cu_seqlens is None:
        batch, dim, seqlen = u.shape
        known = context_of_caller(batch, dim, seqlen, A.shape[1])
        initial_states, seq_idx, cu_seqlens = known
    return ops.selective_scan(
        *(u, delta, A, B, C),
        D=D,
        z=z,
        dt_bias=delta_bias,
        # The originals look at the truth of a flag, and programs pass None for False.
        dt_softplus=bool(delta_softplus),
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        return_final_states=bool(return_last_state),
        backend=backend,
    )


def selective_scan_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain torch, token by token: the truth to compare with, and slow."""
    if A.is_complex():
        B, C = _complex(B, A), _complex(C, A)
    return _reference(
        *(u, delta, A, B, C),
        D=D,
        z=z,
        dt_bias=delta_bias,
        dt_softplus=bool(delta_softplus),
        return_final_states=bool(return_last_state),
    )


class SelectiveScanFn:
    """The original's autograd function, of which programs call ``apply``."""

    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> Any:
        """``selective_scan_fn`` of the same arguments."""
        return selective_scan_fn(*args, **kwargs)


def _complex(projection: Tensor, A: Tensor) -> Tensor:
    """B or C as complex numbers: pairs of a real tensor's last axis, as the original lays them."""
    if projection.is_complex():
        return projection
    wide = projection.to(A.real.dtype)
    return torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
