# SPDX-License-Identifier: Apache-2.0
"""The tests of ``tests/ops`` that take a backend, run on the kernels for GPUs.

Each makes its tensors on the CPU; here they travel to the GPU, strides, gaps and NaN included, and
the results travel back. A new test there is a test here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.on_gpu import moved

from statescan import ops
from statescan.backends.base import ALL_OPS

MODULES = (
    *("test_causal_conv1d", "test_causal_conv1d_update", "test_mamba_inner"),
    *("test_selective_scan", "test_selective_state_update", "test_fuzz", "test_surroundings"),
    *("test_faults_conv", "test_faults_decode", "test_faults_scan"),
)

LEFT_OUT = {
    "test_one_slot_for_two_rows_raises": "the values of indices are never looked at on a GPU",
    "test_wrong_slots_raise_before_anything_is_written": "nor are those of slots",
    "test_pools_of_the_wrong_size_raise": "nor are those of slots",
    "test_wrong_bounds_are_refused": "the values of bounds are never looked at on a GPU",
    "test_devices_must_agree": "it chooses the devices itself",
    "test_fake_tensors_and_mixed_devices": "it chooses the devices itself",
}
"""Tests of what only holds on the CPU, and why."""

for _module in MODULES:
    pytest.register_assert_rewrite(f"tests.ops.{_module}")


def _adopt() -> None:
    """Put those tests among this module's, with their module's name in front."""
    for module in MODULES:
        stem = module.removeprefix("test_")
        loaded = importlib.import_module(f"tests.ops.{module}")
        marks = getattr(loaded, "pytestmark", [])
        for name, function in vars(loaded).items():
            adopted = name.startswith("test_") and name not in LEFT_OUT
            if adopted and "backend" in inspect.signature(function).parameters:
                globals()[f"test_{stem}__{name.removeprefix('test_')}"] = _with(function, marks)


def _with(function: Callable[..., None], marks: Any) -> Callable[..., None]:
    """A copy with the marks of its module, so that the original keeps its own."""

    @functools.wraps(function)
    def test(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    test.pytestmark = [*getattr(function, "pytestmark", [])]
    for mark in marks if isinstance(marks, list) else [marks]:
        test = mark(test)
    return test


pytestmark = pytest.mark.gpu
_adopt()
if not torch.cuda.is_available():
    # One remark instead of thousands.
    pytest.skip("no CUDA device: tests/ops on a GPU were not run", allow_module_level=True)


@pytest.fixture
def backend(monkeypatch):
    """The backend's name; while it is in use the public ops compute on the GPU."""
    for op in ALL_OPS:
        monkeypatch.setattr(ops, op, moved(getattr(ops, op)))
    return "cuda"
