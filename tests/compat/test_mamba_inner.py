# SPDX-License-Identifier: Apache-2.0
"""``mamba_inner_fn`` and the forks' forms against the original's formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from statescan.compat.mamba_inner import (
    bimamba_inner_fn,
    mamba_inner_fn,
    mamba_inner_fn_no_out_proj,
    mamba_inner_ref,
)
from statescan.compat.selective_scan import selective_scan_ref
from statescan.errors import ArgumentError
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("device")

BATCH, DIM, LENGTH, RANK, DSTATE, WIDTH, MODEL = 2, 6, 11, 3, 4, 3, 5
FLOAT32 = tolerance("mamba_inner", torch.float32)
GRADIENT = tolerance("mamba_inner", torch.float32, gradient=True)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def formula(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight,
    out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None,
    C_proj_bias=None, delta_softplus=True, b_rms_weight=None, c_rms_weight=None,
    dt_rms_weight=None, b_c_dt_rms_eps=1e-6,
):  # fmt: skip
    """The mixer's body written out, dt normalised after its projection."""
    x, z = xz.chunk(2, dim=1)
    taps = conv1d_weight.shape[-1]
    x = F.conv1d(F.pad(x, (taps - 1, 0)), conv1d_weight, conv1d_bias, groups=x.shape[1])
    x = F.silu(x)
    projected = x.transpose(1, 2) @ x_proj_weight.T
    parts = list(projected.split((RANK, *[DSTATE] * ((B is None) + (C is None))), dim=-1))
    dt = parts.pop(0) @ delta_proj_weight.T
    if B is None:
        B = parts.pop(0) if B_proj_bias is None else parts.pop(0) + B_proj_bias
        B = (B if b_rms_weight is None else rms(B, b_rms_weight, b_c_dt_rms_eps)).transpose(1, 2)
    if C is None:
        C = parts.pop(0) if C_proj_bias is None else parts.pop(0) + C_proj_bias
        C = (C if c_rms_weight is None else rms(C, c_rms_weight, b_c_dt_rms_eps)).transpose(1, 2)
    dt = dt if dt_rms_weight is None else rms(dt, dt_rms_weight, b_c_dt_rms_eps)
    y = selective_scan_ref(x, dt.transpose(1, 2), A, B, C, D, z, delta_bias, delta_softplus)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def inner_tensors(constant="", norms=False, biases=True):
    parts = 2 - len(constant)
    found = {
        "xz": torch.randn(BATCH, 2 * DIM, LENGTH),
        "conv1d_weight": torch.randn(DIM, 1, WIDTH),
        "conv1d_bias": torch.randn(DIM),
        "x_proj_weight": 0.5 * torch.randn(RANK + parts * DSTATE, DIM),
        "delta_proj_weight": 0.5 * torch.randn(DIM, RANK),
        "out_proj_weight": torch.randn(MODEL, DIM),
        "out_proj_bias": torch.randn(MODEL) if biases else None,
        "A": -torch.rand(DIM, DSTATE),
        "B": torch.randn(DIM, DSTATE) if "B" in constant else None,
        "C": torch.randn(DIM, DSTATE) if "C" in constant else None,
        "D": torch.randn(DIM),
        "delta_bias": torch.randn(DIM),
        "B_proj_bias": torch.randn(DSTATE) if biases and "B" not in constant else None,
        "C_proj_bias": torch.randn(DSTATE) if biases and "C" not in constant else None,
    }
    if norms:
        found |= {
            "b_rms_weight": torch.randn(DSTATE),
            "c_rms_weight": torch.randn(DSTATE),
            "dt_rms_weight": torch.randn(DIM),
        }
    return found


def differentiated(function, tensors, cotangent, **options):
    leaves = {n: None if t is None else t.detach().requires_grad_() for n, t in tensors.items()}
    out = function(**leaves, **options)
    given = [t for t in leaves.values() if t is not None]
    return out, torch.autograd.grad(out, given, cotangent.to(out.dtype))


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("constant", "norms", "biases"),
    [
        ("", False, True),
        ("", True, True),
        ("", True, False),
        ("B", False, True),
        ("BC", False, False),
    ],
)
def test_outputs_and_every_gradient(constant, norms, biases, level):
    """The original's tests check no gradient, and those of the norms and of the bias are wrong."""
    tensors = inner_tensors(constant, norms, biases)
    cotangent = torch.randn(BATCH, LENGTH, MODEL)
    exact = {n: None if t is None else t.double() for n, t in tensors.items()}
    expected, expected_grads = differentiated(formula, exact, cotangent)
    out, grads = differentiated(mamba_inner_fn, tensors, cotangent, checkpoint_lvl=level)
    assert_close(out, expected, FLOAT32, "output")
    names = [n for n, t in tensors.items() if t is not None]
    for name, grad, exact_grad in zip(names, grads, expected_grads):
        assert grad.shape == tensors[name].shape
        assert_close(grad, exact_grad, GRADIENT, f"gradient of {name}")


def test_the_reference_is_the_same_function():
    tensors = inner_tensors()
    assert_close(mamba_inner_ref(**tensors), mamba_inner_fn(**tensors), FLOAT32)


def test_levels_other_than_0_and_1_are_refused():
    with pytest.raises(ArgumentError, match="checkpoint_lvl=2"):
        mamba_inner_fn(**inner_tensors(), checkpoint_lvl=2)


def test_autocast_projects_in_its_dtype(device):
    """As the original: projections in bfloat16, the recurrence in float32."""
    tensors = inner_tensors()
    with torch.autocast(device, dtype=torch.bfloat16):
        out, grads = differentiated(mamba_inner_fn, tensors, torch.randn(BATCH, LENGTH, MODEL))
    assert out.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in grads)
    exact = formula(**{n: None if t is None else t.double() for n, t in tensors.items()})
    assert_close(out, exact, tolerance("mamba_inner", torch.bfloat16))


def test_vims_form_without_output_projection():
    tensors = inner_tensors(biases=False)
    whole = mamba_inner_fn(**tensors)
    weight, _ = tensors.pop("out_proj_weight"), tensors.pop("out_proj_bias")
    inner = mamba_inner_fn_no_out_proj(**tensors)
    assert inner.shape == (BATCH, DIM, LENGTH)
    assert_close(F.linear(inner.transpose(1, 2), weight), whole, FLOAT32)


@pytest.mark.parametrize("constant", ["", "B"])
def test_vims_bidirectional_form(constant):
    """The sum of both directions; the second with its own decay, over the flipped inputs."""
    tensors = inner_tensors(constant)
    tensors["A_b"] = -torch.rand(DIM, DSTATE)

    def both(A, A_b, **rest):
        x, z = rest["xz"].chunk(2, dim=1)
        x = F.pad(x, (WIDTH - 1, 0))
        x = F.silu(F.conv1d(x, rest["conv1d_weight"], rest["conv1d_bias"], groups=DIM))
        projected = x.transpose(1, 2) @ rest["x_proj_weight"].T
        dt, *parts = projected.split((RANK, *[DSTATE] * (2 - len(constant))), dim=-1)
        dt = (dt @ rest["delta_proj_weight"].T).transpose(1, 2)
        B = rest["B"]
        if B is None:
            B = (parts.pop(0) + rest["B_proj_bias"]).transpose(1, 2)
        C = (parts.pop(0) + rest["C_proj_bias"]).transpose(1, 2)

        def scan(decay, flip):
            def turn(t):
                return t.flip(-1) if flip and t.dim() == 3 else t

            y = selective_scan_ref(
                *(turn(x), turn(dt), decay, turn(B), turn(C)),
                *(rest["D"], turn(z), rest["delta_bias"], True),
            )
            return turn(y)

        y = scan(A, False) + scan(A_b, True)
        return F.linear(y.transpose(1, 2), rest["out_proj_weight"], rest["out_proj_bias"])

    cotangent = torch.randn(BATCH, LENGTH, MODEL)
    exact = {n: None if t is None else t.double() for n, t in tensors.items()}
    expected, expected_grads = differentiated(both, exact, cotangent)
    out, grads = differentiated(bimamba_inner_fn, tensors, cotangent)
    assert_close(out, expected, FLOAT32)
    for grad, exact_grad in zip(grads, expected_grads):
        assert_close(grad, exact_grad, GRADIENT)
