# SPDX-License-Identifier: Apache-2.0
"""The selective scan of one or a few new tokens a row, with its states in a pool of slots.

Both forms of the state (dim, or heads times headdim) are walked by one loop; slots and rollback
are those of `statescan.reference.slots`.
"""

import torch
import torch.nn.functional as F

from statescan.reference.discretize import (
    advance_state,
    compute_dtype,
    read_state,
    step_size,
    upcast,
)
from statescan.reference.slots import find_slots


def selective_state_update_ref(
    ssm_state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    dst_state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    intermediate_states: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance states by new tokens; ssm_state, intermediate_states and out are written in place.

    The recurrence is the one of `selective_scan_ref`.

    Args:
        ssm_state: (slots, dim, dstate), or (slots, nheads, headdim, dstate) in the headed form.
        x, dt, z: (batch, dim[, ntokens]); headed (batch[, ntokens], nheads, headdim).
        A: (dim, dstate); headed (nheads, headdim, dstate). Real or complex, as ssm_state, B, C.
        B, C: (batch, dstate[, ntokens]) or (batch, ngroups, dstate[, ntokens]);
            headed (batch[, ntokens], dstate) or (batch[, ntokens], ngroups, dstate).
        D, dt_bias: (dim,); headed (nheads, headdim).
        state_batch_indices, dst_state_batch_indices: (batch,), the slot that a row reads and the
            one that it writes; the row's number and the slot read when not given. With a negative
            one or pad_slot_id the row is padding: output 0, nothing read or written.
        intermediate_states: (batch, ntokens, *one slot) receives the state after each token.
        num_accepted_tokens: (batch,), see `statescan.reference.slots`.
        out: like x.

    Returns:
        out, or a new tensor like x.
    """
    headed = ssm_state.dim() == 4
    compute = compute_dtype(ssm_state, x, dt, A, B, C, D, z, dt_bias, intermediate_states)
    several = x.dim() == (4 if headed else 3)
    x_tokens, dt_tokens = (_channels(tensor, headed, several) for tensor in (x, dt))
    z_tokens = None if z is None else _channels(z, headed, several)
    B_tokens, C_tokens = (_groups(tensor, headed, several) for tensor in (B, C))
    A, D, dt_bias = upcast(A, compute), upcast(D, compute), upcast(dt_bias, compute)
    result = torch.zeros_like(x)
    result_tokens = _channels(result, headed, several)
    rows = find_slots(
        ssm_state,
        x.shape[0],
        state_batch_indices,
        dst_state_batch_indices,
        pad_slot_id,
        intermediate_states,
        num_accepted_tokens,
    )
    for row in rows:
        b = row.batch_index
        state = upcast(row.start, compute)
        for t in range(x_tokens.shape[1]):
            x_t = upcast(x_tokens[b, t], compute)
            dt_t = step_size(upcast(dt_tokens[b, t], compute), dt_bias, dt_softplus)
            B_t, C_t = (
                _per_channel(upcast(tensor[b, t], compute), state)
                for tensor in (B_tokens, C_tokens)
            )
            state = advance_state(state, x_t, dt_t, A, B_t)
            y = read_state(state, C_t)
            if D is not None:
                y = y + D * x_t
            if z_tokens is not None:
                y = y * F.silu(upcast(z_tokens[b, t], compute))
            result_tokens[b, t] = y.to(x.dtype)
            row.record(t, state)
        row.store(state)
    return result if out is None else out.copy_(result)


def _channels(tensor: torch.Tensor, headed: bool, several: bool) -> torch.Tensor:
    """x, dt, z or the result seen as (batch, ntokens, *channels)."""
    if not several:
        return tensor[:, None]
    return tensor if headed else tensor.movedim(-1, 1)


def _groups(tensor: torch.Tensor, headed: bool, several: bool) -> torch.Tensor:
    """B or C seen as (batch, ntokens, ngroups, dstate)."""
    if not several:
        tensor = tensor[:, None]
    elif not headed:
        tensor = tensor.movedim(-1, 1)
    return tensor if tensor.dim() == 4 else tensor[:, :, None]


def _per_channel(weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Repeat (ngroups, dstate) over the channels, or heads, that share a group."""
    repeated = weight.repeat_interleave(state.shape[0] // weight.shape[0], dim=0)
    return repeated if state.dim() == 2 else repeated[:, None, :]
