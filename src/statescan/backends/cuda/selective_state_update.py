# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel for one or a few decode steps of the SSM state, in place.

Both forms of the op are one to the kernel (``backends/_state_axes.py``). The algorithm is described
in ``kernels/cuda/selective_state_update.cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statescan.backends._state_axes import StateAxes
from statescan.backends.cuda._slots import list_fields, separate, starting_pool
from statescan.backends.cuda._strides import NAMES, address, dtype
from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.tables.base import packer
from statescan.backends.cuda.tables.selective_state_update import (
    ANY_VECTORS,
    AXES,
    CHANNELS,
    HEAD_VECTORS,
    MOST_STATES,
    PAIRS,
    TABLES,
    THREADS,
)
from statescan.errors import ArgumentError

_FULL = ("A", "D", "dt_bias")
_VECTORED = ("state", "start", "kept", "A", "B", "C")
_VECTOR, _WARP = 4, 32
_MOST_ROWS = 65535  # of the second axis of a grid
_ENOUGH_WARPS = 1 << 15
"""What fills the largest GPU a dozen times, so that the last of them do not run alone for long; a
warp has more rows or channels beyond that."""
_MOST_CHANNELS = 64  # of a warp on the road of heads
_HEAD_STATES = (64, 128, 256, 512)
"""Where lanes share a channel evenly, at least 4 of them: fewer load in too small pieces."""


class _Form(NamedTuple):
    """What calls of one form share: the instance, its grid, and the fields after the addresses."""

    instance: str
    grid: tuple[int, int, int]
    rest: bytes


class _Axes(StateAxes):
    """Where the axes of each argument lie, in the order of the kernel's table."""

    def strides(self, name: str, tensor: Tensor | None) -> tuple[int, ...]:
        """Strides along the axes that the kernel's table gives this argument."""
        if tensor is None:
            return (0,) * len(AXES[name])
        given = tensor.stride()
        if name in ("B", "C"):
            return self.of_weights(tensor)
        if name in ("state", "start"):
            return (given[0], *self.of_channels(given[1:]), given[-1])
        if name == "kept":
            return (*given[:2], *self.of_channels(given[2:]), given[-1])
        if name == "A":
            return (*self.of_channels(given), given[-1])
        if name in ("D", "dt_bias"):
            return self.of_channels(given)
        return self.of_tokens(tensor)


def selective_state_update_plan(
    *args: Any, A_is_log: bool = False
) -> Callable[[Sequence[Tensor]], None]:
    """A function that runs calls like this one: same shapes, strides, dtypes, options, device.

    It takes the tensors that are given, from ssm_state to out. It is for calls without indices and
    kept states, whose output lies apart.
    """
    listed = [
        None if tensor is None else _without_memory(tensor) for tensor in (*args[:9], args[13])
    ]
    tensors = dict(zip(TABLES, (listed[0], listed[0], None, *listed[1:])))
    present = [tensor is not None for tensor in listed]
    forms: dict[tuple[int, int, int], _Form] = {}
    device = args[0].device

    def form_of(key: tuple[int, int, int]) -> _Form:
        fits = dict(zip(("state", "start", "A", "B", "C"), (key[0],) * 3 + key[1:]))
        return describe(
            *(tensors, (None, None, None), args[14], args[15], False),
            fits={name: rest == 0 for name, rest in fits.items()},
            A_is_log=A_is_log,
        )

    def planned(given: Sequence[Tensor]) -> None:
        found = [tensor.data_ptr() for tensor in given]
        # A plan is made from strides; vectors need addresses that fit too.
        key = ((found[0] | found[3]) % 16, found[4] % 16, found[5] % 16)
        if key not in forms:
            forms[key] = form_of(key)
        form = forms[key]
        if len(found) < len(present):
            rest = iter(found)
            found = [next(rest) if there else 0 for there in present]
        state = found[0]
        values = (state, state, 0, *found[1:], 0, 0, 0)
        launch("selective_state_update", form.instance, device, form.grid, values, None, form.rest)

    return planned


def _without_memory(tensor: Tensor) -> Tensor:
    """The same form: a plan lives long and must not keep the tensors that it was made from."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_batch_indices: Tensor | None,
    dst_state_batch_indices: Tensor | None,
    intermediate_states: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    dt_softplus: bool,
    pad_slot_id: int,
) -> None:
    """``statescan.selective_state_update``; states and ``out`` are written in place."""
    if x.shape[0] == 0 or 0 in ssm_state.shape[1:-1]:
        return
    read, write = state_batch_indices, dst_state_batch_indices
    start, by_row = starting_pool(ssm_state, read, write)
    result = separate(out, x, dt, A, B, C, D, z, dt_bias)
    given = (ssm_state, start, intermediate_states, x, dt, A, B, C, D, z, dt_bias, result)
    lists = (read, write, num_accepted_tokens)
    form = describe(dict(zip(TABLES, given)), lists, dt_softplus, pad_slot_id, by_row)
    addresses = tuple(address(tensor) for tensor in (*given, *lists))
    launch("selective_state_update", form.instance, x.device, form.grid, addresses, None, form.rest)
    if result is not out:
        out.copy_(result)


def describe(
    tensors: dict[str, Tensor | None],
    lists: tuple[Tensor | None, Tensor | None, Tensor | None],
    dt_softplus: bool,
    pad_slot_id: int,
    by_row: bool,
    *,
    fits: Mapping[str, bool] | None = None,
    A_is_log: bool = False,
) -> _Form:
    """The form of a call.

    Args:
        tensors: By the names of ``TABLES``.
        lists: Slots to read, slots to write, accepted tokens.
        dt_softplus, pad_slot_id: The op's.
        by_row: Whether ``start`` holds a state for each row.
        fits: Which of the addresses are multiples of 16; None looks at them.
        A_is_log: Whether A holds the logarithm of the decay rate, A = -exp of it.
    """
    state, x = tensors["state"], tensors["x"]
    B, C, kept = tensors["B"], tensors["C"], tensors["kept"]
    assert state is not None and x is not None and B is not None and C is not None
    axes = _Axes(state, x, B, C)
    dstate, batch = state.shape[-1], x.shape[0]
    in_vectors = {name: _in_vectors(axes, name, tensors[name], fits) for name in _VECTORED}
    instance = _choose(axes, tensors, lists[2], in_vectors)
    lanes = _lanes(instance, dstate)
    warp_channels = _WARP // lanes
    head_tiles, tile_channels = 0, 0
    rows = batch
    if "_any" in instance:
        warps = -(-axes.num_heads * axes.head_channels // warp_channels)
    else:
        if instance.endswith("_heads"):
            # B, C and the decay of a row serve all channels of a warp.
            spare = batch * axes.num_heads * axes.head_channels // (_ENOUGH_WARPS * warp_channels)
            tile_channels = warp_channels * max(1, min(spare, _MOST_CHANNELS // warp_channels))
        else:
            tile_channels = warp_channels * CHANNELS
        head_tiles = -(-axes.head_channels // tile_channels)
        warps = axes.num_heads * head_tiles
        rows = min(batch, max(1, _ENOUGH_WARPS // warps))
    bits, list_strides = list_fields(*lists)
    numbers = (
        *(stride for name in TABLES for stride in axes.strides(name, tensors[name])),
        *(dtype(tensors[name]) for name in TABLES if name != "start"),
        *(int(in_vectors[name]) for name in _VECTORED),
        *(*bits, *list_strides, state.shape[0], pad_slot_id, int(by_row)),
        0 if kept is None else kept.shape[1],
        *(batch, axes.num_tokens, axes.num_heads, axes.head_channels, dstate),
        *(axes.B_heads, axes.C_heads, int(dt_softplus), int(A_is_log)),
        *(lanes, head_tiles, tile_channels),
    )
    grid = (-(-warps // (THREADS // _WARP)), min(rows, _MOST_ROWS), 1)
    return _Form(instance, grid, packer(len(numbers)).pack(*numbers))


def _choose(
    axes: _Axes,
    tensors: dict[str, Tensor | None],
    accepted: Tensor | None,
    in_vectors: Mapping[str, bool],
) -> str:
    """The name of the instance."""
    state, x = tensors["state"], tensors["x"]
    assert state is not None and x is not None
    dstate, pair = state.shape[-1], (NAMES[state.dtype], NAMES[x.dtype])
    plain = tensors["kept"] is None and accepted is None and axes.num_tokens == 1
    plain = plain and pair in PAIRS and dstate % _VECTOR == 0
    plain = plain and all(in_vectors[name] for name in ("state", "start", "B", "C"))
    plain = plain and (in_vectors["A"] or axes.strides("A", tensors["A"])[-1] == 0)
    plain = plain and all(
        tensor is None or tensor.dtype == (torch.float32 if name in _FULL else x.dtype)
        for name, tensor in tensors.items()
        if name not in ("state", "start")
    )
    plain = plain and _within_32_bits(axes, tensors)
    if plain and _one_a_head(axes, tensors) and dstate in _HEAD_STATES:
        return f"{pair[0]}_{pair[1]}_heads"
    if plain and dstate <= _VECTOR * _WARP:
        return f"{pair[0]}_{pair[1]}_channels"
    for vectors in ANY_VECTORS:
        if dstate <= vectors * _VECTOR * _WARP:
            return f"{pair[0]}_any{vectors}"
    raise ArgumentError(
        f"selective_state_update: the state has dstate {dstate}.\n"
        f"The cuda backend takes {MOST_STATES} at most.\n"
        "Pass backend='torch'."
    )


def _lanes(instance: str, dstate: int) -> int:
    """How many neighbouring lanes share a channel."""
    each = _VECTOR * (HEAD_VECTORS if instance.endswith("_heads") else 1)
    return min(_WARP, 1 << max(0, -(-dstate // each) - 1).bit_length())


def _one_a_head(axes: _Axes, tensors: Mapping[str, Tensor | None]) -> bool:
    """Whether dt, A, D and dt_bias are the same for all channels of a head."""
    strides = {name: axes.strides(name, tensors[name]) for name in ("dt", "A", "D", "dt_bias")}
    same = all(strides[name][-1] == 0 for name in ("dt", "D", "dt_bias"))
    return axes.head_channels > 1 and same and strides["A"][1:] == (0, 0)


def _within_32_bits(axes: _Axes, tensors: Mapping[str, Tensor | None]) -> bool:
    """Whether all that belongs to a row lies within 2^31 numbers of it."""
    for name in ("state", "start", "x", "dt", "z", "out"):
        *_, head, channel = axes.strides(name, tensors[name])[: 3 if "sta" in name else 4]
        if head * axes.num_heads + channel * axes.head_channels >= 1 << 31:
            return False
    return True


def _in_vectors(
    axes: _Axes, name: str, tensor: Tensor | None, fits: Mapping[str, bool] | None
) -> bool:
    """Whether 4 neighbouring states of every row lie at one aligned address."""
    if tensor is None:
        return False
    fit = tensor.data_ptr() % 16 == 0 if fits is None else fits[name]
    *others, last = axes.strides(name, tensor)
    return fit and last == 1 and all(stride % _VECTOR == 0 for stride in others)
