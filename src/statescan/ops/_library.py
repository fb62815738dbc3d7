# SPDX-License-Identifier: Apache-2.0
"""The one torch.library.Library of statescan and the small torch-version differences around it.

No op is described here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from statescan.errors import GradientError

LIBRARY = torch.library.Library("statescan", "DEF")

# Backends read strides, so inductor must keep those that were traced; the exact form of the tag
# is younger than torch 2.4, whose "fixed order" was its only form.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_TAGS = (torch.Tag.pt2_compliant_tag, _STRIDES)


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context manager: ops skip their autograd kernel, which costs more than the rest of a call."""


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    vmap: Callable[..., Any],
    differentiable: Callable[..., Any] | None = None,
) -> Any:
    """Define one op and return its default overload.

    Args:
        schema: "name(arguments) -> results", without the namespace.
        run: The implementation for every device: the op must reach dispatch everywhere.
        fake: The results' shapes, dtypes and strides, without values.
        vmap: (info, in_dims, *args) -> (results, out_dims), the rule of torch.vmap.
        differentiable: What runs in its place where autograd may be recording.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, _without_autocast(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"statescan::{name}", fake, lib=LIBRARY)
    if hasattr(torch.library, "register_vmap"):
        # Needed inside torch.compile only, where torch 2.4 falls back on a rule of its own.
        torch.library.register_vmap(f"statescan::{name}", vmap, lib=LIBRARY)
    if differentiable is not None:
        LIBRARY.impl(name, differentiable, "Autograd")
    return getattr(torch.ops.statescan, name).default


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with autocast off: the ops choose their own dtypes, also for what they call."""

    def wrapped(*args: Any) -> Any:
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):
            return run(*args)
        with torch.autocast(device, enabled=False):
            return run(*args)

    return wrapped


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


# Younger than torch 2.4, where an export in strict mode is then traced like a compilation.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def forward_mode_active() -> bool:
    """Whether a forward-mode level is open (one integer comparison)."""
    return forward_ad._current_level >= 0


def transforms_active() -> bool:
    """Whether the call happens inside torch.func (grad, vmap, vjp, ...)."""
    return bool(torch._C._are_functorch_transforms_active())


def refuse_forward_mode(op: str, inputs: Sequence[Any]) -> None:
    """Raise if any input carries a tangent, which the op would drop without a word."""
    for tensor in inputs:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            fail_forward_mode(op)


def fail_forward_mode(op: str) -> NoReturn:
    """Raise the error for a call in forward mode."""
    raise GradientError(
        f"{op}: an input carries a forward-mode tangent (jvp, jacfwd, hessian, forward_ad).\n"
        "This op has reverse-mode gradients only.\n"
        f"Use reverse mode (jacrev, grad), or call statescan.reference.{op}_ref."
    )


def fail_traced_transform(op: str) -> NoReturn:
    """Raise the error for torch.func.grad around the registered op instead of the function."""
    raise GradientError(
        f"{op}: torch.func differentiates it inside torch.compile or an exported program.\n"
        "These transforms need the public function, called eagerly.\n"
        "Leave torch.compile out, or differentiate with torch.autograd instead."
    )


def map_over(
    apply: Callable[..., tuple[Tensor, ...]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """vmap rule of an op: one call for each mapped element, the results stacked in front."""
    rows = []
    for index in range(max(size, 1)):
        picked = [
            a if d is None else a.select(d, index) if size else a.new_zeros(_without(a, d))
            for a, d in zip(args, in_dims, strict=True)
        ]
        rows.append(apply(*picked))
    stacked = tuple(torch.stack(column)[:size] for column in zip(*rows, strict=True))
    return stacked, (0,) * len(stacked)


def _without(tensor: Tensor, axis: int) -> list[int]:
    sizes = list(tensor.shape)
    del sizes[axis]
    return sizes


def named(name: str, function: type[Function]) -> Any:
    """The autograd function under a name that profilers and ``grad_fn`` show."""
    return type(name, (function,), {})
