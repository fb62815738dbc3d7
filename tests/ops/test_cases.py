# SPDX-License-Identifier: Apache-2.0
"""Every shipped case on every backend in every dtype: outputs, states and all gradients are right.

A new option of an op needs a row in ``statescan.testing.cases``, not a test here.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from statescan import ops
from statescan.dispatch import all_backends
from statescan.errors import BackendUnavailableError
from statescan.testing import OPS, all_cases, assert_passed, make, run_case

pytestmark = pytest.mark.usefixtures("nan_empty")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BACKENDS = tuple(backend.name for backend in all_backends())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_equals_the_float64_reference(case, backend, dtype):
    try:
        comparisons = run_case(case, dtype, backend=backend)
    except BackendUnavailableError as reason:
        pytest.skip(str(reason))
    assert_passed(comparisons, f"{case} on {backend} in {dtype}")


def test_every_option_of_every_op_has_a_case():
    """Each argument of each public function differs from its default in some case."""
    missing = []
    for op in OPS:
        calls = [make(case) for case in all_cases(op)]
        for name, parameter in inspect.signature(getattr(ops, op)).parameters.items():
            given = [call.get(name, parameter.default) for call in calls]
            if not any(isinstance(v, torch.Tensor) or v != parameter.default for v in given):
                missing.append((op, name))
    # Inputs are drawn for the usual eps; test_mamba_inner.py turns it.
    expected = [*((op, "backend") for op in OPS), ("mamba_inner", "norm_eps")]
    assert sorted(missing) == sorted(expected)
