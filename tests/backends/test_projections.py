# SPDX-License-Identifier: Apache-2.0
"""Products of activations with weights, row by row as on the CPU and at once as elsewhere."""

from __future__ import annotations

import pytest
import torch

from statescan.backends import _projections
from statescan.testing import assert_close

SIZES = [(2, 5, 3, 7), (1, 1, 4, 6), (3, 4, 1, 1), (2, 3, 5, 1), (0, 2, 3, 4), (2, 2, 0, 4)]
"""(batch, features, inputs, seqlen)."""


@pytest.fixture(params=["rows", "at once"])
def way(request, monkeypatch):
    if request.param == "at once":
        monkeypatch.setattr(_projections, "_ROW_BY_ROW", frozenset())


def activations(batch, features, seqlen, last, dtype=torch.float32):
    made = torch.randn(batch, features, seqlen, dtype=dtype)
    return made.transpose(1, 2).contiguous().transpose(1, 2) if last else made


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_project(sizes, last, add):
    batch, features, inputs, seqlen = sizes
    weight, tokens = torch.randn(features, inputs), activations(batch, inputs, seqlen, last)
    for target in (
        activations(batch, features, seqlen, not last),
        activations(batch, 2 * features, seqlen, last)[:, features:],
    ):
        exact = weight.double() @ tokens.double() + (target.double() if add else 0)
        if not add:
            target.fill_(float("nan"))
        _projections.project(weight, tokens, target, add=add)
        assert_close(target, exact, 1e-6)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("few", [False, True])
def test_gradients_of_weight_and_bias(sizes, last, few, monkeypatch):
    if few:
        monkeypatch.setattr(_projections, "_MOST_PARTIAL", 1)
    batch, features, inputs, seqlen = sizes
    dtarget = activations(batch, features, seqlen, last)
    tokens = activations(batch, inputs, seqlen, not last)
    exact = torch.einsum("bfl,bil->fi", dtarget.double(), tokens.double())
    assert_close(_projections.weight_gradient(dtarget, tokens, torch.float32), exact, 1e-6)
    exact = dtarget.double().sum((0, 2))
    assert_close(_projections.bias_gradient(dtarget, torch.float32), exact, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True])
def test_half_precision_on_a_gpu_is_summed_in_float32(dtype, last):
    dtarget = activations(3, 40, 5000, last, dtype).cuda()
    tokens = activations(3, 24, 5000, not last, dtype).cuda()
    exact = torch.einsum("bfl,bil->fi", dtarget.double(), tokens.double())
    found = _projections.weight_gradient(dtarget, tokens, torch.float32)
    # Where torch rounds the product of each row.
    allowed = 1e-5 if _projections._wide_bmm is not None else torch.finfo(dtype).eps
    assert_close(found, exact, allowed)
    assert torch.equal(found, _projections.weight_gradient(dtarget, tokens, torch.float32))
