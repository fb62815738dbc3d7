# SPDX-License-Identifier: Apache-2.0
"""Launches the forward selective scan: brings tensors to one dtype, allocates, passes addresses.

Which instance and grid serve a call is decided in ``_scan_layout.py``; the algorithm is described
in ``kernels/cuda/selective_scan_fwd.cu``. The backward's launcher is ``selective_scan_bwd.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends.cuda._scan_layout import MOST_STATES, Layout, layout_of
from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.selective_scan_bwd import selective_scan_bwd as selective_scan_bwd
from statescan.backends.cuda.sequences import Sequences, list_sequences
from statescan.backends.outputs import empty_activation, selective_scan_fwd_outputs

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_PADDING = 4
"""``MARK_PADDING`` of ``kernels/cuda/marks.cuh``."""


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def _most_states(device: torch.device) -> int:
    """States of one launch: more than 128 need 68 KB of shared memory, and 7.5 has 64."""
    turing = device.type == "cuda" and torch.cuda.get_device_capability(device) == (7, 5)
    return 128 if turing else MOST_STATES


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
    out, final_states, chunk_states = selective_scan_fwd_outputs(
        x, A, cu_seqlens, save_states, torch.float32
    )
    sequences = list_sequences(x, seq_idx, cu_seqlens, reverse)
    initial_states = _dense_if(initial_states)
    sequences.pass_through(final_states, initial_states)
    if x.numel() == 0:
        return out, final_states, chunk_states
    if A.shape[1] == 0:
        zeros = torch.zeros_like(out, dtype=torch.float32)
        return out.copy_(_finish(zeros, x, D, z, sequences)), final_states, chunk_states
    dtype = _common_dtype(A.shape[1], x, dt, B, C, z)
    call = _Call(
        x=_cast(x, dtype),
        dt=_cast(dt, dtype),
        B=_weights(B, dtype),
        C=_weights(C, dtype),
        A=_dense(A),
        D=_dense_if(D),
        dt_bias=_dense_if(dt_bias),
        initial_states=initial_states,
        final_states=final_states,
        chunk_states=chunk_states if save_states else None,
        sequences=sequences,
        dt_softplus=dt_softplus,
        reverse=reverse,
    )
    most_states = _most_states(x.device)
    if A.shape[1] <= most_states:
        target = out if dtype == out.dtype else empty_activation(x, dtype=dtype)
        call.run(target, None if z is None else _cast(z, dtype), 0, A.shape[1])
    else:
        target = _by_slices(call, z, most_states)
    if target is not out:
        out.copy_(target)
    return out, final_states, chunk_states


def _common_dtype(dstate: int, *tensors: Tensor | None) -> torch.dtype:
    """The dtype that all have, or float32, which holds each value of the others."""
    given = [tensor for tensor in tensors if tensor is not None]
    dtype = given[0].dtype
    if any(tensor.dtype != dtype or tensor.dim() == 2 for tensor in given):
        return torch.float32
    # Only shapes for 9 to 16 states are compiled for float16, which few train with.
    return torch.float32 if dtype == torch.float16 and not 8 < dstate <= 16 else dtype


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # A question is quicker than a cast that does nothing.
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _weights(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """B or C; constant ones are small."""
    return _dense(tensor) if tensor.dim() == 2 else _cast(tensor, dtype)


def _dense(tensor: Tensor) -> Tensor:
    return _cast(tensor, torch.float32).contiguous()


def _dense_if(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _dense(tensor)


class _Call(NamedTuple):
    """A call with x, dt, B and C in one dtype, and all else contiguous float32."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None
    final_states: Tensor
    chunk_states: Tensor | None
    sequences: Sequences
    dt_softplus: bool
    reverse: bool

    def run(self, out: Tensor, z: Tensor | None, first_state: int, dstate: int) -> None:
        """Launch the kernel, or both passes of it, for states from ``first_state`` on."""
        tensors = (self.x, self.dt, z, out, self.B, self.C)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        device = self.x.device
        layout = layout_of(
            *(_SHORT[self.x.dtype], self.x.shape, self.A.shape[1], first_state, dstate),
            *(tuple(None if tensor is None else tensor.stride() for tensor in tensors),),
            *(tuple(0 if tensor.dim() == 2 else tensor.shape[1] for tensor in (self.B, self.C)),),
            tuple(address % 16 for address in addresses),
            *(self.dt_softplus, self.reverse, self.sequences.address != 0, _processors(device)),
        )
        workspace = None
        if layout.workspace_floats:
            workspace = self.x.new_empty((layout.workspace_floats,), dtype=torch.float32)
        values = self._values(layout, addresses, 4 * first_state, workspace)
        if layout.first_pass is not None:
            launch("selective_scan_fwd", layout.first_pass, device, layout.first_grid, values)
        launch("selective_scan_fwd", layout.instance, device, layout.grid, values)

    def _values(
        self, layout: Layout, addresses: list[int], state_bytes: int, workspace: Tensor | None
    ) -> tuple[int, ...]:
        """The fields of the kernel's struct."""
        rows = (self.initial_states, self.final_states, self.chunk_states)
        marks = self.sequences.address
        return (
            *(start + skip if start else 0 for start, skip in zip(addresses, layout.offsets)),
            self.A.data_ptr() + state_bytes,
            *(0 if tensor is None else tensor.data_ptr() for tensor in (self.D, self.dt_bias)),
            *(0 if tensor is None else tensor.data_ptr() + state_bytes for tensor in rows),
            marks + layout.marks_offset if marks else 0,
            0 if workspace is None else workspace.data_ptr(),
            *layout.numbers,
        )


def _by_slices(call: _Call, z: Tensor | None, most_states: int) -> Tensor:
    """The result for more states than a launch takes: their sums, slice by slice, then the rest."""
    dstate = call.A.shape[1]
    total = torch.zeros_like(call.x, dtype=torch.float32)
    bare = call._replace(D=None)
    for first in range(0, dstate, most_states):
        part = empty_activation(call.x, dtype=call.x.dtype)
        bare.run(part, None, first, min(most_states, dstate - first))
        total += part
    return _finish(total, call.x, call.D, z, call.sequences)


def _finish(
    y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, sequences: Sequences
) -> Tensor:
    """Skip and gate by torch, and zeros at padding."""
    if D is not None:
        y = y + D.float()[:, None] * x
    if z is not None:
        y = y * torch.nn.functional.silu(z.float())
    marks = sequences.marks
    if marks is not None:
        y = y.masked_fill((marks.view(x.shape[0], 1, x.shape[2]) & _PADDING) != 0, 0.0)
    return y
