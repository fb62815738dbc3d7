# SPDX-License-Identifier: Apache-2.0
"""Launches the selective scan kernels: prepares small tensors, lays out workspace, adds up parts.

The algorithms are described in ``kernels/cpu/selective_scan_fwd.c`` and ``_bwd.c``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from statescan.backends.cpu import abi
from statescan.backends.cpu._workspace import add_up, floats
from statescan.backends.cpu._workspace import workers as make_workers
from statescan.backends.cpu.sequences import list_sequences
from statescan.backends.outputs import (
    empty_gradients,
    scan_chunk_size,
    selective_scan_fwd_outputs,
)

# Of kernels/cpu: tokens a tile holds, tiles and tables [dstate] a worker needs.
_STEPS = 64
_FORWARD_TILES, _FORWARD_TABLES = 4, 16
_BACKWARD_TILES, _BACKWARD_TABLES, _STATES_AT_ONCE = 9, 9, 4

# Parts of the channels in the backward: enough for many threads, and few enough that the
# workspace for dB and dC stays small beside x.
_MOST_PARTS, _LEAST_PART = 16, 64
_ENOUGH_TASKS = 32


class _Weights:
    """B or C as the kernels read it, and its gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self.constant = tensor.dim() == 2
        self.ngroups = 0 if self.constant else tensor.shape[1]
        order = tensor if self.constant else tensor.transpose(2, 3)
        self.values = order.to(torch.float32).contiguous()

    def fields(self) -> tuple[int, ...]:
        """``struct statescan_weights``."""
        strides = (0, 0, 0) if self.constant else self.values.stride()[:3]
        return (self.values.data_ptr(), *strides, self.ngroups)

    def group_size(self, dim: int) -> int:
        """Channels that share a value; constant ones do not keep channels apart."""
        return dim // self.ngroups if self.ngroups else dim

    def workspace(self, dim: int, part: int, row_groups: int, clear: bool) -> Tensor:
        """Memory for the gradient's parts, which lie along the first axis."""
        if self.constant:
            return floats(row_groups, *self.values.shape)
        size = self.group_size(dim)
        starts = [group * size for group in range(self.ngroups)]
        counts = {(start + size - 1) // part - start // part + 1 for start in starts}
        parts = floats(max(counts, default=1), *self.values.shape)
        return parts.zero_() if clear or len(counts) > 1 else parts

    def store(self, gradient: Tensor, parts: Tensor) -> None:
        """Add the parts up, in their order, into the op's result."""
        total = add_up(parts)
        gradient.copy_(total if self.constant else total.transpose(2, 3))


def _unit(B: _Weights, C: _Weights, dim: int) -> int:
    """Neighbouring channels that share both B and C."""
    return max(1, math.gcd(B.group_size(dim), C.group_size(dim)))


def selective_scan_fwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    reverse: bool,
    save_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, final_states and chunk_states of ``statescan.selective_scan``."""
    batch, dim, seqlen = x.shape
    dstate = A.shape[1]
    out, final_states, chunk_states = selective_scan_fwd_outputs(
        x, A, cu_seqlens, save_states, torch.float32
    )
    sequences = list_sequences(batch, seqlen, seq_idx, cu_seqlens, reverse)
    sequences.pass_through(final_states, initial_states)
    if x.numel() == 0:
        return out, final_states, chunk_states
    B_, C_ = _Weights(B), _Weights(C)
    small = [abi.dense(tensor) for tensor in (A, D, dt_bias, initial_states)]
    workers, _scratch = make_workers(_FORWARD_TILES * _STEPS + _FORWARD_TABLES * dstate)
    abi.call(
        "selective_scan_fwd",
        *(abi.tensor3(tensor) for tensor in (x, dt, z, out)),
        *(B_.fields(), C_.fields(), sequences.fields(), workers),
        *(abi.address(tensor) for tensor in small),
        final_states.data_ptr(),
        chunk_states.data_ptr() if save_states else 0,
        *(dim, dstate, scan_chunk_size(dstate), _unit(B_, C_, dim), int(dt_softplus)),
    )
    return out, final_states, chunk_states


def selective_scan_bwd(
    dout: Tensor,
    dfinal_states: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_states: Tensor,
    dt_softplus: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states of ``statescan.selective_scan``."""
    batch, dim, seqlen = x.shape
    dstate = A.shape[1]
    gradients = empty_gradients(x, dt, A, B, C, D, z, dt_bias, initial_states)
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states = gradients
    if x.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        if initial_states is not None and dfinal_states is not None:
            dinitial_states.copy_(dfinal_states)
        return gradients
    sequences = list_sequences(batch, seqlen, seq_idx, cu_seqlens, reverse)
    B_, C_ = _Weights(B), _Weights(C)
    chunk_size, unit = scan_chunk_size(dstate), _unit(B_, C_, dim)
    part = max(_LEAST_PART, -(-dim // _MOST_PARTS))
    part = -(-part // _STATES_AT_ONCE**2) * _STATES_AT_ONCE**2
    row_groups = max(1, min(batch, _ENOUGH_TASKS // -(-dim // part)))
    parts = [weights.workspace(dim, part, row_groups, sequences.padded) for weights in (B_, C_)]
    sums = [floats(row_groups, *A.shape), *floats(2, row_groups, dim).unbind()]
    states = None if initial_states is None else floats(*initial_states.shape)
    small = [abi.dense(t) for t in (A, D, dt_bias, initial_states, dfinal_states, chunk_states)]
    workers, _scratch = make_workers(_backward_vectors(dstate, chunk_size, part, unit))
    abi.call(
        "selective_scan_bwd",
        *(abi.tensor3(tensor) for tensor in (dout, x, dt, z, dx, ddt, None if z is None else dz)),
        *(B_.fields(), C_.fields(), sequences.fields(), workers),
        *(abi.address(tensor) for tensor in (*small, states, *sums, *parts)),
        *(dim, dstate, chunk_size, unit, part, row_groups, int(dt_softplus)),
    )
    B_.store(dB, parts[0])
    C_.store(dC, parts[1])
    for gradient, total in ((dA, sums[0]), (dD, sums[1]), (ddt_bias, sums[2])):
        if gradient.numel():
            gradient.copy_(add_up(total))
    if states is not None:
        sequences.pass_through(states, dfinal_states)
        dinitial_states.copy_(states)
    return gradients


def _backward_vectors(dstate: int, chunk_size: int, part: int, unit: int) -> int:
    """Vectors of scratch memory that a worker of the backward needs."""
    tiles = _BACKWARD_TILES + 2 * _STATES_AT_ONCE + 2 * dstate
    # A vector holds 4 channels at least; part and unit bound how often one is not full.
    blocks = part // 4 + part // unit + 4
    tables = _BACKWARD_TABLES + chunk_size // _STEPS - 1
    # A block's own struct is 14 words and two vectors, padded: less than 16 vectors of 16 bytes.
    return tiles * _STEPS + blocks * (16 + tables * dstate)
