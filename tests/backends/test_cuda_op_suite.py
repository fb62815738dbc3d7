# SPDX-License-Identifier: Apache-2.0
"""The tests of ``tests/ops`` that take a backend, run on the CUDA kernels in ``helpers/simt.h``."""

from __future__ import annotations

import pytest
from helpers import simt
from helpers.on_gpu import moved
from helpers.op_suite import adopt

from statescan import ops
from statescan.backends.base import ALL_OPS

LEFT_OUT = {}
"""Tests that do not hold there, and why."""

pytestmark = pytest.mark.skipif(simt.COMPILER is None, reason="needs g++ or clang++")
adopt(globals(), LEFT_OUT)


@pytest.fixture
def backend(simulated, monkeypatch):
    """The backend's name; calls that its kernels are not meant for skip, with the reason."""
    for op in ALL_OPS:
        monkeypatch.setattr(ops, op, moved(getattr(ops, op), "cpu"))
    return "cuda"
