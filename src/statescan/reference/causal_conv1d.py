# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution over sequences, as the truth for every backend.

Keep it checkable by eye: shifted copies times taps, one sequence at a time.
"""

import torch
import torch.nn.functional as F

from statescan.errors import ArgumentError
from statescan.reference.discretize import compute_dtype, upcast
from statescan.reference.sequences import count_states, find_sequences


def causal_conv1d_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    reverse: bool = False,
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convolve every channel of every sequence with its own taps.

        out[t] = activation(bias + sum over k < width of weight[k] x[t - (width - 1) + k])

    where x before the sequence is the initial state, or 0.

    Args:
        x: (batch, dim, seqlen).
        weight: (dim, width); bias: (dim,).
        activation: None, "silu" or "swish" (the same).
        initial_states: (batch, dim, width - 1), newest last; (num_seqs, ...) with cu_seqlens.
        seq_idx: (batch, seqlen), runs of equal ids are sequences, negative ids padding.
        cu_seqlens: (num_seqs + 1,), bounds of the sequences of a batch of 1.
        reverse: flip every sequence, convolve, flip back; taps and state columns keep their order.

    Returns:
        out like x, 0 at padding; with return_final_states also the last width - 1 inputs of each
        sequence in x's dtype, filled up on the left from the initial state or 0.
    """
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    out = torch.zeros_like(x)
    final_states = x.new_zeros((count_states(batch, cu_seqlens), dim, width - 1))
    compute = compute_dtype(x, weight, bias, initial_states)
    x, weight = upcast(x, compute), upcast(weight, compute)
    bias, initial_states = upcast(bias, compute), upcast(initial_states, compute)

    for seq in find_sequences(batch, seqlen, seq_idx, cu_seqlens):
        x_seq = x[seq.rows, :, seq.start : seq.end]
        x_seq = x_seq.flip(-1) if reverse else x_seq
        if initial_states is None or seq.initial is None:
            before = x.new_zeros((x_seq.shape[0], dim, width - 1))
        else:
            before = initial_states[seq.initial]
        y, after = convolve(before, x_seq, weight, bias, activation)
        out[seq.rows, :, seq.start : seq.end] = (y.flip(-1) if reverse else y).to(out.dtype)
        if seq.final is not None:
            final_states[seq.final] = after.to(out.dtype)
    return (out, final_states) if return_final_states else out


def convolve(
    before: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One stretch of tokens (..., dim, length) after the width - 1 inputs `before` it.

    Returns the outputs and the last width - 1 inputs.
    """
    if activation not in (None, "silu", "swish"):
        raise ArgumentError(
            f"activation is {activation!r}; the convolution knows None, 'silu' and 'swish'.\n"
            "Pass None and apply another activation to the output."
        )
    length = x.shape[-1]
    window = torch.cat([before, x], dim=-1)
    y = torch.zeros_like(x)
    for tap in range(weight.shape[1]):
        y = y + weight[:, tap, None] * window[..., tap : tap + length]
    if bias is not None:
        y = y + bias[:, None]
    return (y if activation is None else F.silu(y)), window[..., length:]
