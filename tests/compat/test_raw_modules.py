# SPDX-License-Identifier: Apache-2.0
"""The raw extension modules: every generation of their arguments, and the shapes they return."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from statescan.compat import causal_conv1d_raw as conv
from statescan.compat import selective_scan_raw as scan
from statescan.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from statescan.compat.selective_scan import selective_scan_fn
from statescan.errors import ArgumentError
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("device")

CLOSE = tolerance("selective_scan", torch.float32)
CLOSE_GRAD = tolerance("selective_scan", torch.float32, gradient=True)


def scan_inputs(length, is_complex=False):
    dim, dstate, span = 6, 4, 2 * length if is_complex else length
    A = -torch.rand(dim, dstate)
    return {
        "u": torch.randn(2, dim, length),
        "delta": 0.1 * torch.rand(2, dim, length),
        "A": torch.complex(A, torch.randn(dim, dstate)) if is_complex else A,
        "B": torch.randn(2, 2, dstate, span),
        "C": torch.randn(2, 2, dstate, span),
        "D": torch.randn(dim),
        "z": torch.randn(2, dim, length),
        "delta_bias": 0.1 * torch.rand(dim),
    }


@pytest.mark.parametrize("length", [3, 2048, 2051])
def test_scan_fwd_returns_output_checkpoints_and_gated_output(length):
    t = scan_inputs(length)
    out, checkpoints, gated = scan.fwd(*t.values(), True)
    ungated, last = selective_scan_fn(
        **{**t, "z": None}, delta_softplus=True, return_last_state=True
    )
    assert_close(out, ungated, CLOSE)
    assert_close(gated, selective_scan_fn(**t, delta_softplus=True), CLOSE)
    assert checkpoints.shape == (2, 6, -(-length // scan.CHUNK), 8)
    # Programs read the last state at the odd places of the last checkpoint.
    assert_close(checkpoints[:, :, -1, 1::2], last, CLOSE)
    steps = F.softplus(t["delta"].double() + t["delta_bias"].double()[:, None]).sum(-1)
    decay = torch.exp(steps[..., None] * t["A"].double())
    assert_close(checkpoints[:, :, -1, 0::2], decay, 1e-5)
    assert len(scan.fwd(*{**t, "z": None}.values(), True)) == 2


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_scan_bwd_returns_the_gradients_in_the_originals_order(gated, is_complex):
    t = scan_inputs(9, is_complex)
    t["z"] = t["z"] if gated else None
    leaves = {n: v if v is None else v.clone().requires_grad_() for n, v in t.items()}
    dout = torch.randn(2, 6, 9)
    selective_scan_fn(**leaves, delta_softplus=True).backward(dout)
    out, checkpoints, *_ = scan.fwd(*t.values(), True)
    dz = torch.full_like(t["u"], float("nan")) if gated else None
    results = scan.bwd(*t.values(), dout, checkpoints, out, dz, True, gated)
    names = ["u", "delta", "A", "B", "C", "D", "delta_bias", *(["z"] if gated else [])]
    for name, grad in zip(names, results):
        assert_close(grad, leaves[name].grad, CLOSE_GRAD, f"gradient of {name}")
    if gated:
        assert results[7] is dz
        assert_close(results[8], selective_scan_fn(**t, delta_softplus=True), CLOSE)
    assert len(results) == (9 if gated else 7)


@pytest.mark.parametrize("form", ["core", "nrow", "oflex", "ndstate"])
def test_the_extension_modules_of_vmamba(form):
    """Called as VMamba's autograd functions call them."""
    t = scan_inputs(7)
    t.pop("z")
    t["u"], t["delta"] = t["u"].half(), t["delta"].half()
    t["B"], t["C"] = t["B"].half(), t["C"].half()
    if form == "ndstate":
        t["A"], t["B"], t["C"] = t["A"][:, 0], t["B"][:, :, 0], t["C"][:, :, 0]
    extra = {"core": (1,), "nrow": (2,), "oflex": (1, True), "ndstate": (1,)}[form]
    out, checkpoints = scan.fwd_ungated(*t.values(), True, *extra)
    assert out.dtype == (torch.float32 if form == "oflex" else torch.float16)
    before, after = list(t.values())[:-1], t["delta_bias"]
    results = scan.bwd_ungated(*before, after, torch.ones_like(out), checkpoints, True, 1)
    for name, grad in zip(t, results):
        assert grad.shape == t[name].shape, name
        assert grad.dtype == t[name].dtype, name


def conv_inputs():
    x = torch.randn(2, 4, 8)
    return x, torch.randn(4, 3), torch.randn(4)


def test_conv_fwd_of_every_generation():
    x, weight, bias = conv_inputs()
    expected = causal_conv1d_fn(x, weight, bias, activation="silu")
    assert torch.equal(conv.causal_conv1d_fwd(x, weight, bias, True), expected)
    assert torch.equal(conv.causal_conv1d_fwd(x, weight, bias, None, True), expected)
    final = torch.empty(2, 4, 2)
    found = conv.causal_conv1d_fwd(x, weight, bias, None, None, final, True)
    assert torch.equal(found, expected)
    assert torch.equal(final, x[..., -2:])
    out = torch.full_like(x, float("nan"))
    assert conv.causal_conv1d_fwd(x, weight, bias, None, None, out, None, True) is None
    assert torch.equal(out, expected)


def test_conv_bwd_of_every_generation():
    x, weight, bias = conv_inputs()
    states, dout, dfinal = torch.randn(2, 4, 2), torch.randn_like(x), torch.randn(2, 4, 2)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, states)]
    causal_conv1d_fn(*leaves[:3], activation="silu").backward(dout)
    plain = [t.grad for t in leaves[:3]]
    for found in (
        conv.causal_conv1d_bwd(x, weight, bias, dout, None, True),
        conv.causal_conv1d_bwd(x, weight, bias, dout, None, None, True),
    ):
        assert len(found) == 3
        for grad, expected in zip(found, plain):
            assert_close(grad, expected, 1e-6)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, states)]
    results = causal_conv1d_fn(
        *leaves[:3], initial_states=leaves[3], return_final_states=True, activation="silu"
    )
    torch.autograd.backward(results, (dout, dfinal))
    expected = [t.grad for t in leaves]
    dx = torch.full_like(x, float("nan"))
    found = conv.causal_conv1d_bwd(x, weight, bias, dout, None, states, dfinal, dx, True, True)
    assert found[0] is dx
    targets = [torch.zeros_like(t) for t in (x, weight, bias, states)]
    written = conv.causal_conv1d_bwd(x, weight, bias, dout, None, states, dfinal, *targets, True)
    assert written is None
    for grads in (found, targets):
        for grad, exact in zip(grads, expected):
            assert_close(grad, exact, 1e-6)


def test_conv_update_of_every_generation():
    x, state = torch.randn(2, 4), torch.randn(2, 4, 2)
    _, weight, bias = conv_inputs()
    before = state.clone()
    expected = causal_conv1d_update(x, state, weight, bias, "silu")
    for more in ((), (None,), (None, None)):
        again = before.clone()
        assert torch.equal(conv.causal_conv1d_update(x, again, weight, bias, True, *more), expected)
        assert torch.equal(again, state)
    out, again = torch.full_like(x, float("nan")), before.clone()
    assert conv.causal_conv1d_update(x, again, weight, bias, out, True, None, None) is None
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["fwd", "bwd", "update"])
def test_an_unknown_number_of_arguments_is_told(name):
    function = getattr(conv, f"causal_conv1d_{name}")
    with pytest.raises(ArgumentError, match=rf"causal_conv1d_{name}: got 3 positional arguments"):
        function(None, None, None)
