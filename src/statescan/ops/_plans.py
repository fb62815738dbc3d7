# SPDX-License-Identifier: Apache-2.0
"""The short road of decode steps: what was found out about one call serves all calls like it.

A decode loop makes the same call thousands of times with other numbers in it. Checking shapes,
asking for a backend and describing strides cost 20 times what the kernel takes, so a backend may
offer ``<op>_plan``, and a call of the same form then goes straight to it. Nothing is decided here:
a plan exists only after the long road has accepted such a call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from statescan import settings
from statescan.dispatch.select import forced_name

# Not exported by torch.autograd, whose own code asks it this way.
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled

Plan = Callable[[Sequence[Tensor | None]], None]

# Forms are few in a process; whoever makes thousands, with changing batch sizes, starts anew.
_MOST_PLANS = 256
_KINDS = frozenset((Tensor, Parameter))
_PLAIN = frozenset((bool, int, float, str, type(None)))


class _Plans(threading.local):
    """The plans of one thread: a plan's scratch memory must not serve two calls at once."""

    def __init__(self) -> None:
        self.found: dict[Any, Plan | None] = {}


_plans = _Plans()


def _forget_plans() -> None:
    _plans.found.clear()


if hasattr(os, "register_at_fork"):
    # A plan counts on threads that do not survive a fork; the long road finds out about that.
    os.register_at_fork(after_in_child=_forget_plans)


def find_plan(
    op: str, tensors: Sequence[Tensor | None], options: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, Plan | None]:
    """What such calls have in common, and their plan if there is one.

    (None, None) where only the long road is right: where torch watches (compilation, modes,
    transforms, a profiler, autograd), and for tensors that are not plain CPU ones.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _watched():
        return None, None
    # True equals 1 as a key, and an unhashable option would not be one.
    kinds = tuple([type(option) for option in options])
    if not _PLAIN.issuperset(kinds):
        return None, None
    parts: list[Any] = [op, kinds, options, forced_name(), settings.backend()]
    parts += [torch.get_num_threads(), torch.is_inference_mode_enabled()]
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
        elif _is_plain(tensor):
            parts += (tensor.dtype, tensor.shape, tensor.stride())
        else:
            return None, None
    key = tuple(parts)
    return key, _plans.found.get(key)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may read the memory of a tensor by its strides, as it lies there."""
    # A sparse tensor is a CPU tensor too, some kinds with strides and some that raise instead.
    return (
        type(tensor) in _KINDS
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def _watched() -> bool:
    """Whether anything wants to see the registered op being called."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _profiler_enabled()
    )


def run_plan(plan: Plan, tensors: Sequence[Tensor | None], written: Sequence[Tensor]) -> bool:
    """Run a plan, and tell autograd of the tensors that it writes.

    False, with nothing written, for tensors of inference mode outside of it: the long road says
    why nobody may change those.
    """
    for tensor in written:
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            return False
    plan(tensors)
    for tensor in written:
        # Kernels write through pointers, so autograd would not notice a saved tensor's change.
        if not tensor.is_inference():
            increment_version(tensor)
    return True


def keep_plan(key: tuple[Any, ...], make: Callable[[], Plan | None]) -> Plan | None:
    """Make a plan for such calls if that was not tried yet; None if their backend has none."""
    if key in _plans.found:
        return _plans.found[key]
    plan = make()
    if len(_plans.found) >= _MOST_PLANS:
        _plans.found.clear()
    _plans.found[key] = plan
    return plan
