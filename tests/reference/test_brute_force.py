# SPDX-License-Identifier: Apache-2.0
"""Every case of every op: the float64 reference equals an independent NumPy calculation."""

import pytest
import torch
from helpers import brute_force

from statescan import reference
from statescan.testing import all_cases, assert_close, in_double, make

EXACT = 1e-12


def numbers(kwargs):
    """Copies of the arguments as NumPy arrays in double precision."""
    return {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in in_double(kwargs).items()
    }


def cases(op):
    return pytest.mark.parametrize("case", all_cases(op), ids=lambda case: case.name)


@cases("selective_scan")
def test_selective_scan(case):
    kwargs = make(case, torch.float64) | {"return_final_states": True}
    results = reference.selective_scan_ref(**kwargs)
    expected = brute_force.scan(**numbers(kwargs))
    for name, result, exact in zip(("out", "final_states"), results, expected, strict=True):
        assert_close(result, torch.from_numpy(exact), EXACT, name)


@cases("causal_conv1d")
def test_causal_conv1d(case):
    kwargs = make(case, torch.float64) | {"return_final_states": True}
    results = reference.causal_conv1d_ref(**kwargs)
    expected = brute_force.convolve(**numbers(kwargs))
    for name, result, exact in zip(("out", "final_states"), results, expected, strict=True):
        assert_close(result, torch.from_numpy(exact), EXACT, name)


@cases("mamba_inner")
def test_mamba_inner(case):
    kwargs = make(case, torch.float64) | {"return_final_states": True}
    results = reference.mamba_inner_ref(**kwargs)
    expected = brute_force.mamba_inner(**numbers(kwargs))
    names = ("out", "conv_final_states", "final_states")
    for name, result, exact in zip(names, results, expected, strict=True):
        assert_close(result, torch.from_numpy(exact), EXACT, name)


@cases("selective_state_update")
def test_selective_state_update(case):
    kwargs = make(case, torch.float64)
    arrays = numbers(kwargs)
    out = reference.selective_state_update_ref(**kwargs)
    exact = brute_force.state_update(**arrays)
    assert_close(out, torch.from_numpy(exact), EXACT, "out")
    for name in ("ssm_state", "intermediate_states"):
        if name in kwargs:
            assert_close(kwargs[name], torch.from_numpy(arrays[name]), EXACT, name)


@cases("causal_conv1d_update")
def test_causal_conv1d_update(case):
    kwargs = make(case, torch.float64)
    arrays = numbers(kwargs)
    out = reference.causal_conv1d_update_ref(**kwargs)
    exact = brute_force.conv_update(**arrays)
    assert_close(out, torch.from_numpy(exact), EXACT, "out")
    for name in ("conv_state", "intermediate_states"):
        if name in kwargs:
            assert_close(kwargs[name], torch.from_numpy(arrays[name]), EXACT, name)
