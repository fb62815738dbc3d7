# SPDX-License-Identifier: Apache-2.0
"""The causal convolution and its decode step under causal_conv1d's names and argument order.

Only renaming; the raw extension modules' forms are in ``causal_conv1d_raw``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from statescan import ops
from statescan.compat._callers import context_of_caller
from statescan.compat._gradients import without_graph
from statescan.reference.causal_conv1d import causal_conv1d_ref as _conv_reference
from statescan.reference.causal_conv1d_update import causal_conv1d_update_ref as _update_reference


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``statescan.causal_conv1d`` in the original's order; writes ``final_states_out`` in place.

    Unlike the original: any width, any number of channels, every option in both layouts, and
    final states together with packed sequences. A run of equal ids in seq_idx is a sequence of
    its own, and padding (negative ids) has no gradient.

    Args:
        x: (batch, dim, seqlen).
        weight: (dim, width).
        bias: (dim,).
        seq_idx: (batch, seqlen) ids of packed sequences.
        initial_states: (batch, dim, width - 1), the tokens before the first.
        return_final_states: Return the last width - 1 tokens too.
        final_states_out: (batch, dim, width - 1), receives them.
        activation: None, "silu" or "swish".
        cu_seqlens, reverse, backend: As ``statescan.causal_conv1d`` takes them; the original has
            none of them.

    Returns:
        out like x, or (out, final_states).
    """
    if seq_idx is cu_seqlens is None:
        batch, _, seqlen = x.shape
        _, seq_idx, cu_seqlens = context_of_caller(batch, 0, seqlen, 0)
    result = ops.causal_conv1d(
        *(x, weight, bias),
        activation=activation,
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        return_final_states=bool(return_final_states),
        backend=backend,
    )
    if final_states_out is None or not isinstance(result, tuple):
        return result
    return result[0], final_states_out.copy_(result[1])


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain torch: the truth to compare with; writes ``final_states_out`` in place."""
    result = _conv_reference(
        *(x, weight, bias),
        activation=activation,
        initial_states=initial_states,
        seq_idx=seq_idx,
        return_final_states=bool(return_final_states),
    )
    if final_states_out is None or not isinstance(result, tuple):
        return result
    return result[0], final_states_out.copy_(result[1])


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``statescan.causal_conv1d_update`` in the original's order; writes ``conv_state`` in place.

    Like the original it carries no gradient; with grad mode on it says so once.

    Args:
        x: (batch, dim) or (batch, dim, ntokens).
        conv_state: (batch or slots, dim, state_len).
        weight: (dim, width).
        bias: (dim,).
        activation: None, "silu" or "swish".
        cache_seqlens: (batch,) tokens seen so far; the state is then a ring.
        conv_state_indices: (batch,) slot of each row; a negative one is padding.
        pad_slot_id, out, backend: As ``statescan.causal_conv1d_update`` takes them.

    Returns:
        out, like x.
    """
    x, conv_state, weight, bias = without_graph(  # type: ignore[assignment]
        "causal_conv1d_update", x, conv_state, weight, bias
    )
    return ops.causal_conv1d_update(
        *(x, conv_state, weight, bias),
        activation=activation,
        cache_seqlens=cache_seqlens,
        conv_state_indices=conv_state_indices,
        pad_slot_id=pad_slot_id,
        out=out,
        backend=backend,
    )


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """The same in plain torch; writes ``conv_state`` in place."""
    return _update_reference(
        x, conv_state, weight, bias, activation=activation, cache_seqlens=cache_seqlens
    )


class CausalConv1dFn:
    """The original's autograd function, of which programs call ``apply``."""

    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> Any:
        """``causal_conv1d_fn`` of the same arguments."""
        return causal_conv1d_fn(*args, **kwargs)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last ``state_len`` tokens of each packed sequence, zeros where it is shorter.

    Args:
        x: (total_tokens, dim).
        cu_seqlens: (num_seqs + 1,) bounds; empty sequences give zeros.
        state_len: Tokens to keep.

    Returns:
        (num_seqs, dim, state_len) in x's dtype, channels dense in memory.
    """
    ends = cu_seqlens[1:].long()
    # Position of each kept token, counted back from its sequence's end.
    positions = ends[:, None] - torch.arange(state_len, 0, -1, device=x.device)
    inside = positions >= cu_seqlens[:-1].long()[:, None]
    kept = x[positions.clamp(min=0, max=max(x.shape[0] - 1, 0))] if x.shape[0] else None
    if kept is None:
        kept = x.new_zeros(*positions.shape, x.shape[1])
    return torch.where(inside.unsqueeze(-1), kept, 0.0).to(x.dtype).transpose(1, 2)


def causal_conv1d_varlen_states_ref(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The same, sequence by sequence."""
    bounds = cu_seqlens.tolist()
    states = x.new_zeros(len(bounds) - 1, state_len, x.shape[1])
    for row, (start, end) in enumerate(pairwise(bounds)):
        length = min(state_len, end - start)
        if length:
            states[row, state_len - length :] = x[end - length : end]
    return states.transpose(1, 2)
