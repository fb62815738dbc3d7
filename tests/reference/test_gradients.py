# SPDX-License-Identifier: Apache-2.0
"""Autograd through the references equals finite differences, twice, for every kind of input."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from statescan.reference import causal_conv1d_ref, mamba_inner_ref, selective_scan_ref
from statescan.testing import Case, make

SIZES = {
    "selective_scan": {"batch": 1, "dim": 2, "seqlen": 4, "dstate": 2},
    "causal_conv1d": {"batch": 1, "dim": 2, "seqlen": 4, "width": 3},
    "mamba_inner": {
        "batch": 1, "dim": 2, "seqlen": 3, "dstate": 2, "width": 2, "dt_rank": 1, "d_model": 2,
    },
}  # fmt: skip
STATES = "initial_states return_final_states"
OPTIONS = f"D z dt_bias dt_softplus {STATES}"
INNER = f"conv_bias silu D dt_bias dt_softplus {STATES}"
PARTS = "b_norm c_norm dt_norm b_proj_bias c_proj_bias"
RUNS = (((0, 1), (-1, 1), (0, 2)),)


def tiny(op, name, options, **rest):
    """A case small enough for finite differences of every element."""
    groups = {"ngroups": 2} if "groups" in name else {}
    return Case(op, name, SIZES[op] | groups, frozenset(options.split()), **rest)


SCAN_CASES = [
    tiny("selective_scan", "all", OPTIONS),
    tiny("selective_scan", "bare_reverse", "reverse"),
    tiny("selective_scan", "groups", OPTIONS),
    tiny("selective_scan", "constant", f"{OPTIONS} constant_B constant_C"),
    tiny("selective_scan", "complex", f"{OPTIONS} complex reverse"),
    tiny("selective_scan", "seq_idx", OPTIONS, runs=RUNS),
    tiny("selective_scan", "cu_seqlens", OPTIONS, bounds=(0, 1, 1, 4)),
]
CONV_CASES = [
    tiny("causal_conv1d", "all", f"bias silu {STATES}"),
    tiny("causal_conv1d", "reverse", f"bias {STATES} reverse"),
    tiny("causal_conv1d", "seq_idx", f"silu {STATES}", runs=RUNS),
    tiny("causal_conv1d", "cu_seqlens", STATES, bounds=(0, 1, 1, 4)),
]
INNER_CASES = [
    tiny("mamba_inner", "norms", f"{INNER} {PARTS} out_proj out_proj_bias"),
    tiny("mamba_inner", "complex", "silu complex b_norm c_proj_bias"),
    tiny("mamba_inner", "constants", f"{INNER} constant_B constant_C reverse"),
]


def differentiable(fn, case):
    """The op as a function of its inputs that have gradients, and those inputs."""
    kwargs = make(case, torch.float64)
    # Finite differences need finite padding; that NaN there is harmless is tested elsewhere.
    leaves = {
        name: torch.nan_to_num(value).requires_grad_()
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    }

    def call(*values):
        return fn(**(kwargs | dict(zip(leaves, values, strict=True))))

    return call, tuple(leaves.values())


def cases(rows):
    return pytest.mark.parametrize("case", rows, ids=lambda case: case.name)


@cases(SCAN_CASES)
def test_selective_scan(case):
    assert gradcheck(*differentiable(selective_scan_ref, case))


@cases(CONV_CASES)
def test_causal_conv1d(case):
    assert gradcheck(*differentiable(causal_conv1d_ref, case))


@cases(INNER_CASES)
def test_mamba_inner(case):
    assert gradcheck(*differentiable(mamba_inner_ref, case))


@cases(SCAN_CASES)
def test_selective_scan_twice(case):
    assert gradgradcheck(*differentiable(selective_scan_ref, case), fast_mode=True)


@cases(CONV_CASES)
def test_causal_conv1d_twice(case):
    assert gradgradcheck(*differentiable(causal_conv1d_ref, case), fast_mode=True)


@cases(INNER_CASES)
def test_mamba_inner_twice(case):
    assert gradgradcheck(*differentiable(mamba_inner_ref, case), fast_mode=True)
