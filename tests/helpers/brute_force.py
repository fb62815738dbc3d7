# SPDX-License-Identifier: Apache-2.0
"""The ops once more in NumPy float64, written another way than the references they check.

The scan is the explicit sum over past tokens, without a running state; the convolution is
NumPy's own; packing is found with itertools. Arguments are those of the references, as arrays.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np


def silu(values):
    return values / (1 + np.exp(-values))


def segments(row, seqlen, seq_idx, cu_seqlens):
    """(token numbers, index of the initial state or None, index of the final state or None)."""
    if cu_seqlens is not None:
        bounds = [int(bound) for bound in cu_seqlens]
        return [(range(bounds[i], bounds[i + 1]), i, i) for i in range(len(bounds) - 1)]
    if seq_idx is None:
        return [(range(seqlen), row, row)]
    found = []
    for idx, group in groupby(range(seqlen), key=lambda t: int(seq_idx[row, t])):
        if idx >= 0:
            found.append([list(group), None, None])
    found = found or [[[], None, None]]
    found[0][1] = row
    found[-1][2] = row
    return found


def scan(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, initial_states=None,
    seq_idx=None, cu_seqlens=None, reverse=False, return_final_states=True,
):  # fmt: skip
    """out and final states of the selective scan."""
    batch, dim, seqlen = x.shape
    dstate = A.shape[1]
    num_states = batch if cu_seqlens is None else len(cu_seqlens) - 1
    out = np.zeros(x.shape)
    final = np.full((num_states, dim, dstate), np.nan, dtype=A.dtype)
    for row in range(batch):
        for tokens, initial, last in segments(row, seqlen, seq_idx, cu_seqlens):
            order = list(tokens)[::-1] if reverse else list(tokens)
            state = np.zeros((dim, dstate), dtype=A.dtype)
            if initial is not None and initial_states is not None:
                state = initial_states[initial]
            steps = dt[row][:, order]
            steps = steps if dt_bias is None else steps + dt_bias[:, None]
            steps = np.logaddexp(0, steps) if dt_softplus else steps
            elapsed = np.cumsum(steps, axis=1)
            reached = state
            for now, t in enumerate(order):
                reached = np.exp(elapsed[:, now, None] * A) * state
                for past, s in enumerate(order[: now + 1]):
                    decay = np.exp((elapsed[:, now] - elapsed[:, past])[:, None] * A)
                    entered = (steps[:, past] * x[row, :, s])[:, None] * weight_at(B, row, s, dim)
                    reached = reached + decay * entered
                y = np.einsum("dn,dn->d", weight_at(C, row, t, dim), reached)
                y = 2 * y.real if np.iscomplexobj(y) else y
                y = y if D is None else y + D * x[row, :, t]
                out[row, :, t] = y if z is None else y * silu(z[row, :, t])
            if last is not None:
                final[last] = reached
    return out, final


def weight_at(weight, row, t, dim):
    """B or C at one token for every channel, (dim, dstate)."""
    if weight.ndim == 2:
        return weight
    if weight.ndim == 3:
        return np.tile(weight[row, :, t], (dim, 1))
    group_of_channel = np.arange(dim) * weight.shape[1] // max(dim, 1)
    return weight[row][group_of_channel][:, :, t]


def convolve(
    x, weight, bias=None, activation=None, initial_states=None,
    seq_idx=None, cu_seqlens=None, reverse=False, return_final_states=True,
):  # fmt: skip
    """out and final states of the causal convolution."""
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    num_states = batch if cu_seqlens is None else len(cu_seqlens) - 1
    out = np.zeros(x.shape)
    final = np.full((num_states, dim, width - 1), np.nan)
    for row in range(batch):
        for tokens, initial, last in segments(row, seqlen, seq_idx, cu_seqlens):
            order = list(tokens)[::-1] if reverse else list(tokens)
            for channel in range(dim):
                past = np.zeros(width - 1)
                if initial is not None and initial_states is not None:
                    past = initial_states[initial, channel]
                signal = np.concatenate([past, x[row, channel, order]])
                if order:
                    y = np.correlate(signal, weight[channel], mode="valid")
                    y = y if bias is None else y + bias[channel]
                    out[row, channel, order] = y if activation is None else silu(y)
                if last is not None:
                    final[last, channel] = signal[len(signal) - (width - 1) :]
    return out, final


def rms_norm(values, weight, eps):
    if weight is None:
        return values
    return values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + eps) * weight


def mamba_inner(
    xz, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, A, B, C, D, dt_bias, b_proj_bias,
    c_proj_bias, dt_softplus, activation, out_proj_weight, out_proj_bias, b_norm_weight,
    c_norm_weight, dt_norm_weight, conv_initial_states, initial_states, reverse,
    return_final_states, seq_idx=None, cu_seqlens=None, norm_eps=1e-6,
):  # fmt: skip
    """out, final states of the convolution, final states of the scan."""
    dim, rank = dt_proj_weight.shape
    order = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "reverse": reverse}
    x, conv_final = convolve(
        xz[:, :dim], conv_weight, conv_bias, activation, conv_initial_states, **order
    )
    projected = np.einsum("bdl,rd->blr", x, x_proj_weight)
    dt = rms_norm(projected[..., :rank] @ dt_proj_weight.T, dt_norm_weight, norm_eps)
    rest = projected[..., rank:]

    def take(constant, bias, norm_weight):
        nonlocal rest
        if constant is not None:
            return constant
        part = A.shape[1] * (2 if np.iscomplexobj(A) else 1)
        taken, rest = rest[..., :part], rest[..., part:]
        taken = rms_norm(taken if bias is None else taken + bias, norm_weight, norm_eps)
        taken = np.ascontiguousarray(taken)
        taken = taken.view(np.complex128) if np.iscomplexobj(A) else taken
        return np.moveaxis(taken, 2, 1)

    B = take(B, b_proj_bias, b_norm_weight)
    C = take(C, c_proj_bias, c_norm_weight)
    out, final = scan(
        x, np.moveaxis(dt, 2, 1), A, B, C, D, xz[:, dim:], dt_bias, dt_softplus, initial_states,
        **order,
    )  # fmt: skip
    if out_proj_weight is not None:
        out = np.einsum("bdl,ed->ble", out, out_proj_weight)
        out = out if out_proj_bias is None else out + out_proj_bias
        if seq_idx is not None:
            out[seq_idx < 0] = 0
    return out, conv_final, final


def state_update(
    ssm_state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, out, state_batch_indices,
    dst_state_batch_indices, pad_slot_id, num_accepted_tokens, intermediate_states=None,
):  # fmt: skip
    """out, with ssm_state and intermediate_states written: every prefix is a scan of its own."""
    headed = ssm_state.ndim == 4
    several = x.ndim == (4 if headed else 3)
    batch, dstate = x.shape[0], A.shape[-1]
    channels = A.shape[:-1]
    ntokens = x.shape[1 if headed else -1] if several else 1
    by_token = (batch, ntokens, *channels)

    def tokens(values):
        """(batch, dim, ntokens) with heads flattened into dim."""
        if values is None:
            return None
        if several and not headed:
            return values
        return np.moveaxis(values.reshape(batch, ntokens, int(np.prod(channels))), 1, 2)

    def groups(values):
        """(batch, ngroups, dstate, ntokens)."""
        if several and not headed:
            return values if values.ndim == 4 else values[:, None]
        values = values if several else values[:, None]
        values = values if values.ndim == 4 else values[:, :, None]
        return np.moveaxis(values, 1, 3)

    def flatten(values):
        return None if values is None else values.reshape(-1)

    x3, dt3, z3, B4, C4 = tokens(x), tokens(dt), tokens(z), groups(B), groups(C)
    A2, D1, bias = A.reshape(int(np.prod(channels)), dstate), flatten(D), flatten(dt_bias)
    result = np.zeros(x3.shape)

    def advance(row, start, history):
        last = start
        for count in range(1, x3.shape[2] + 1):
            cut = (slice(row, row + 1), ..., slice(0, count))
            y, final = scan(
                x3[cut], dt3[cut], A2, B4[cut], C4[cut], D1, None if z3 is None else z3[cut], bias,
                dt_softplus, start.reshape(1, *A2.shape),
            )  # fmt: skip
            result[row, :, count - 1] = y[0, :, -1]
            last = final[0].reshape(start.shape)
            if history is not None:
                history[count - 1] = last
        return last

    decode(
        ssm_state, batch, advance, state_batch_indices, dst_state_batch_indices, pad_slot_id,
        num_accepted_tokens, intermediate_states,
    )  # fmt: skip
    if several and not headed:
        return result
    result = np.moveaxis(result, 2, 1).reshape(by_token)
    return result if several else result[:, 0]


def conv_update(
    x, conv_state, weight, bias, activation, cache_seqlens, out, conv_state_indices,
    dst_conv_state_indices, pad_slot_id, num_accepted_tokens, intermediate_states=None,
):  # fmt: skip
    """out, with conv_state and intermediate_states written: the state is a list of past inputs."""
    x3 = x if x.ndim == 3 else x[:, :, None]
    result = np.zeros(x3.shape)
    width, state_len = weight.shape[1], conv_state.shape[2]

    def advance(row, start, history):
        seen = 0 if cache_seqlens is None else int(cache_seqlens[row])
        # A ring as a line: rotate so that the oldest input comes first.
        past = list(np.roll(start, -(seen % state_len), axis=1).T) if state_len else []
        state = start
        for t in range(x3.shape[2]):
            past.append(x3[row, :, t])
            window = np.stack(past[len(past) - width :], axis=1)
            y = (window * weight).sum(axis=1)
            y = y if bias is None else y + bias
            result[row, :, t] = y if activation is None else silu(y)
            kept = np.stack(past[len(past) - state_len :], axis=1) if state_len else start
            turn = 0 if cache_seqlens is None or not state_len else (seen + t + 1) % state_len
            state = np.roll(kept, turn, axis=1)
            if history is not None:
                history[t] = state
        return state

    decode(
        conv_state, x.shape[0], advance, conv_state_indices, dst_conv_state_indices, pad_slot_id,
        num_accepted_tokens, intermediate_states,
    )  # fmt: skip
    return result if x.ndim == 3 else result[:, :, 0]


def decode(pool, batch, advance, read, write, pad, accepted, history):
    """Slots, padding and rollback around `advance(row, starting state, history)`."""
    old_pool = pool.copy()
    old_history = None if history is None else history.copy()
    for row in range(batch):
        source = row if read is None else int(read[row])
        target = source if write is None else int(write[row])
        asked = [int(slots[row]) for slots in (read, write) if slots is not None]
        if any(slot < 0 or slot == pad for slot in asked):
            continue
        start = old_pool[source]
        if accepted is not None and accepted[row] > 0:
            start = old_history[row, accepted[row] - 1]
        last = advance(row, start, None if history is None else history[row])
        pool[target] = last if accepted is None else start
