# SPDX-License-Identifier: Apache-2.0
"""The causal convolution of one or a few new tokens a row, with its states in a pool of slots.

Slots, rings and rollback live here; the taps themselves are those of causal_conv1d.
"""

import torch

from statescan.reference.causal_conv1d import convolve
from statescan.reference.discretize import compute_dtype, upcast
from statescan.reference.slots import find_slots


def causal_conv1d_update_ref(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    dst_conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    intermediate_states: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve new tokens; conv_state, intermediate_states and out are written in place.

    The state of a row holds its last state_len inputs. Without cache_seqlens the newest is the
    last column and new tokens push out the oldest. With cache_seqlens the state is a ring: token t
    lies in column (cache_seqlens + t) % state_len.

    Args:
        x: (batch, dim) or (batch, dim, ntokens).
        conv_state: (slots, dim, state_len), state_len >= width - 1.
        weight: (dim, width); bias: (dim,); activation: None, "silu" or "swish".
        cache_seqlens: (batch,), tokens that each row has seen.
        conv_state_indices, dst_conv_state_indices: (batch,), the slot that a row reads and the one
            that it writes; the row's number and the slot read when not given. With a negative one
            or pad_slot_id the row is padding: output 0, nothing read or written.
        intermediate_states: (batch, ntokens, dim, state_len) receives the state after each token.
        num_accepted_tokens: (batch,), see `statescan.reference.slots`.
        out: like x.

    Returns:
        out, or a new tensor like x.
    """
    compute = compute_dtype(x, conv_state, weight, bias, intermediate_states)
    weight, bias = upcast(weight, compute), upcast(bias, compute)
    result = torch.zeros_like(x)
    x_tokens, result_tokens = (t if t.dim() == 3 else t[:, :, None] for t in (x, result))
    rows = find_slots(
        conv_state,
        x.shape[0],
        conv_state_indices,
        dst_conv_state_indices,
        pad_slot_id,
        intermediate_states,
        num_accepted_tokens,
    )
    for row in rows:
        b = row.batch_index
        state = upcast(row.start, compute)
        for t in range(x_tokens.shape[2]):
            x_t = upcast(x_tokens[b, :, t, None], compute)
            position = None if cache_seqlens is None else int(cache_seqlens[b]) + t
            before = _newest_inputs(state, weight.shape[1] - 1, position)
            y, _ = convolve(before, x_t, weight, bias, activation)
            result_tokens[b, :, t] = y[:, 0].to(x.dtype)
            state = _push(state, x_t, position)
            row.record(t, state)
        row.store(state)
    return result if out is None else out.copy_(result)


def _newest_inputs(state: torch.Tensor, count: int, position: int | None) -> torch.Tensor:
    """The last `count` inputs in a state (dim, state_len), oldest first.

    `position` is the number of tokens seen, which tells where a ring stands.
    """
    state_len = state.shape[1]
    if position is None:
        return state[:, state_len - count :]
    return state[:, [(position - age) % state_len for age in range(count, 0, -1)]]


def _push(state: torch.Tensor, x_t: torch.Tensor, position: int | None) -> torch.Tensor:
    """The state after one more input (dim, 1): everything moves up, or a ring loses its oldest."""
    state_len = state.shape[1]
    if state_len == 0:
        return state
    if position is None:
        return torch.cat([state[:, 1:], x_t], dim=1)
    column = position % state_len
    return torch.cat([state[:, :column], x_t, state[:, column + 1 :]], dim=1)
