# SPDX-License-Identifier: Apache-2.0
"""The tests of ``tests/ops`` that take a backend, run on the kernels for GPUs.

Each makes its tensors on the CPU; here they travel to the GPU, strides, gaps and NaN included, and
the results travel back. A new test there is a test here.
"""

from __future__ import annotations

import pytest
import torch
from helpers.on_gpu import moved
from helpers.op_suite import adopt

from statescan import ops
from statescan.backends.base import ALL_OPS

LEFT_OUT = {
    "test_one_slot_for_two_rows_raises": "the values of indices are never looked at on a GPU",
    "test_wrong_slots_raise_before_anything_is_written": "nor are those of slots",
    "test_pools_of_the_wrong_size_raise": "nor are those of slots",
    "test_wrong_bounds_are_refused": "the values of bounds are never looked at on a GPU",
    "test_devices_must_agree": "it chooses the devices itself",
    "test_fake_tensors_and_mixed_devices": "it chooses the devices itself",
}
"""Tests of what only holds on the CPU, and why."""

pytestmark = pytest.mark.gpu
adopt(globals(), LEFT_OUT)
if not torch.cuda.is_available():
    # One remark instead of thousands.
    pytest.skip("no CUDA device: tests/ops on a GPU were not run", allow_module_level=True)


@pytest.fixture
def backend(monkeypatch):
    """The backend's name; while it is in use the public ops compute on the GPU."""
    for op in ALL_OPS:
        monkeypatch.setattr(ops, op, moved(getattr(ops, op)))
    return "cuda"
