# SPDX-License-Identifier: Apache-2.0
"""The tests of ``tests/ops`` that take a backend, for another module to run on other kernels.

Each makes its tensors on the CPU; the module that adopts them has a ``backend`` fixture which sees
to where they go. A new test in ``tests/ops`` is then a test there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import pytest

MODULES = (
    *("test_causal_conv1d", "test_causal_conv1d_update", "test_mamba_inner"),
    *("test_selective_scan", "test_selective_state_update", "test_fuzz", "test_surroundings"),
    *("test_faults_conv", "test_faults_decode", "test_faults_scan"),
)

for _module in MODULES:
    pytest.register_assert_rewrite(f"tests.ops.{_module}")


def adopt(names: dict[str, Any], left_out: Collection[str]) -> None:
    """Put those tests among a module's names, each with its own module's name in front.

    Args:
        names: ``globals()`` of the module.
        left_out: Tests that do not hold there.
    """
    for module in MODULES:
        stem = module.removeprefix("test_")
        loaded = importlib.import_module(f"tests.ops.{module}")
        marks = getattr(loaded, "pytestmark", [])
        for name, function in vars(loaded).items():
            adopted = name.startswith("test_") and name not in left_out
            if adopted and "backend" in inspect.signature(function).parameters:
                names[f"test_{stem}__{name.removeprefix('test_')}"] = _with(function, marks)


def _with(function: Callable[..., None], marks: Any) -> Callable[..., None]:
    """A copy with the marks of its module, so that the original keeps its own."""

    @functools.wraps(function)
    def test(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    test.pytestmark = [*getattr(function, "pytestmark", [])]
    for mark in marks if isinstance(marks, list) else [marks]:
        test = mark(test)
    return test
