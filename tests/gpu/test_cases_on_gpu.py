# SPDX-License-Identifier: Apache-2.0
"""Every shipped case on the kernels for GPUs: outputs, states and all gradients are right.

With memory that is NaN at first and guarded on both sides, and again as the GPU's memory comes.
"""

from __future__ import annotations

import pytest
import torch

from statescan import ops
from statescan.errors import BackendUnavailableError
from statescan.testing import OPS, all_cases, assert_passed, make, run_case

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REAL = [case for case in all_cases() if not case.has("complex")]
COMPLEX = [case for case in all_cases() if case.has("complex")]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", REAL, ids=str)
def test_equals_the_float64_reference(case, dtype):
    assert_passed(run_case(case, dtype, "cuda", "cuda"), f"{case} in {dtype}")


@pytest.mark.parametrize("case", REAL, ids=str)
def test_other_numbers(case):
    """Another seed, and memory that torch gives out again."""
    assert_passed(run_case(case, torch.bfloat16, "cuda", "cuda", seed=1), str(case))


@pytest.mark.parametrize("case", COMPLEX, ids=str)
def test_complex_states_are_refused_and_auto_finds_another(case):
    with pytest.raises(BackendUnavailableError, match="complex"):
        run_case(case, torch.float32, "cuda", "cuda")
    assert_passed(run_case(case, torch.float32, "cuda", "auto"), str(case))


@pytest.mark.parametrize("op", ["selective_scan", "causal_conv1d", "selective_state_update"])
def test_float64_is_refused_and_auto_finds_another(op):
    case = next(case for case in REAL if case.op == op)
    with pytest.raises(BackendUnavailableError, match="float64"):
        run_case(case, torch.float64, "cuda", "cuda")
    assert_passed(run_case(case, torch.float64, "cuda", "auto"), str(case))


@pytest.mark.parametrize("op", OPS)
def test_it_is_chosen_for_cuda_tensors_and_for_no_others(op):
    case = next(case for case in REAL if case.op == op)
    assert ops.explain(op, **make(case, torch.bfloat16, "cuda")).chosen == "cuda"
    assert ops.explain(op, **make(case, torch.float64, "cuda")).chosen == "torch"
    assert ops.explain(op, **make(case, torch.bfloat16, "cpu")).chosen != "cuda"
