# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the cpu backend's tests: vector levels, numbers of threads, memory between guards.

What a kernel computes is checked in the tests; nothing here knows an op.
"""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.fake_driver import compiler, gpu, stand_in, toy  # noqa: F401  (fixtures)
from helpers.plans import forget_plans
from helpers.simt import simulated, simulator  # noqa: F401

from statescan.backends import native

STATUS = native.status()
GUARD = 64


def levels():
    """The vector levels of this machine; use_isa answers with another one for those it lacks."""
    if STATUS.library is None:
        return [0]
    use_isa = STATUS.library.handle.statescan_use_isa
    found = [level for level in native.ISA_NAMES if use_isa(level) == level]
    use_isa(-1)
    return found


@pytest.fixture
def fresh_plans():
    """No plan from another test: plans hold scratch memory for one level and number of threads."""
    yield forget_plans()
    forget_plans()


@pytest.fixture(params=levels(), ids=lambda level: native.ISA_NAMES[level])
def level(request, fresh_plans):
    """Runs the test on each vector level; the machine's own comes back."""
    if STATUS.library is None:
        pytest.skip(f"the native library is not usable: {STATUS.reason}")
    use_isa = native.require().handle.statescan_use_isa
    assert use_isa(request.param) == request.param
    yield request.param
    use_isa(-1)


@pytest.fixture
def threads():
    """Set the number of threads; the old number comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def guarded(monkeypatch):
    """Memory that statescan asks for holds NaN at first and lies between guards that keep theirs.

    That is results, scratch memory of threads and workspaces alike, so a kernel that reads what
    it has not written, or writes beside what it was given, is found out.
    """
    parents = []

    def guard(function):
        def make(*args, **kwargs):
            tensor = function(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return place(tensor) if caller.partition(".")[0] == "statescan" else tensor

        return make

    def place(tensor):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        # All bits set is NaN in every floating dtype, whichever way the bytes are then read.
        parent = torch.full((extent * tensor.element_size() + 2 * GUARD,), 255, dtype=torch.uint8)
        parents.append(parent)
        values = parent[GUARD : GUARD + extent * tensor.element_size()].view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride())

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, guard(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, guard(getattr(torch.Tensor, name)))
    yield parents
    for parent in parents:
        assert bool((parent[:GUARD] == 255).all()), "something was written in front of its memory"
        assert bool((parent[-GUARD:] == 255).all()), "something was written behind its memory"
