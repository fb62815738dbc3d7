# SPDX-License-Identifier: Apache-2.0
"""``prepare``: loads the code that calls will run, before a place where nothing may be loaded.

It makes the call with stand-ins for the tensors; what a backend then does is up to the backend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from statescan.backends.base import ALL_OPS
from statescan.dispatch import all_backends
from statescan.errors import ArgumentError

_WITH_GRADIENT = frozenset(("selective_scan", "causal_conv1d", "mamba_inner"))
_FLOAT32 = frozenset(("A", "D", "dt_bias", "ssm_state", "initial_states"))
"""Arguments that models keep in float32 whatever the dtype of activations is."""

_INDEX_ENDINGS = ("_idx", "seqlens", "_indices", "accepted_tokens")
_ALIGNMENT = 16


def prepare(
    op: str | Callable[..., Any],
    *tensors: Any,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype = torch.float32,
    backward: bool = True,
    **options: Any,
) -> None:
    """Load all code that calls like this one run, and compute nothing.

    A CUDA graph cannot load code while it is captured; this does it before. Without it, run the op
    once before the capture. On backends that have nothing to load the call is simply made, with
    values of no meaning.

    Args:
        op: The public function, or its name.
        *tensors: The call's positional arguments. Tensors lend shape, strides, dtype and device
            and are neither read nor written; a tuple of sizes stands for a dense tensor.
        device: Where tensors given by their sizes lie; by default the first tensor's device, or
            CUDA's current one.
        dtype: Their dtype. A, D, dt_bias and scan states are float32 and indices int32 all the
            same, as they are in models.
        backward: Also what gradients need, for the ops that have them.
        **options: The call's keyword arguments, ``backend`` among them; tensors as above.

    Raises:
        ArgumentError: no op has that name, or the arguments are not the op's.
        BackendUnavailableError: the code cannot be loaded, or a capture is going on already.

    In place: nothing. Memory for one call is taken and given back.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in ALL_OPS:
        raise ArgumentError(
            f"prepare: {name!r} is not an op.\nIt must be one of: {', '.join(ALL_OPS)}.\n"
            "Pass the function itself or its name."
        )
    function = getattr(import_module(f"statescan.ops.{name}"), name)
    try:
        bound = inspect.signature(function).bind(*tensors, **options)
    except TypeError as error:
        raise ArgumentError(
            f"prepare: the arguments are not those of {name}: {error}.\n"
            f"They must be those of a call of statescan.{name}, or sizes for its tensors.\n"
            "Pass the tensors and options of the calls that you want prepared."
        ) from error
    place = _place(device, bound.arguments.values())
    with_gradient = backward and name in _WITH_GRADIENT
    for argument, value in bound.arguments.items():
        bound.arguments[argument] = _stand_in(argument, value, place, dtype, with_gradient)
    _call(function, bound, with_gradient)


def _call(function: Callable[..., Any], bound: inspect.BoundArguments, with_gradient: bool) -> None:
    with ExitStack() as stack:
        for backend in all_backends():
            if backend.availability().ok:
                stack.enter_context(backend.preparing())
        stack.enter_context(torch.inference_mode(False))
        with torch.no_grad():
            function(*bound.args, **bound.kwargs)
        if not with_gradient:
            return
        # On this thread, since the blocks above are this thread's.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            results = function(*bound.args, **bound.kwargs)
            outputs = [t for t in _flat(results) if t.requires_grad]
            inputs = [t for t in bound.arguments.values() if _wants_gradient(t)]
            grads = [torch.empty_like(output) for output in outputs]
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)


def _flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _place(device: torch.device | str | int | None, values: Iterable[Any]) -> torch.device:
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    for value in values:
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cuda")


def _stand_in(
    name: str, value: Any, device: torch.device, dtype: torch.dtype, with_gradient: bool
) -> Any:
    """An argument with the same look and none of the values."""
    if isinstance(value, Tensor):
        found = _like(value)
    elif isinstance(value, tuple | list) and all(isinstance(size, int) for size in value):
        index = name.endswith(_INDEX_ENDINGS)
        kind = torch.int32 if index else torch.float32 if name in _FLOAT32 else dtype
        found = torch.zeros(value, dtype=kind, device=device)
    else:
        return value
    return found.requires_grad_(with_gradient and found.is_floating_point())


def _like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and alignment; indices are 0, which is a valid one."""
    steps = zip(tensor.shape, tensor.stride())
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    shift = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
    memory = torch.zeros(extent + shift, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), shift)
