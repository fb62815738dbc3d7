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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from statescan import settings
from statescan.dispatch.select import forced_name

# Not exported by torch.autograd, whose own code asks it this way.
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled

# Dynamo's check whether tensors are of the kinds, dtypes, devices, shapes and strides of others,
# in one call (1.1 us for nine tensors, where asking each takes 7). Where a torch has it no longer,
# plans are looked up by the long key alone.
_Guards: Callable[..., Any] | None = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)

Plan = Callable[[Sequence[Tensor]], None]

# Forms are few in a process; whoever makes thousands, with changing batch sizes, starts anew.
_MOST_PLANS = 256
_KINDS = frozenset((Tensor, Parameter))
_PLAIN = frozenset((bool, int, float, str, type(None)))


class _Recent(NamedTuple):
    """An op's last planned call: decode loops repeat it, so it is compared before the long key.

    Attributes:
        twins: Places of tensors that are one: the guards take each tensor once, and say no to a
            call in which others are.
    """

    surroundings: tuple[Any, ...]
    check: Callable[..., bool]
    twins: tuple[tuple[int, int], ...]
    key: tuple[Any, ...]
    plan: Plan

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are of the kinds and forms of the last call's."""
        if not self.twins:
            return self.check(*tensors)
        later = {place for _, place in self.twins}
        once = [tensor for place, tensor in enumerate(tensors) if place not in later]
        # Fewer tensors than places: another call than this one.
        same = all(b < len(tensors) and tensors[a] is tensors[b] for a, b in self.twins)
        return same and self.check(*once)


class _Plans(threading.local):
    """The plans of one thread: a plan's scratch memory must not serve two calls at once."""

    def __init__(self) -> None:
        self.found: dict[Any, Plan | None] = {}
        self.recent: dict[str, _Recent] = {}

    def forget(self) -> None:
        """Start anew."""
        self.found.clear()
        self.recent.clear()


_plans = _Plans()

if hasattr(os, "register_at_fork"):
    # A plan counts on threads that do not survive a fork; the long road finds out about that.
    os.register_at_fork(after_in_child=lambda: _plans.forget())


def find_plan(
    op: str, tensors: Sequence[Tensor], options: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, Plan | None]:
    """What such calls have in common, and their plan if there is one.

    ``tensors`` are those that are given; which ones are not must show in ``options``.

    (None, None) where only the long road is right: where torch watches (compilation, modes,
    transforms, a profiler, autograd), and for tensors that are not plain ones.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _watched():
        return None, None
    # True equals 1 as a key, and an unhashable option would not be one.
    kinds = tuple(map(type, options))
    if not _PLAIN.issuperset(kinds):
        return None, None
    surroundings = (
        *(kinds, options, forced_name(), settings.backend()),
        *(torch.get_num_threads(), torch.is_inference_mode_enabled()),
    )
    recent = _plans.recent.get(op)
    if recent is not None and recent.surroundings == surroundings:
        try:
            if recent.fits(tensors):
                return recent.key, recent.plan
        except TypeError:
            # Something is no tensor: the long road says what.
            return None, None
    parts: list[Any] = [op, *surroundings]
    for tensor in tensors:
        if not _is_plain(tensor):
            return None, None
        parts += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())
    key = tuple(parts)
    plan = _plans.found.get(key)
    if plan is not None and _Guards is not None:
        first = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
        places = enumerate(map(id, tensors))
        twins = tuple((first[number], place) for place, number in places if first[number] != place)
        once = [tensors[place] for place in sorted(first.values())]
        guards = _Guards(
            *once,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in once],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in once],
        )
        _plans.recent[op] = _Recent(surroundings, guards.check, twins, key, plan)
    return key, plan


def _is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may read the memory of a tensor by its strides, as it lies there."""
    # A sparse tensor is a CPU tensor too, some kinds with strides and some that raise instead.
    return (
        type(tensor) in _KINDS
        and (tensor.is_cpu or tensor.is_cuda)
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


def run_plan(plan: Plan, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
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
        _plans.forget()
    _plans.found[key] = plan
    return plan
