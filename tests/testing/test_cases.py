# SPDX-License-Identifier: Apache-2.0
"""The rows of cases, their inputs and their judges: names, seeds, layouts, NaN, tolerances."""

from collections import Counter

import pytest
import torch

from statescan import reference
from statescan.errors import BackendUnavailableError
from statescan.testing import OPS, Verdict, all_cases, get_case, make, run_case, run_op, tolerance
from statescan.testing.draw import place
from statescan.testing.measure import plain_errors
from statescan.testing.runner import POOLS
from statescan.testing.tolerances import PLAIN_ERRORS

REFERENCE = {op: getattr(reference, f"{op}_ref") for op in OPS}


def test_names_are_unique():
    repeated = [name for name, count in Counter(map(str, all_cases())).items() if count > 1]
    assert repeated == []


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no case 'nope' of mamba_inner; there are bare,"):
        get_case("mamba_inner", "nope")


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_every_case_runs_in_half_precision(case):
    for item in run_case(case, torch.bfloat16, fn=REFERENCE[case.op]):
        assert item.passed, item


def tensors(kwargs):
    return {k: v for k, v in kwargs.items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_numbers_depend_on_the_seed_alone(case):
    first, again, low = (
        tensors(make(case, dtype)) for dtype in (torch.float64, torch.float64, torch.bfloat16)
    )
    other = tensors(make(case, torch.float64, seed=1))
    for name, value in first.items():
        assert torch.equal(value.nan_to_num(), again[name].nan_to_num()), name
        rounded = low[name].to(value.dtype).nan_to_num()
        torch.testing.assert_close(rounded, value.nan_to_num(), rtol=0.02, atol=1e-3)
        if name not in ("out", "seq_idx", "cu_seqlens", "cache_seqlens") and "indices" not in name:
            same = torch.equal(value.nan_to_num(), other[name].nan_to_num())
            assert value.numel() == 0 or name == "num_accepted_tokens" or not same, name


def test_strided_views_are_surrounded_by_nan():
    view = place(torch.ones(2, 3), "strided")
    assert (view == 1).all()
    assert view.storage_offset() > 0
    parent = view.as_strided((7 * 9,), (1,), 0)
    assert parent.isnan().sum() == 7 * 9 - 6


def test_channel_last_tensors_have_neighbouring_channels():
    x = make(get_case("selective_scan", "channel_last"))["x"]
    assert x.stride(1) == 1
    assert x.shape == (2, 5, 17)


def broken(**kwargs):
    """A scan that forgets the skip and scribbles into an input."""
    kwargs["dt"].data[0, 0, 0] += 1
    return REFERENCE["selective_scan"](**(kwargs | {"D": None}))


def test_a_wrong_op_fails_in_output_gradient_and_inputs():
    case = get_case("selective_scan", "D_only")
    failed = {item.name for item in run_case(case, fn=broken) if not item.passed}
    assert {"out", "dx", "dD", "dt unchanged"} <= failed


def test_a_slot_that_no_row_writes_must_keep_its_bits():
    case = get_case("selective_state_update", "read_write")

    def careless(**kwargs):
        kwargs["ssm_state"][6, 0, 0] += 1e-7
        return REFERENCE["selective_state_update"](**kwargs)

    failed = [item.name for item in run_case(case, fn=careless) if not item.passed]
    assert failed == ["ssm_state unchanged"]


def test_a_wrong_dtype_of_a_result_fails():
    case = get_case("causal_conv1d", "bare")

    def widened(**kwargs):
        return REFERENCE["causal_conv1d"](**kwargs).float()

    failed = [item.name for item in run_case(case, torch.bfloat16, fn=widened) if not item.passed]
    assert failed == ["out dtype"]


def test_run_op_keeps_the_worst_and_lists_refusals():
    def picky(**kwargs):
        if kwargs["A"].is_complex():
            raise BackendUnavailableError("complex A is not offered")
        return REFERENCE["selective_scan"](**kwargs)

    cases = [get_case("selective_scan", name) for name in ("usual", "complex", "reverse")]
    verdict = run_op("selective_scan", fn=picky, cases=cases)
    assert verdict.passed
    assert verdict.num_cases == 2
    assert verdict.worst_case in ("usual", "reverse")
    assert verdict.refused == (("complex", "complex A is not offered"),)
    assert 0 < verdict.worst.error <= verdict.worst.tolerance


def test_a_verdict_on_nothing_is_no_pass():
    assert not Verdict("selective_scan", "torch", torch.float32, None, "", 0, ()).passed


@pytest.mark.parametrize("op", OPS)
def test_plain_errors_are_those_of_the_table(op):
    """Measured again with one seed of the five: never above the table, nor far below it."""
    for dtype, measured in plain_errors(op, [0]).items():
        for found, entry in zip(measured, PLAIN_ERRORS[op][dtype], strict=True):
            assert found <= 1.2 * entry, (dtype, found, entry)
            assert found >= 0.05 * entry, (dtype, found, entry)


def test_tolerance_follows_the_dtype_of_the_result():
    bf16, f32 = torch.bfloat16, torch.float32
    assert tolerance("selective_scan", bf16, f32) == tolerance("selective_scan", f32)
    assert tolerance("selective_scan", f32, torch.complex64) == tolerance("selective_scan", f32)
    assert tolerance("mamba_inner", bf16, f32) == tolerance("mamba_inner", bf16)
    assert tolerance("mamba_inner", f32, bf16) == tolerance("mamba_inner", bf16)
    assert tolerance("selective_scan", torch.float64) < 1e-14
    assert all(PLAIN_ERRORS[op][f32][1] == 0 for op in POOLS)
