# SPDX-License-Identifier: Apache-2.0
"""The helper that moves a call to another device keeps what tests rely on; judged on the CPU."""

from __future__ import annotations

import pytest
import torch
from helpers.on_gpu import Mover, moved

from statescan import ops
from statescan.errors import BackendUnavailableError


def test_strides_offsets_gaps_and_overlaps_are_kept():
    parent = torch.arange(40.0).view(5, 8)
    view, other, wide = parent[1:4:2, 2:7:3], parent[3], torch.ones(1, 3).expand(4, 3)
    mover = Mover("cpu")
    there = [mover(tensor) for tensor in (view, other, wide)]
    for tensor, found in zip((view, other, wide), there, strict=True):
        assert torch.equal(tensor, found)
        assert tensor.stride() == found.stride()
        assert tensor.storage_offset() == found.storage_offset()
        assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    there[1].fill_(-1.0)
    assert bool((there[0][1] == -1.0).all()), "overlapping tensors were moved apart"
    assert not bool((view == -1.0).any())


def test_gradients_come_home():
    x = torch.randn(2, 3, requires_grad=True)
    seen = []

    def double(x):
        x.register_hook(lambda gradient: seen.append(gradient.stride()))
        return 2 * x

    out = moved(double, "cpu")(x=x)
    (found,) = torch.autograd.grad(out, x, torch.ones(1).expand(2, 3))
    assert torch.equal(found, torch.full((2, 3), 2.0))
    assert len(seen) == 1


def test_what_is_written_comes_home():
    state, x = torch.randn(2, 3, 3), torch.randn(2, 3)
    weight, out = torch.randn(3, 4), torch.empty(2, 3)
    expected_state = state.clone()
    expected = ops.causal_conv1d_update(x, expected_state, weight, backend="torch")
    found = moved(ops.causal_conv1d_update, "cpu")(
        x=x, conv_state=state, weight=weight, out=out, backend="torch"
    )
    assert found is out
    assert torch.equal(out, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("text", ["x is float64", "it has no complex states"])
def test_documented_limits_skip(text):
    def refuse(**kwargs):
        raise BackendUnavailableError(text)

    with pytest.raises(pytest.skip.Exception):
        moved(refuse, "cpu")()


def test_other_refusals_do_not():
    def refuse(**kwargs):
        raise BackendUnavailableError("there are no kernels in this install")

    with pytest.raises(BackendUnavailableError):
        moved(refuse, "cpu")()
