# SPDX-License-Identifier: Apache-2.0
"""The error metric, and what a failed comparison says."""

import math

import pytest
import torch

from statescan.testing import assert_close, error
from statescan.testing.compare import compare, identical

EXACT = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)


def test_error_is_the_larger_of_norm_and_maximum():
    result = EXACT.clone()
    result[0, 0] += 1
    # Norm: 1 / 5. Maximum: 1 / 4.
    assert error(result, EXACT) == 0.25
    spread = EXACT + 1
    # Norm: 2 / 5. Maximum: 1 / 4.
    assert error(spread, EXACT) == pytest.approx(0.4)


def test_error_is_absolute_where_the_truth_is_zero():
    zero = torch.zeros(3)
    assert error(zero, zero) == 0
    assert error(torch.tensor([0.0, 0.5, 0.0]), zero) == 0.5


def test_error_of_empty_tensors_is_zero():
    assert error(torch.ones(0, 3), torch.ones(0, 3)) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_must_be_in_both(value):
    odd = EXACT.clone()
    odd[1, 0] = value
    assert error(odd, EXACT) == math.inf
    assert error(EXACT, odd) == math.inf
    assert error(odd, odd) == 0


def test_complex_values_are_compared_by_magnitude():
    exact = torch.tensor([3 + 4j])
    assert error(exact + 5j, exact) == pytest.approx(1.0)


def test_failure_names_the_worst_element_and_both_values():
    result = EXACT.clone().float()
    result[1, 0] = 0.5
    result[0, 1] = math.nan
    with pytest.raises(AssertionError) as raised:
        assert_close(result, EXACT, 1e-3, "dx")
    assert str(raised.value) == (
        "dx: error inf > 0.001; worst at (0, 1): got nan, expected 0.0; 1 of 4 are NaN"
    )


def test_shapes_must_agree():
    item = compare("out", torch.ones(2, 1), torch.ones(2), 1.0)
    assert not item.passed
    assert item.detail == "got shape (2, 1), expected (2,)"


def test_identical_compares_bits_of_numbers_and_nan():
    assert identical("x", torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])).passed
    assert not identical("x", torch.tensor([1.0]), torch.tensor([1.0 + 1e-7])).passed
