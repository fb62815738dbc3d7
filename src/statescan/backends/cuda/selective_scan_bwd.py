# SPDX-License-Identifier: Apache-2.0
"""Launches the backward selective scan: picks an instance and segments of time, lays out workspace.

The algorithm is described in ``kernels/cuda/selective_scan_bwd.cu``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.sequences import Sequences, list_sequences
from statescan.backends.cuda.tables.selective_scan_bwd import (
    CHANNELS,
    GROUP,
    KERNEL,
    THREADS,
    TILE,
    WIDE_PARTS,
)
from statescan.backends.cuda.tables.selective_scan_reduce import COLUMNS, JOBS
from statescan.backends.outputs import (
    empty_activation,
    empty_gradients,
    is_channel_last,
    scan_chunk_size,
)

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_WIDE, _NARROW, _LARGE = 4 // WIDE_PARTS, 3, 2
"""Blocks that a multiprocessor holds: wide ones, others for up to 16 states, those for more."""

_SUMMARY_COST = 0.25
"""Time of the first pass over a segment, in units of the second one's."""

_MOST_SEGMENTS = 128
_FARTHEST = 2**31 // 256
"""Strides that a kernel multiplies by steps and channels of a tile in 32 bits stay below."""

_FIELDS = [name for name, _ in KERNEL.fields]
_BLOCKS_PER_UNIT = _FIELDS.index("blocks_per_unit")
_BLOCKS_PER_ROW = _FIELDS.index("blocks_per_row")


class Layout(NamedTuple):
    """How a call is cut into blocks.

    Attributes:
        states: States a thread owns; 0 for instances that take any number, 16 by 16.
        parts: Parts of 32 channels that a block has.
        unit: Neighbouring channels that share both B and C.
        blocks_per_unit: Blocks of channels that a unit takes.
        blocks_per_row: Those of a batch row.
        num_chunks: Saved states of a row.
        num_segments: Pieces of time that run at once.
        segment_chunks: Chunks of each but perhaps the last.
    """

    states: int
    parts: int
    unit: int
    blocks_per_unit: int
    blocks_per_row: int
    num_chunks: int
    num_segments: int
    segment_chunks: int


@lru_cache(maxsize=256)
def lay_out(
    batch: int,
    dim: int,
    seqlen: int,
    dstate: int,
    groups: tuple[int, int],
    processors: int,
    wide: bool,
    constant: bool,
) -> Layout:
    """The layout for a call whose B and C are shared by so many channels each."""
    unit = math.gcd(*groups)
    states = 0 if constant or dstate > GROUP else 1 if dstate <= 4 else 4
    # A wide block pays where few of its channels are idle.
    padded = -(-unit // (CHANNELS * WIDE_PARTS)) * CHANNELS * WIDE_PARTS
    parts = WIDE_PARTS if wide and states == 4 and padded <= 1.25 * unit else 1
    blocks_per_unit = -(-unit // (CHANNELS * parts))
    blocks_per_row = dim // unit * blocks_per_unit
    num_chunks = -(-seqlen // scan_chunk_size(dstate))
    resident = processors * (_LARGE if not states else _WIDE if parts > 1 else _NARROW)
    best, best_time = (1, num_chunks), math.inf
    for count in range(1, min(num_chunks, _MOST_SEGMENTS) + 1):
        chunks = -(-num_chunks // count)
        segments = -(-num_chunks // chunks)
        waves = -(-batch * blocks_per_row * segments // resident)
        time = waves * chunks * (1 + _SUMMARY_COST * (segments - 1) / segments)
        if time < 0.97 * best_time:
            best, best_time = (segments, chunks), time
    return Layout(states, parts, unit, blocks_per_unit, blocks_per_row, num_chunks, *best)


@lru_cache(maxsize=16)
def _device(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors, and whether a wide block fits on one."""
    properties = torch.cuda.get_device_properties(device)
    # A block gets 227 KiB of shared memory from compute capability 9.0 on, less before and on 12.x.
    return int(properties.multi_processor_count), 9 <= properties.major < 12


class _Weights(NamedTuple):
    """B or C in the dtype of the kernel, and its gradient."""

    values: Tensor
    gradient: Tensor
    constant: bool
    group_size: int

    def strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.constant else self.values.stride()

    def workspace(self, layout: Layout, batch: int, seqlen: int) -> Tensor:
        """The parts of the gradient, along the first axis."""
        if self.constant:
            rows = batch * layout.num_segments
            return self.values.new_empty((rows, *self.values.shape), dtype=torch.float32)
        shape = (layout.blocks_per_row, batch, self.values.shape[2], _part_steps(seqlen))
        return self.values.new_empty(shape, dtype=torch.float32)

    def job(self, parts: Tensor, layout: Layout, reverse: bool) -> tuple[int, ...]:
        """How the parts are added up."""
        if self.constant:
            return _row_sums(parts, self.gradient)
        batch, ngroups, dstate, seqlen = self.gradient.shape
        rows = layout.blocks_per_row // ngroups
        part = parts.stride(0)
        blocks = batch * ngroups * dstate * -(-seqlen // COLUMNS)
        return (
            *(parts.data_ptr(), self.gradient.data_ptr(), _CODES[self.gradient.dtype]),
            *(rows, part, seqlen, dstate, ngroups),
            *(parts.stride(1), rows * part, parts.stride(2), int(reverse), blocks),
        )


def _part_steps(seqlen: int) -> int:
    return -(-seqlen // TILE) * TILE


def _row_sums(parts: Tensor, target: Tensor) -> tuple[int, ...]:
    """The job that adds up the first axis."""
    length = target.numel()
    blocks = -(-length // COLUMNS)
    return (
        *(parts.data_ptr(), target.data_ptr(), _CODES[target.dtype]),
        *(parts.shape[0], length, length, 1, 1, 0, 0, 0, 0, blocks),
    )


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
    gradients = empty_gradients(x, dt, A, B, C, D, z, dt_bias, initial_states)
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states = gradients
    dfinal_states = _dense(dfinal_states)
    if x.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        if initial_states is not None and dfinal_states is not None:
            dinitial_states.copy_(dfinal_states)
        return gradients
    dim = x.shape[1]
    dtype = _common_dtype(dout, x, dt, B, C, z)
    sequences = list_sequences(x, seq_idx, cu_seqlens, reverse)
    states = None
    if initial_states is not None:
        states = dinitial_states
        if states.dtype != torch.float32 or not states.is_contiguous():
            states = torch.empty(states.shape, dtype=torch.float32, device=x.device)
        sequences.pass_through(states, dfinal_states)
    results = [_result(gradient, dtype) for gradient in (dx, ddt, None if z is None else dz)]
    inputs = [_near(_cast(tensor, dtype)) for tensor in (dout, x, dt, z)]
    small = [_dense(tensor) for tensor in (A, D, dt_bias, initial_states)]
    call = _Call(
        *(inputs, results, small, dfinal_states, chunk_states, sequences, states),
        _Weights(_weights(B, dtype), dB, B.dim() == 2, _group_size(B, dim)),
        _Weights(_weights(C, dtype), dC, C.dim() == 2, _group_size(C, dim)),
        (dA, None if D is None else dD, None if dt_bias is None else ddt_bias),
        *(dt_softplus, reverse),
    )
    call.run()
    for gradient, result in zip((dx, ddt, dz), results, strict=True):
        if result is not None and result is not gradient:
            gradient.copy_(result)
    if states is not None and states is not dinitial_states:
        dinitial_states.copy_(states)
    return gradients


def _result(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Where the kernel puts a gradient: in its place, if that has the dtype."""
    if gradient is None:
        return None
    if gradient.stride(1) + gradient.stride(2) >= _FARTHEST:
        _, dim, seqlen = gradient.shape
        strides = (seqlen * dim, 1, dim)
        return torch.empty_strided(gradient.shape, strides, dtype=dtype, device=gradient.device)
    return gradient if gradient.dtype == dtype else empty_activation(gradient, dtype=dtype)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _near(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy if its channels or steps are too far apart for the kernel."""
    if tensor is None or tensor.stride(1) + tensor.stride(2) < _FARTHEST:
        return tensor
    _, dim, seqlen = tensor.shape
    strides = (seqlen * dim, 1, dim)
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _common_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that all have, or float32, which holds each value of the others."""
    found = {tensor.dtype for tensor in tensors if tensor is not None}
    constant = any(tensor.dim() == 2 for tensor in tensors if tensor is not None)
    return found.pop() if len(found) == 1 and not constant else torch.float32


def _weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """B or C as the kernel reads it: constant ones have no strides there."""
    weights = weights.to(dtype)
    return weights.contiguous() if weights.dim() == 2 else weights


def _group_size(weights: Tensor, dim: int) -> int:
    """Channels that share B or C; constant ones do not keep channels apart."""
    return dim if weights.dim() == 2 else dim // weights.shape[1]


class _Call(NamedTuple):
    """A call whose activations have one dtype."""

    inputs: list[Tensor | None]  # dout, x, dt, z
    results: list[Tensor | None]  # dx, ddt, dz
    small: list[Tensor | None]  # A, D, dt_bias, initial_states
    dfinal_states: Tensor | None
    chunk_states: Tensor
    sequences: Sequences
    dinitial_states: Tensor | None
    B: _Weights
    C: _Weights
    sums: tuple[Tensor, Tensor | None, Tensor | None]  # dA, dD, ddt_bias
    dt_softplus: bool
    reverse: bool

    def run(self) -> None:
        """Launch one or two passes over the tokens, and the sums of what they leave."""
        x, A = self.inputs[1], self.small[0]
        assert x is not None and A is not None
        batch, dim, seqlen = x.shape
        dstate = A.shape[1]
        groups = (self.B.group_size, self.C.group_size)
        constant = self.B.constant or self.C.constant
        processors, wide = _device(x.device)
        layout = lay_out(batch, dim, seqlen, dstate, groups, processors, wide, constant)
        rows = batch * layout.num_segments
        parts_A = A.new_empty((rows, dim, dstate))
        parts_D, parts_bias = A.new_empty((2, rows, dim)).unbind()
        parts_B, parts_C = (w.workspace(layout, batch, seqlen) for w in (self.B, self.C))
        # A row of one chunk that it does not fill has fewer tiles; with 256 states each takes MiBs.
        tiles = min(scan_chunk_size(dstate), -(-seqlen // TILE) * TILE) // TILE
        scratch = self._scratch(layout, parts_A, tiles)
        values = (
            *self._addresses(),
            *(_address(t) for t in (parts_A, parts_B, parts_C, parts_D, parts_bias)),
            *(_address(tensor) for tensor in scratch),
            *self._strides(),
            *(*groups, *(self._weight_vectors(w.values) for w in (self.B, self.C))),
            *(batch, dim, seqlen, dstate, layout.num_chunks),
            *(tiles, layout.unit, layout.blocks_per_unit),
            *(layout.blocks_per_row, layout.num_segments, layout.segment_chunks),
            *(_part_steps(seqlen), int(self.dt_softplus), int(self.reverse)),
            int(is_channel_last(x)),
        )
        suffix, summary = self._instances(layout)
        blocks = batch * layout.blocks_per_row
        if layout.num_segments > 1:
            narrow = list(values)
            narrow[_BLOCKS_PER_UNIT] = -(-layout.unit // CHANNELS)
            narrow[_BLOCKS_PER_ROW] = dim // layout.unit * narrow[_BLOCKS_PER_UNIT]
            count = batch * narrow[_BLOCKS_PER_ROW] * (layout.num_segments - 1)
            launch("selective_scan_bwd", summary, x.device, (count, 1, 1), narrow)
        grid = (blocks * layout.num_segments, 1, 1)
        launch("selective_scan_bwd", suffix, x.device, grid, values)
        self._add_up(layout, parts_A, parts_B, parts_C, parts_D, parts_bias)

    def _instances(self, layout: Layout) -> tuple[str, str]:
        """Suffixes of the second and of the first pass.

        Instances for packed sequences take a row that is not packed for one sequence.
        """
        short = _SHORT[self.B.values.dtype]
        packed = bool(self.sequences.address)
        kind = "_packed" if packed else "" if self._vector() else "_strided"
        plain = kind if kind == "" else "_packed"
        constant = int(self.B.constant) + 2 * int(self.C.constant)
        if constant:
            summary = f"{short}_summary_packed{'_constant2' if self.C.constant else ''}"
            return f"{short}_large_packed_constant{constant}", summary
        if layout.parts > 1:
            size = f"n16_wide{kind}"
        else:
            size = {1: "n4", 4: "n16", 0: "large"}[layout.states] + plain
            size = "n4_packed" if layout.states == 1 else size
        return f"{short}_{size}", f"{short}_summary{plain}"

    def _addresses(self) -> tuple[int, ...]:
        A, D, dt_bias, initial_states = (_address(tensor) for tensor in self.small)
        return (
            *(_address(tensor) for tensor in (*self.inputs, *self.results)),
            *(self.B.values.data_ptr(), self.C.values.data_ptr()),
            *(A, D, dt_bias, initial_states, _address(self.dfinal_states)),
            *(self.chunk_states.data_ptr(), self.sequences.address),
            _address(self.dinitial_states),
        )

    def _strides(self) -> tuple[int, ...]:
        activations: list[int] = []
        for tensor in (*self.inputs, *self.results):
            activations += (0, 0, 0) if tensor is None else tensor.stride()
        return (*activations, *self.B.strides(), *self.C.strides())

    def _vector(self) -> bool:
        tensors = (*self.inputs, *self.results)
        return not self.reverse and all(_vectors(t) for t in tensors if t is not None)

    def _weight_vectors(self, weights: Tensor) -> int:
        return int(not self.reverse and weights.dim() == 4 and _vectors(weights))

    def _scratch(self, layout: Layout, like: Tensor, chunk_tiles: int) -> tuple[Tensor | None, ...]:
        """Carries and sums of dt of segments; carries and states of tiles for many states."""
        rows, dim, dstate = like.shape
        carries = sums = own = tiles = None
        if layout.num_segments > 1:
            carries, sums = torch.empty_like(like), like.new_empty((rows, dim))
        if not layout.states:
            own = torch.empty_like(like)
            count = chunk_tiles * -(-dstate // GROUP) * THREADS * 4
            tiles = like.new_empty((rows * layout.blocks_per_row, count))
        return carries, sums, own, tiles

    def _add_up(self, layout: Layout, parts_A: Tensor, *parts: Tensor) -> None:
        parts_B, parts_C, parts_D, parts_bias = parts
        dA, dD, ddt_bias = self.sums
        jobs = [
            self.B.job(parts_B, layout, self.reverse),
            self.C.job(parts_C, layout, self.reverse),
            _row_sums(parts_A, dA),
        ]
        jobs += [
            _row_sums(part, target)
            for part, target in ((parts_D, dD), (parts_bias, ddt_bias))
            if target is not None
        ]
        blocks = sum(job[-1] for job in jobs)
        values = [value for job in jobs for value in job]
        values += [0] * (len(jobs[0]) * (JOBS - len(jobs)))
        if blocks:
            grid = (blocks, 1, 1)
            launch("selective_scan_reduce", "sums", parts_A.device, grid, values)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vectors(tensor: Tensor) -> bool:
    """Whether each 4 steps of a channel or state are neighbours and aligned."""
    width = 4 * tensor.element_size()
    if tensor.stride(-1) != 1 or tensor.shape[-1] % 4 or tensor.data_ptr() % width:
        return False
    leading = range(tensor.dim() - 1)
    return all(tensor.stride(axis) % 4 == 0 for axis in leading if tensor.shape[axis] > 1)
