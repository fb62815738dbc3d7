# SPDX-License-Identifier: Apache-2.0
"""The norms: formula in float64, dtypes of outputs and sums, what each option returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from statescan.compat import layer_norm as norms
from statescan.compat import layernorm_gated as gated
from statescan.errors import ArgumentError
from statescan.testing import assert_close

pytestmark = pytest.mark.usefixtures("device")

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def exact_norm(x, weight, bias, eps, is_rms):
    x = x.double()
    if not is_rms:
        x = x - x.mean(-1, keepdim=True)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    return normed if bias is None else normed + bias.double()


@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm_with_residual_and_parallel_branch(dtype, is_rms, with_bias):
    x, x1, residual = (torch.randn(3, 5, 24).to(dtype) for _ in range(3))
    residual = residual.float()
    weight, weight1 = torch.randn(24), torch.randn(24)
    bias = torch.randn(24) if with_bias else None
    out, out1, total = norms.layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias, prenorm=True, is_rms_norm=is_rms
    )
    exact = x.double() + x1.double() + residual.double()
    assert total.dtype == torch.float32
    assert out.dtype == out1.dtype == dtype
    assert_close(total, exact, 1e-6)
    assert_close(out, exact_norm(exact, weight, bias, 1e-6, is_rms), CLOSE[dtype])
    assert_close(out1, exact_norm(exact, weight1, bias, 1e-6, is_rms), CLOSE[dtype])


def test_gradients_reach_every_input():
    x, residual = (torch.randn(2, 12, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(12, requires_grad=True) for _ in range(2))
    out, total = norms.layer_norm_fn(x, weight, bias, residual, prenorm=True)
    leaves = (x, residual, weight, bias)
    cotangents = (torch.randn_like(out), torch.randn_like(total))
    grads = torch.autograd.grad((out, total), leaves, cotangents)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact_total = wide[0] + wide[1]
    exact = F.layer_norm(exact_total, (12,), wide[2], wide[3], 1e-6)
    expected = torch.autograd.grad((exact, exact_total), wide, [c.double() for c in cotangents])
    for grad, truth in zip(grads, expected):
        assert_close(grad, truth, 2e-6)


@pytest.mark.parametrize(
    ("residual_in_fp32", "residual_dtype", "expected"),
    [
        (False, None, torch.bfloat16),
        (True, None, torch.float32),
        (False, torch.bfloat16, torch.bfloat16),
        (True, torch.bfloat16, torch.bfloat16),
        (False, torch.float32, torch.float32),
    ],
)
def test_dtype_of_the_sum(residual_in_fp32, residual_dtype, expected):
    """A given residual keeps its dtype; without one the flag decides."""
    x = torch.randn(2, 8).bfloat16()
    residual = None if residual_dtype is None else torch.randn(2, 8).to(residual_dtype)
    _, total = norms.rms_norm_fn(
        x, torch.ones(8), None, residual, prenorm=True, residual_in_fp32=residual_in_fp32
    )
    assert total.dtype == expected


def test_dropout_keeps_the_mean_and_returns_its_mask():
    x = torch.ones(4000, 8)
    out, total, mask, mask1 = norms.layer_norm_fn(
        *(x, torch.ones(8), None),
        dropout_p=0.25,
        prenorm=True,
        return_dropout_mask=True,
        is_rms_norm=True,
    )
    assert mask1 is None
    assert abs(mask.float().mean() - 0.75) < 0.02
    assert torch.equal(total, mask / 0.75)
    again = norms.rms_norm_ref(x, torch.ones(8), None, dropout_p=0.25, dropout_mask=mask)
    assert_close(again, out, 1e-6)


def test_rowscale_scales_rows_and_excludes_a_parallel_branch():
    x, scale = torch.randn(3, 4, 8), torch.randn(3, 4)
    _, total = norms.rms_norm_fn(x, torch.ones(8), None, rowscale=scale, prenorm=True)
    assert_close(total, x * scale[..., None], 1e-6)
    with pytest.raises(ArgumentError, match="'x1' and 'rowscale' are both given"):
        norms.rms_norm_fn(x, torch.ones(8), None, x1=x, rowscale=scale)


def test_norm_and_linear_in_one():
    x, weight, linear = torch.randn(3, 8), torch.randn(8), torch.randn(5, 8)
    out, total = norms.layer_norm_linear_fn(
        x, weight, None, linear, None, prenorm=True, is_rms_norm=True
    )
    assert_close(out, exact_norm(x, weight, None, 1e-6, True) @ linear.double().T, 2e-6)
    assert torch.equal(total, x)


def test_module_has_the_originals_parameters_and_drops_in_training_only():
    module = norms.RMSNorm(16, eps=1e-3, dropout_p=0.5)
    assert list(module.state_dict()) == ["weight"]
    x = torch.randn(4, 16)
    module.eval()
    assert_close(module(x), F.rms_norm(x, (16,), eps=1e-3), 1e-6)
    module.train()
    assert not torch.equal(module(x), module(x))
    assert isinstance(module, nn.Module)


@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("group_size", [None, 8])
def test_gated_norm(is_rms, before, group_size):
    x, z = torch.randn(3, 24), torch.randn(3, 24)
    weight, bias = torch.randn(24), torch.randn(24)
    out = gated.layernorm_fn(x, weight, bias, z, 1e-5, group_size, before, is_rms)
    inner, gate = x.double(), F.silu(z.double())
    inner = inner if before else inner * gate
    groups = inner.unflatten(-1, (-1, group_size or 24))
    normed = exact_norm(groups, torch.ones(()), None, 1e-5, is_rms).flatten(-2)
    normed = normed * weight.double() + bias.double()
    assert_close(out, normed * gate if before else normed, 3e-6)


def test_gated_norm_refuses_a_group_that_does_not_divide():
    with pytest.raises(ArgumentError, match="group_size=5 for 24 channels"):
        gated.rmsnorm_fn(torch.randn(2, 24), torch.ones(24), None, group_size=5)


def test_gated_modules_have_the_originals_parameters():
    assert list(gated.RMSNorm(8).state_dict()) == ["weight"]
    assert list(gated.LayerNorm(8).state_dict()) == ["weight", "bias"]
    x, z = torch.randn(2, 8), torch.randn(2, 8)
    assert_close(gated.RMSNorm(8)(x, z), gated.rmsnorm_fn(x, torch.ones(8), None, z, 1e-5), 1e-7)
