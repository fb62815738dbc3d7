# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba-1, token by token, as the truth that every backend is compared with.

Keep it checkable by eye: no chunks, no parallel scan, no tricks.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from statescan.reference.discretize import (
    advance_state,
    compute_dtype,
    read_state,
    state_dtype,
    step_size,
    upcast,
)
from statescan.reference.sequences import Sequence, count_states, find_sequences


def selective_scan_ref(
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
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    reverse: bool = False,
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scan every sequence on its own, one token after the other.

    With dt standing for softplus(dt + dt_bias), or what the flags leave of it:

        state[t] = exp(dt[t] A) state[t-1] + dt[t] B[t] x[t]
        y[t]     = sum over dstate of C[t] state[t]      (complex A: twice the real part)
        out[t]   = (y[t] + D x[t]) silu(z[t])

    Args:
        x, dt, z: (batch, dim, seqlen).
        A: (dim, dstate), real or complex; B and C are complex if A is.
        B, C: (dim, dstate) constant, (batch, dstate, seqlen) or
            (batch, ngroups, dstate, seqlen), where dim / ngroups channels share a group.
        D, dt_bias: (dim,).
        initial_states: (batch, dim, dstate); (num_seqs, dim, dstate) with cu_seqlens.
        seq_idx: (batch, seqlen), runs of equal ids are sequences, negative ids padding.
        cu_seqlens: (num_seqs + 1,), bounds of the sequences of a batch of 1.
        reverse: scan each sequence from its last token to its first.

    Returns:
        out like x, 0 at padding; with return_final_states also the states, shaped as
        initial_states, float32 or float64 (complex for complex A).
    """
    batch, dim, seqlen = x.shape
    out = torch.zeros_like(x)
    compute = compute_dtype(x, dt, A, B, C, D, z, dt_bias, initial_states)
    x, dt, A, B, C = (upcast(tensor, compute) for tensor in (x, dt, A, B, C))
    D, z, dt_bias = (upcast(tensor, compute) for tensor in (D, z, dt_bias))
    states = state_dtype(A, compute)
    final_states = x.new_zeros((count_states(batch, cu_seqlens), *A.shape), dtype=states)
    bias = None if dt_bias is None else dt_bias[:, None]

    for seq in find_sequences(batch, seqlen, seq_idx, cu_seqlens):
        x_seq = _tokens(x, seq, reverse)
        dt_seq = step_size(_tokens(dt, seq, reverse), bias, dt_softplus)
        if initial_states is None or seq.initial is None:
            state = x.new_zeros((x_seq.shape[0], *A.shape), dtype=states)
        else:
            state = initial_states[seq.initial].to(states)

        outputs = []
        B_seq, C_seq = (_weights(tensor, seq, reverse, dim) for tensor in (B, C))
        for x_t, dt_t, B_t, C_t in zip(
            x_seq.unbind(-1), dt_seq.unbind(-1), B_seq, C_seq, strict=True
        ):
            state = advance_state(state, x_t, dt_t, A, B_t)
            outputs.append(read_state(state, C_t))
        y = torch.stack(outputs, dim=-1) if outputs else torch.zeros_like(x_seq)

        if D is not None:
            y = y + D[:, None] * x_seq
        if z is not None:
            y = y * F.silu(_tokens(z, seq, reverse))
        out[seq.rows, :, seq.start : seq.end] = (y.flip(-1) if reverse else y).to(out.dtype)
        if seq.final is not None:
            final_states[seq.final] = state
    return (out, final_states) if return_final_states else out


def _tokens(tensor: torch.Tensor, seq: Sequence, reverse: bool) -> torch.Tensor:
    """The tokens of one sequence in the order of processing."""
    piece = tensor[seq.rows, ..., seq.start : seq.end]
    return piece.flip(-1) if reverse else piece


def _weights(
    tensor: torch.Tensor, seq: Sequence, reverse: bool, dim: int
) -> Iterator[torch.Tensor]:
    """B or C for one token after the other, each broadcastable to (rows, dim, dstate)."""
    if tensor.dim() == 2:
        yield from [tensor] * (seq.end - seq.start)
        return
    grouped = tensor if tensor.dim() == 4 else tensor[:, None]
    for weight in _tokens(grouped, seq, reverse).unbind(-1):
        yield weight.repeat_interleave(dim // grouped.shape[1], dim=1)
