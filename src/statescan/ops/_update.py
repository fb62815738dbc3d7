# SPDX-License-Identifier: Apache-2.0
"""What the two decode ops share: registration of an op that writes in place, and its refusals.

The ops return nothing and alias nothing; what they compute is in ``ops/<op>.py`` and backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from statescan.backends.base import OpRequest
from statescan.dispatch import select
from statescan.errors import ArgumentError, GradientError, ShapeError
from statescan.ops._library import (
    define,
    dtype_name,
    forward_mode_active,
    refuse_forward_mode,
    transforms_active,
)
from statescan.ops._plans import Plan
from statescan.ops._shapes import REQUIRED


def register_update(
    name: str,
    schema: str,
    request: Callable[[Sequence[Any]], OpRequest],
    check_values: Callable[[Sequence[Any]], None],
) -> tuple[Any, Callable[[Sequence[Any]], Plan | None]]:
    """Register ``statescan::<name>``, which writes its ``!`` arguments and returns nothing.

    Returns the op, and a function that makes a plan (``_plans.py``) for calls like one.

    Args:
        name: Name of the op.
        schema: Its schema; the last argument is ``str backend``.
        request: arguments -> the call without its tensors.
        check_values: arguments -> None; reads index values, raises before any write.
    """

    def run(*args: Any) -> None:
        check_values(args)
        chosen = select(args[-1], request(args))
        chosen.function(name, "")(*args[:-1])
        for index in written:
            # Kernels write through pointers, so autograd would not notice a saved tensor's change.
            if args[index] is not None and not args[index].is_inference():
                increment_version(args[index])

    def fake(*args: Any) -> None:
        return None

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> NoReturn:
        fail_transformed(name)

    def plan(args: Sequence[Any]) -> Plan | None:
        if any(size == 0 for tensor in args[:2] for size in tensor.shape):
            return None
        make = select(args[-1], request(args)).plan(name)
        found: Plan | None = None if make is None else make(*args[:-1])
        return found

    overload = define(schema, run, fake, vmap)
    arguments = enumerate(overload._schema.arguments)
    written = [i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return overload, plan


def update_request(
    op: str,
    named: Mapping[str, Tensor | None],
    dims: dict[str, int],
    options: Mapping[str, bool],
) -> OpRequest:
    """OpRequest of a decode op; optional tensors that are given and options in use are flags."""
    dtypes, device = {}, "cpu"
    flags = {name for name, used in options.items() if used}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if name not in REQUIRED:
            flags.add(name)
        if tensor.is_floating_point() or tensor.is_complex():
            dtypes[name] = dtype_name(tensor.dtype)
            device = tensor.device.type
            if tensor.is_complex():
                flags.add("complex")
    return OpRequest(op, device, dtypes, dims, frozenset(flags))


def refuse_gradients(op: str, tensors: Sequence[Tensor | None]) -> None:
    """Decode steps change states in place: refuse autograd and torch.func, rather than cut them."""
    if not torch.compiler.is_compiling():
        if transforms_active():
            fail_transformed(op)
        if forward_mode_active():
            refuse_forward_mode(op, tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise GradientError(
            f"{op}: an input requires grad, and a decode step has no gradient.\n"
            "It must run without autograd.\n"
            "Wrap the call in torch.no_grad(), or use the op over a sequence with initial_states."
        )


def fail_transformed(op: str) -> NoReturn:
    """Raise the error for a decode step inside torch.func."""
    raise GradientError(
        f"{op}: called inside a torch.func transform (vmap, grad, jvp).\n"
        "It writes its state in place, which the transforms cannot follow.\n"
        "Give the mapped axis as batch instead: each row has a state of its own."
    )


def check_rollback(op: str, num_accepted_tokens: Any, intermediate_states: Any) -> None:
    """num_accepted_tokens means something only beside the states it picks from."""
    if num_accepted_tokens is not None and intermediate_states is None:
        raise ArgumentError(
            f"{op}: argument 'num_accepted_tokens' is given without 'intermediate_states'.\n"
            "It picks the starting state from what the previous call wrote there.\n"
            "Pass the same intermediate_states tensor in every speculative call."
        )


def check_writable(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse to write what must not be: elements that share memory, frozen inference tensors."""
    outside = not torch.is_inference_mode_enabled()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if outside and tensor.is_inference():
            # torch would refuse too, but after other arguments have been written.
            raise ArgumentError(
                f"{op}: argument '{name}' was made in torch.inference_mode, and this call is not.\n"
                "Such tensors may be changed inside inference_mode only.\n"
                f"Call this inside torch.inference_mode too, or pass {name}.clone()."
            )
        if 0 not in tensor.stride():
            continue
        sizes = zip(tensor.shape, tensor.stride())
        if tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in sizes):
            raise ArgumentError(
                f"{op}: argument '{name}' is an expanded view with strides {tensor.stride()}.\n"
                "It is written in place, so each of its elements needs memory of its own.\n"
                f"Pass {name}.clone(memory_format=torch.contiguous_format)."
            )


def check_rows(
    op: str, state: str, indices: str, batch: int, num_slots: int, indexed: bool
) -> None:
    """Without indices row b uses slot b, so there must be as many slots as rows."""
    if not indexed and num_slots != batch:
        raise ShapeError(
            f"{op}: argument '{state}' has {num_slots} slots for batch {batch}.\n"
            f"Without '{indices}' row b uses slot b, so their numbers must be equal.\n"
            f"Pass '{indices}', (batch,), to choose slots from a larger pool."
        )
