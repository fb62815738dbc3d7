# SPDX-License-Identifier: Apache-2.0
"""Checks tensors against shapes written in words, once a call, in the public functions.

Only integer comparisons happen on the good path, so that Dynamo can trace it; the message is
built after a failure. Values of index tensors are checked in ``_values.py``, behind the op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from statescan.errors import ArgumentError, DeviceError, DtypeError, ShapeError

REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPLEX_DTYPES = (torch.complex64, torch.complex128)
INDEX_DTYPES = (torch.int32, torch.int64)

REQUIRED = frozenset(
    (
        *("x", "dt", "A", "B", "C", "weight", "ssm_state", "conv_state"),
        *("xz", "conv_weight", "x_proj_weight", "dt_proj_weight"),
    )
)
"""Arguments that no op can do without, but for B and C of mamba_inner."""

Pattern = tuple[str, ...]


def pattern(words: str) -> Pattern:
    """ "batch dim seqlen" as a tuple; made once, at import."""
    return tuple(words.split())


def bind(
    op: str,
    patterns: Mapping[str, Pattern],
    tensors: Mapping[str, Tensor | None],
    dims: Mapping[str, int] | None = None,
    like: Tensor | None = None,
) -> dict[str, int]:
    """Match every given tensor with its pattern and return the size of each named axis.

    Args:
        op: Name of the public function, for messages.
        patterns: Axis names of each argument; the first argument to show an axis sets its size.
        tensors: The arguments; None means not given.
        dims: Sizes known beforehand, such as ``{"num_seqs": 3}``; left unchanged.
        like: The tensor whose device all must share; default the first of ``patterns``.

    Raises:
        DtypeError: an argument is no tensor.
        ArgumentError: the first argument is sparse or nested.
        ShapeError: a rank or a size does not fit.
        DeviceError: two tensors lie on different devices.
    """
    sizes = {} if dims is None else dict(dims)
    first = next(iter(patterns))
    home = tensors[first] if like is None else like
    if isinstance(home, Tensor) and (home.is_nested or home.layout != torch.strided):
        _fail_layout(op, first, home)
    for name, axes in patterns.items():
        tensor = tensors[name]
        if tensor is None and _may_be_absent(name, patterns):
            continue
        if not isinstance(tensor, Tensor):
            _fail_type(op, name, tensor)
        shape = tensor.shape
        if len(shape) != len(axes):
            _fail_shape(op, name, patterns, tensors, sizes, dims)
        for axis, size in zip(axes, shape):
            if axis not in sizes:
                sizes[axis] = size
            elif sizes[axis] != size:
                _fail_shape(op, name, patterns, tensors, sizes, dims)
        if home is not None and tensor.device != home.device:
            _fail_device(op, name, tensor, home)
    return sizes


def _may_be_absent(name: str, patterns: Mapping[str, Pattern]) -> bool:
    """mamba_inner projects B and C itself when they are not given."""
    return name not in REQUIRED or (name in ("B", "C") and "xz" in patterns)


def check_real(op: str, tensors: Mapping[str, Tensor | None], names: tuple[str, ...]) -> None:
    """Refuse any of the named tensors whose dtype is not a real floating-point one."""
    for name in names:
        tensor = tensors[name]
        if tensor is not None and tensor.dtype not in REAL_DTYPES:
            fail_dtype(op, name, tensor, "float32, bfloat16, float16 or float64")


def check_one_kind(op: str, tensors: Mapping[str, Tensor | None], names: tuple[str, ...]) -> None:
    """Refuse a mix of real and complex among the named tensors; the first one decides."""
    leader = tensors[names[0]]
    is_complex = leader is not None and leader.dtype in COMPLEX_DTYPES
    allowed = COMPLEX_DTYPES if is_complex else REAL_DTYPES
    for name in names:
        tensor = tensors[name]
        if tensor is None or tensor.dtype in allowed:
            continue
        needed = "complex64 or complex128" if is_complex else "a real floating-point dtype"
        state = "is" if is_complex else "is not"
        fail_dtype(op, name, tensor, f"{needed}, since {names[0]} {state} complex")


def check_index(op: str, tensors: Mapping[str, Tensor | None], names: tuple[str, ...]) -> None:
    """Refuse any of the named tensors whose dtype is not int32 or int64."""
    for name in names:
        tensor = tensors[name]
        if tensor is not None and tensor.dtype not in INDEX_DTYPES:
            fail_dtype(op, name, tensor, "int32 or int64")


def check_activation(op: str, activation: str | None) -> bool:
    """True for "silu" or "swish", False for None; anything else is refused."""
    if activation is None:
        return False
    if activation == "silu" or activation == "swish":
        return True
    raise ArgumentError(
        f"{op}: argument 'activation' is {activation!r}.\n"
        "It must be None, 'silu' or 'swish' (the same function).\n"
        "Pass None and apply any other activation to the result."
    )


def check_flag(op: str, name: str, value: bool) -> bool:
    """The flag itself; anything but True or False is refused, since "false" would count as true."""
    if isinstance(value, bool):
        return value
    raise DtypeError(
        f"{op}: argument '{name}' is {_shown(value)}.\n"
        "It must be True or False.\n"
        f"Pass {name}=True or {name}=False, or leave it out."
    )


def check_number(op: str, name: str, value: float) -> float:
    """The number as a float; what is no number, negative or NaN is refused."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value >= 0:
            return float(value)
        raise ArgumentError(
            f"{op}: argument '{name}' is {value}.\nIt must be at least 0.\n"
            f"Pass a small positive number, or leave '{name}' out."
        )
    raise DtypeError(
        f"{op}: argument '{name}' is {_shown(value)}.\nIt must be a Python number.\n"
        f"Pass float({name}), or leave it out."
    )


def check_integer(op: str, name: str, value: int) -> int:
    """The integer itself; what is none, or has no place in 64 bits, is refused."""
    if isinstance(value, int) and not isinstance(value, bool):
        if -(2**63) <= value < 2**63:
            return value
        raise ArgumentError(
            f"{op}: argument '{name}' is {value}.\nIt must fit into 64 bits.\n"
            f"Pass a smaller number, or leave '{name}' out."
        )
    raise DtypeError(
        f"{op}: argument '{name}' is {_shown(value)}.\nIt must be a Python integer.\n"
        f"Pass int({name}), or leave it out."
    )


def _shown(value: object) -> str:
    """A value of the wrong type, cut where it is long, with its type."""
    # Dynamo traces numbers as symbols, which have no text.
    symbolic = isinstance(value, (int, float)) and torch.compiler.is_compiling()
    if symbolic or isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def check_positive(op: str, name: str, axis: str, size: int) -> None:
    """Refuse an axis of size 0 where the op has no meaning without it."""
    if size < 1:
        raise ShapeError(
            f"{op}: argument '{name}' has {axis} {size}.\n"
            f"Its {axis} must be at least 1.\n"
            f"Give a '{name}' that is not empty along {axis}."
        )


def check_backend(op: str, backend: str) -> None:
    """Refuse a ``backend`` that is no text; whether there is one of that name dispatch asks."""
    if not isinstance(backend, str):
        raise ArgumentError(
            f"{op}: argument 'backend' is {_shown(backend)}.\n"
            "It must be a name such as 'auto' or 'torch'.\n"
            "`statescan backends` lists the names."
        )


def _fail_layout(op: str, name: str, tensor: Tensor) -> NoReturn:
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    raise ArgumentError(
        f"{op}: argument '{name}' is a {kind} tensor.\n"
        "It must be a dense one, of any strides.\n"
        "Convert it first: to_dense() for sparse tensors; for sequences of unequal lengths lay\n"
        "them one behind the other and pass cu_seqlens."
    )


def _fail_type(op: str, name: str, value: object) -> NoReturn:
    raise DtypeError(
        f"{op}: argument '{name}' is a {type(value).__name__}.\n"
        "It must be a torch.Tensor.\n"
        f"Convert it first, for example with torch.as_tensor({name})."
    )


def fail_dtype(op: str, name: str, tensor: Tensor, needed: str) -> NoReturn:
    """Raise the error for a tensor of a dtype that the op does not take."""
    raise DtypeError(
        f"{op}: argument '{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}.\n"
        f"It must be {needed}.\n"
        f"Convert it first, for example with {name}.to(...)."
    )


def _fail_device(op: str, name: str, tensor: Tensor, home: Tensor) -> NoReturn:
    raise DeviceError(
        f"{op}: argument '{name}' is on {tensor.device} and the others are on {home.device}.\n"
        "All tensors of a call must be on one device.\n"
        f"Move it with {name}.to('{home.device}')."
    )


def _origin(
    axis: str, upto: str, patterns: Mapping[str, Pattern], tensors: Mapping[str, Tensor | None]
) -> str:
    """The argument that set the size of ``axis``, or "" when it was known beforehand."""
    for name, axes in patterns.items():
        if name == upto:
            return ""
        if tensors[name] is not None and axis in axes:
            return name
    return ""


def _fail_shape(
    op: str,
    name: str,
    patterns: Mapping[str, Pattern],
    tensors: Mapping[str, Tensor | None],
    sizes: Mapping[str, int],
    preset: Mapping[str, int] | None,
) -> NoReturn:
    """Build the message: what was given, what is needed and whence, what to do."""
    tensor = tensors[name]
    shape = tuple(tensor.shape) if tensor is not None else ()
    axes = patterns[name]
    origins = {axis: _origin(axis, name, patterns, tensors) for axis in axes}
    known = {axis: sizes[axis] for axis in axes if origins[axis] or axis in (preset or {})}
    needed = ", ".join(f"{axis}={known[axis]}" if axis in known else axis for axis in axes)
    sources = sorted({origin for origin in origins.values() if origin})
    whence = f"; the sizes come from {', '.join(repr(s) for s in sources)}" if sources else ""
    raise ShapeError(
        f"{op}: argument '{name}' has shape {shape}.\n"
        f"It must be ({needed}){whence}.\n"
        f"{_advice(name, shape, axes)}"
    )


def _advice(name: str, shape: tuple[int, ...], axes: Pattern) -> str:
    """What to do about a wrong shape, with the hint for the mistakes that people make most."""
    if name.endswith("weight") and len(shape) == 3 and len(axes) == 2 and shape[1] == 1:
        return f"A torch.nn.Conv1d weight is (dim, 1, width): pass {name}.squeeze(1)."
    if len(shape) == len(axes) + 1:
        return f"'{name}' has one axis too many: squeeze or index it away."
    if len(shape) == len(axes) - 1:
        return f"'{name}' lacks an axis: add it with unsqueeze."
    if len(shape) == len(axes):
        return f"Check the order of its axes and that '{name}' belongs to this call."
    return f"Reshape '{name}' to {len(axes)} axes."
