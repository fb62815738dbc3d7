# SPDX-License-Identifier: Apache-2.0
"""The parameter structs of the CPU kernels, as ``kernels/cpu/abi.h`` has them, and how to fill one.

Every field is 8 bytes wide or made of such, so a struct is a list of integers that one call packs;
a test compares this table with the library's own. Nothing here knows what an op computes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from statescan.backends import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The values of ``enum statescan_dtype``."""

_TENSOR = ("data", "batch_stride", "channel_stride", "token_stride", "dtype")
_WEIGHTS = ("data", "batch_stride", "group_stride", "token_stride", "ngroups")
_SEQUENCES = ("runs", "row_runs", "batch", "seqlen", "reverse")
_WORKERS = ("count", "scratch", "scratch_bytes")
_STATES = (
    *("data", "row_stride", "token_stride", "head_stride", "channel_stride", "state_stride"),
    "dtype",
)
_MATRIX = ("data", "row_stride", "columns", "dtype")
_SLOTS = ("read", "write", "accepted", "pad_slot")

ABSENT = (0, 0, 0, 0, 0)
"""A tensor that is not given."""

_NESTED = {
    "statescan_tensor": _TENSOR,
    "statescan_weights": _WEIGHTS,
    "statescan_sequences": _SEQUENCES,
    "statescan_workers": _WORKERS,
    "statescan_states": _STATES,
    "statescan_slots": _SLOTS,
    "statescan_matrix": _MATRIX,
}
_SCAN = (
    *("B:statescan_weights", "C:statescan_weights", "sequences:statescan_sequences"),
    *("workers:statescan_workers", "A", "D", "dt_bias", "initial_states"),
)
_CONV = (
    *("sequences:statescan_sequences", "workers:statescan_workers"),
    *("weight", "bias", "initial_states"),
)
STRUCTURES: Mapping[str, tuple[str, ...]] = _NESTED | {
    "statescan_selective_scan_fwd": (
        *(f"{name}:statescan_tensor" for name in ("x", "dt", "z", "out")),
        *(*_SCAN, "final_states", "chunk_states"),
        *("dim", "dstate", "chunk_size", "unit_channels", "dt_softplus"),
    ),
    "statescan_selective_scan_bwd": (
        *(f"{name}:statescan_tensor" for name in ("dout", "x", "dt", "z", "dx", "ddt", "dz")),
        *(*_SCAN, "dfinal_states", "chunk_states", "dinitial_states"),
        *("dA", "dD", "ddt_bias", "dB", "dC"),
        *("dim", "dstate", "chunk_size", "unit_channels", "part_channels", "row_groups"),
        "dt_softplus",
    ),
    "statescan_causal_conv1d_fwd": (
        *("x:statescan_tensor", "out:statescan_tensor", *_CONV, "final_states"),
        *("dim", "width", "silu"),
    ),
    "statescan_causal_conv1d_bwd": (
        *(f"{name}:statescan_tensor" for name in ("dout", "x", "dx")),
        *(*_CONV, "dfinal_states", "dinitial_states", "dweight", "dbias"),
        *("dim", "width", "silu", "part_channels", "part_tokens", "row_groups"),
    ),
    "statescan_selective_state_update": (
        *(f"{name}:statescan_states" for name in ("state", "start", "kept", "x", "dt", "A")),
        *(f"{name}:statescan_states" for name in ("B", "C", "D", "z", "dt_bias", "out")),
        *("slots:statescan_slots", "workers:statescan_workers"),
        *("batch", "num_tokens", "num_heads", "head_channels", "dstate", "B_heads", "C_heads"),
        *("dt_softplus", "A_is_log"),
    ),
    "statescan_causal_conv1d_update": (
        *(f"{name}:statescan_tensor" for name in ("x", "out", "state", "start", "kept")),
        *("weight:statescan_tensor", "bias:statescan_tensor"),
        *("slots:statescan_slots", "workers:statescan_workers", "positions", "kept_stride"),
        *("batch", "num_tokens", "dim", "width", "state_len", "silu"),
    ),
    "statescan_vector_linear": (
        *(f"{name}:statescan_tensor" for name in ("x", "out", "bias")),
        *("weight:statescan_matrix", "workers:statescan_workers", "workspace", "batch", "rows"),
    ),
    "statescan_mamba_step": (
        *(f"{n}:statescan_tensor" for n in ("hidden", "out", "in_proj_bias", "out_proj_bias")),
        *(f"{n}:statescan_matrix" for n in ("in_proj", "x_proj", "dt_proj", "out_proj")),
        "conv:statescan_causal_conv1d_update",
        "state:statescan_selective_state_update",
        *("workers:statescan_workers", "workspace", "batch", "d_model", "dim"),
    ),
    "statescan_mamba_stack": (
        *(f"{name}:statescan_tensor" for name in ("hidden", "out", "norm", "final_norm")),
        *("step:statescan_mamba_step", "eps", "workspace", "num_layers"),
    ),
}
"""Fields of each struct in order; ``name:struct`` is a struct of its own inside."""


def words(field: str) -> int:
    """Number of 8-byte words of a field of ``STRUCTURES``."""
    _, _, inner = field.partition(":")
    return sum(map(words, STRUCTURES[inner])) if inner else 1


_PACKERS = {
    name: struct.Struct(f"@{sum(map(words, fields))}q") for name, fields in STRUCTURES.items()
}


def pack(name: str, *values: int | tuple[int, ...]) -> bytes:
    """``struct statescan_<name>`` from its fields in order."""
    flat: list[int] = []
    for value in values:
        if isinstance(value, tuple):
            flat.extend(value)
        else:
            flat.append(value)
    return _PACKERS[f"statescan_{name}"].pack(*flat)


def kernel(name: str) -> Callable[..., None]:
    """The exported function ``statescan_<name>``."""
    function: Callable[..., None] = getattr(native.require().handle, f"statescan_{name}")
    return function


def call(name: str, *values: int | tuple[int, ...]) -> None:
    """Run the kernel ``statescan_<name>``; ``values`` are the fields of its struct in order."""
    kernel(name)(pack(name, *values))


def address(tensor: Tensor | None) -> int:
    """Where a tensor's first element lies; 0 when it is not given."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(*tensors: Tensor | None) -> bytes:
    """The list of addresses that decode kernels take beside their struct; 0 for absent ones."""
    return address_list(tensors)(*[tensor for tensor in tensors if tensor is not None])


def address_list(tensors: Sequence[Tensor | None]) -> Callable[..., bytes]:
    """Makes such a list of the tensors that are given, where the same ones are absent."""
    absent = tuple([tensor is None for tensor in tensors])
    return _address_list(absent)


@lru_cache(maxsize=256)
def _address_list(absent: tuple[bool, ...]) -> Callable[..., bytes]:
    # Bytes of padding are zero, so an absent tensor costs nothing.
    pack = struct.Struct("@" + "".join("8x" if gone else "P" for gone in absent)).pack

    def listed(*tensors: Tensor) -> bytes:
        return pack(*map(_data_ptr, tensors))

    return listed


_data_ptr = Tensor.data_ptr


def words_of(packed: bytes) -> tuple[int, ...]:
    """A packed struct as the fields of one that contains it."""
    return struct.unpack(f"@{len(packed) // 8}q", packed)


def tensor3(tensor: Tensor | None) -> tuple[int, ...]:
    """``struct statescan_tensor`` of a (batch, dim, seqlen) tensor, any strides."""
    if tensor is None:
        return ABSENT
    return (tensor.data_ptr(), *tensor.stride(), DTYPES[tensor.dtype])


def dense(tensor: Tensor | None) -> Tensor | None:
    """The tensor as contiguous float32, copied only where it is not."""
    return None if tensor is None else tensor.to(torch.float32).contiguous()
