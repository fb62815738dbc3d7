# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need a GPU: poisoned memory between guards, room for large tensors.

The root's conftest skips tests marked ``gpu`` where torch finds no CUDA device.
"""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from statescan.dispatch import backend_named

GUARD = 512
"""Bytes on either side: torch's own allocations are aligned to as much."""
GIB = 2**30


@pytest.fixture(autouse=True)
def usable(request):
    """Fails, not skips, where there is a GPU and the backend cannot run on it."""
    if request.node.get_closest_marker("gpu") is None:
        return
    available = backend_named("cuda").availability()
    assert available.ok, available.reason


@pytest.fixture
def room():
    """Asks for memory: skips where the GPU has less, and gives torch's cache back afterwards."""

    def ask(gib):
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        if free < gib * GIB:
            pytest.skip(
                f"needs {gib} GiB of GPU memory, {free / GIB:.0f} of {total / GIB:.0f} are free"
            )

    yield ask
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def guarded(monkeypatch):
    """Memory that statescan asks for holds NaN at first and lies between guards that keep theirs.

    So a kernel that reads what it has not written, or writes beside what it was given, is found.
    """
    parents = []

    def guard(function):
        def make(*args, **kwargs):
            tensor = function(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return place(tensor) if caller.partition(".")[0] == "statescan" else tensor

        return make

    def place(tensor):
        if tensor.device.type != "cuda":
            return tensor
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        bytes_ = extent * tensor.element_size()
        # All bits set is NaN in every floating dtype, whichever way the bytes are then read.
        parent = torch.full((bytes_ + 2 * GUARD,), 255, dtype=torch.uint8, device=tensor.device)
        parents.append(parent)
        values = parent[GUARD : GUARD + bytes_].view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride())

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, guard(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, guard(getattr(torch.Tensor, name)))
    yield parents
    for parent in parents:
        assert bool((parent[:GUARD] == 255).all()), "something was written in front of its memory"
        assert bool((parent[-GUARD:] == 255).all()), "something was written behind its memory"
