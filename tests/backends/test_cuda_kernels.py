# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels compute what they should, run on the CPU by ``helpers/simt.h``.

Every shipped case through the backend's own launchers: outputs, states and all gradients against
the float64 reference, in guarded memory, with threads and blocks in another order each launch. What
only a GPU can show (speed, streams, its approximations' last bits) is for tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
from helpers import simt

from statescan.testing import all_cases, assert_passed, run_case

pytestmark = pytest.mark.skipif(simt.COMPILER is None, reason="needs g++ or clang++")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REAL = [case for case in all_cases() if not case.has("complex")]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", REAL, ids=str)
def test_equals_the_float64_reference(case, dtype, simulated):
    assert_passed(run_case(case, dtype, "cpu", "cuda"), f"{case} in {dtype}")
    sizes = [case.sizes.get(axis, 1) for axis in ("batch", "dim", "seqlen")]
    assert bool(simulated.calls) == all(size > 0 for size in sizes)
