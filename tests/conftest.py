# SPDX-License-Identifier: Apache-2.0
"""Fixtures and rules for the whole suite: fixed seeds, poisoned memory, no file left uncollected.

Fixtures that only one folder needs belong in that folder's conftest.
"""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo import trace_rules

TESTS = Path(__file__).resolve().parent
HELPERS = TESTS / "helpers"

# Test files say `from helpers.<module> import ...`; processes that a test spawns import the test's
# own file by its full name, tests.<folder>.<module>.
sys.path.insert(0, str(TESTS))
sys.path.append(str(TESTS.parent))


def pytest_configure(config):
    """A shell starts background jobs with SIGINT ignored, and children inherit that: undo it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def nan_empty(monkeypatch):
    """Memory that statescan asks for uninitialised holds NaN (integers: their least value)."""
    # Dynamo lists torch's functions once in a process; it must not list the poisoned ones.
    trace_rules.get_torch_obj_rule_map()

    def poison(function):
        def poisoned(*args, **kwargs):
            tensor = function(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return fill(tensor) if caller.partition(".")[0] == "statescan" else tensor

        return poisoned

    def fill(tensor):
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.fill_(math.nan)
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).min)

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poison(getattr(torch.Tensor, name)))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device (docs/measured-facts.md says where and when these last passed)")


_skipped_files: set[str] = set()


def pytest_collectreport(report):
    if report.skipped:
        _skipped_files.add(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, config, items):
    """When the whole suite is collected, every Python file of it must have brought a test.

    A file named wrongly, or whose tests are named wrongly, would otherwise pass for ever.
    """
    whole = [Path(argument).resolve() for argument in config.args] == [TESTS]
    restricted = any(config.getoption(name, None) for name in ("ignore", "ignore_glob", "lf"))
    if not whole or restricted or session.testsfailed:
        return
    collected = {item.path for item in items}
    forgotten = sorted(
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if path.name != "conftest.py"
        and HELPERS not in path.parents
        and path not in collected
        and path.relative_to(config.rootpath).as_posix() not in _skipped_files
    )
    if forgotten:
        raise pytest.UsageError(
            f"no test was collected from {', '.join(forgotten)}: "
            "name files test_*.py and functions test_*, or move helpers to tests/helpers"
        )
