# SPDX-License-Identifier: Apache-2.0
"""Allocates the outputs of every op: one function an op and direction, for all backends and fakes.

So shapes, dtypes and strides of a result cannot differ between backends, or between a real
run and the one that torch.compile imagines. No arithmetic here; the memory is uninitialised.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DOUBLE = (torch.float64, torch.complex128)


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 when any tensor is double precision, else float32: the dtype of all arithmetic."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype in _DOUBLE:
            return torch.float64
    return torch.float32


def scan_state_dtype(A: Tensor, compute: torch.dtype) -> torch.dtype:
    """Dtype of scan states: the arithmetic's, or its complex partner when A is complex."""
    if not A.is_complex():
        return compute
    return torch.complex128 if compute == torch.float64 else torch.complex64


def scan_chunk_size(dstate: int) -> int:
    """Tokens between two saved states: a multiple of 64 that grows with dstate.

    So the saved states hold at most a quarter as many numbers as x does, whatever dstate is.
    """
    return max(64, (4 * dstate + 63) // 64 * 64)


def is_channel_last(x: Tensor) -> bool:
    """Whether neighbours along axis 1 (channels) of a 3-D tensor are neighbours in memory."""
    return x.dim() == 3 and x.stride(1) == 1 and x.stride(2) != 1


def empty_activation(
    like: Tensor, dim: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Dense (batch, dim, seqlen) memory laid out like ``like``, channel-first or -last."""
    batch, channels, seqlen = like.shape
    channels = channels if dim is None else dim
    if is_channel_last(like):
        # Not a transposed view: torch lets nobody change in place a view made without gradients.
        strides = (seqlen * channels, 1, channels)
        kind = like.dtype if dtype is None else dtype
        return torch.empty_strided(
            (batch, channels, seqlen), strides, dtype=kind, device=like.device
        )
    return like.new_empty((batch, channels, seqlen), dtype=dtype)


def empty_gradients(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """One gradient for each input, in its dtype; 0 elements where the input is absent.

    At least one input must be given; 3-D ones keep their layout, the others are contiguous.
    """
    present = next(tensor for tensor in inputs if tensor is not None)
    gradients = []
    for tensor in inputs:
        if tensor is None:
            gradients.append(present.new_empty((0,)))
        elif tensor.dim() == 3:
            gradients.append(empty_activation(tensor))
        else:
            gradients.append(tensor.new_empty(tensor.shape))
    return tuple(gradients)


def overlaps(out: Tensor, *inputs: Tensor | None) -> bool:
    """Whether ``out`` may share memory with an input otherwise than element by element."""
    home = out.untyped_storage().data_ptr()
    for tensor in inputs:
        if tensor is None or tensor.untyped_storage().data_ptr() != home:
            continue
        same = tensor.data_ptr() == out.data_ptr() and tensor.stride() == out.stride()
        if not (same and tensor.shape == out.shape and tensor.dtype == out.dtype):
            return True
    return False


def _num_states(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def selective_scan_fwd_outputs(
    x: Tensor,
    A: Tensor,
    cu_seqlens: Tensor | None,
    save_states: bool,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (like x), final_states (batch or num_seqs, dim, dstate), chunk_states.

    chunk_states is (batch, nchunks, dim, dstate): entry k is the state before token
    ``k * scan_chunk_size(dstate)`` in the order of processing; 0 elements unless ``save_states``.
    Where a sequence starts at that token, and inside padding, nobody reads it: a backend may store
    what it likes there, but numbers.
    """
    batch, dim, seqlen = x.shape
    dstate = A.shape[1]
    state = scan_state_dtype(A, compute)
    out = empty_activation(x)
    final_states = x.new_empty((_num_states(x, cu_seqlens), dim, dstate), dtype=state)
    shape: tuple[int, ...] = (0,)
    if save_states:
        chunk_size = scan_chunk_size(dstate)
        shape = (batch, (seqlen + chunk_size - 1) // chunk_size, dim, dstate)
    return out, final_states, x.new_empty(shape, dtype=state)


def causal_conv1d_fwd_outputs(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out (like x) and final_states (batch or num_seqs, dim, width - 1), both in x's dtype."""
    shape = (_num_states(x, cu_seqlens), x.shape[1], weight.shape[1] - 1)
    return empty_activation(x), x.new_empty(shape)


def projection_dtype(xz: Tensor, compute: torch.dtype) -> torch.dtype:
    """Dtype of mamba_inner's projections: xz's, or float64 when any input is."""
    return torch.float64 if compute == torch.float64 else xz.dtype


def projected_outputs(
    xz: Tensor, x_proj_weight: Tensor, out_proj_weight: Tensor | None, compute: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """out (batch, seqlen, d_model), None without an output projection, and x_dbl."""
    batch, _, seqlen = xz.shape
    dtype = projection_dtype(xz, compute)
    out = None
    if out_proj_weight is not None:
        out = xz.new_empty((batch, seqlen, out_proj_weight.shape[0]), dtype=dtype)
    return out, xz.new_empty((batch, seqlen, x_proj_weight.shape[0]), dtype=dtype)


def mamba_inner_fwd_outputs(
    xz: Tensor,
    conv_weight: Tensor,
    x_proj_weight: Tensor,
    A: Tensor,
    out_proj_weight: Tensor | None,
    cu_seqlens: Tensor | None,
    save_states: bool,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, conv_final_states, final_states, x_dbl, chunk_states, gated.

    x_dbl (batch, seqlen, dt_rank + B and C parts) and gated (the scan's output in the projections'
    dtype, for the gradient of out_proj_weight) have 0 elements where the backward will not need
    them.
    """
    dim, width = conv_weight.shape
    work = projection_dtype(xz, compute)
    scan = selective_scan_fwd_outputs(xz[:, :dim], A, cu_seqlens, save_states, compute)
    out, final_states, chunk_states = scan
    projected, x_dbl = projected_outputs(xz, x_proj_weight, out_proj_weight, compute)
    gated = xz.new_empty((0,), dtype=work)
    if projected is not None:
        gated = empty_activation(out, dtype=work) if save_states else gated
        out = projected.new_empty(projected.shape, dtype=xz.dtype)
    conv_final_states = xz.new_empty((_num_states(xz, cu_seqlens), dim, width - 1))
    x_dbl = x_dbl if save_states else x_dbl.new_empty((0,))
    return out, conv_final_states, final_states, x_dbl, chunk_states, gated
