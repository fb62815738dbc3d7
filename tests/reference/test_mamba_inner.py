# SPDX-License-Identifier: Apache-2.0
"""What the fused inside of a block means: its parts put together, padding, dtypes."""

import math

import pytest
import torch
from torch.nn import functional as F

from statescan.reference import causal_conv1d_ref, mamba_inner_ref, selective_scan_ref
from statescan.testing import assert_close, get_case, make

EXACT = 1e-13


def arguments(name, dtype=torch.float64, **changes):
    """Arguments of a case, with final states asked for."""
    return make(get_case("mamba_inner", name), dtype) | {"return_final_states": True, **changes}


def test_equals_its_parts():
    kwargs = arguments("biases")
    out, conv_final, final = mamba_inner_ref(**kwargs)
    x, z = kwargs["xz"].chunk(2, dim=1)
    x, conv_state = causal_conv1d_ref(
        x, kwargs["conv_weight"], kwargs["conv_bias"], activation="silu", return_final_states=True
    )
    dt, B, C = (x.mT @ kwargs["x_proj_weight"].T).split([3, 4, 4], dim=-1)
    y, state = selective_scan_ref(
        x,
        (dt @ kwargs["dt_proj_weight"].T).mT,
        kwargs["A"],
        (B + kwargs["b_proj_bias"]).mT,
        (C + kwargs["c_proj_bias"]).mT,
        D=kwargs["D"],
        z=z,
        dt_bias=kwargs["dt_bias"],
        dt_softplus=True,
        return_final_states=True,
    )
    assert_close(out, F.linear(y.mT, kwargs["out_proj_weight"], kwargs["out_proj_bias"]), EXACT)
    assert_close(conv_final, conv_state, EXACT)
    assert_close(final, state, EXACT)


def test_norm_weights_get_gradients_and_scaling_a_projection_changes_nothing():
    kwargs = arguments("norms", norm_eps=0.0, b_proj_bias=None)
    weights = [
        kwargs[n].requires_grad_() for n in ("b_norm_weight", "c_norm_weight", "dt_norm_weight")
    ]
    out, _, _ = mamba_inner_ref(**kwargs)
    assert all((g != 0).all() for g in torch.autograd.grad(out.square().sum(), weights))
    scaled = mamba_inner_ref(**(kwargs | {"x_proj_weight": 7 * kwargs["x_proj_weight"]}))
    assert_close(scaled[0], out, EXACT)


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_nan_in_padding_reaches_nothing(eps):
    kwargs = arguments("seq_idx", norm_eps=eps)
    pad = kwargs["seq_idx"] < 0
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    results = mamba_inner_ref(**(kwargs | leaves))
    assert kwargs["xz"].movedim(1, 2)[pad].isnan().all()
    assert (results[0][pad] == 0).all()
    assert all(result.isfinite().all() for result in results)
    douts = [torch.randn_like(result) for result in results]
    douts[0][pad] = math.nan
    found = torch.autograd.grad(results, tuple(leaves.values()), douts)
    for name, gradient in zip(leaves, found, strict=True):
        assert gradient.isfinite().all(), name
    assert (found[0].movedim(1, 2)[pad] == 0).all()


def test_chunks_with_carried_states_equal_the_whole():
    kwargs = arguments("no_out_proj")
    out, conv_final, final = mamba_inner_ref(**kwargs)
    conv_state, state, pieces = kwargs["conv_initial_states"], kwargs["initial_states"], []
    for start, end in [(0, 2), (2, 11)]:
        chunk = {
            "xz": kwargs["xz"][..., start:end],
            "conv_initial_states": conv_state,
            "initial_states": state,
        }
        piece, conv_state, state = mamba_inner_ref(**(kwargs | chunk))
        pieces.append(piece)
    assert_close(torch.cat(pieces, dim=-1), out, EXACT)
    assert_close(conv_state, conv_final, EXACT)
    assert_close(state, final, EXACT)


def test_reverse_equals_flipped_tokens():
    kwargs = arguments("reverse")
    out, conv_final, final = mamba_inner_ref(**kwargs)
    flipped = mamba_inner_ref(**(kwargs | {"xz": kwargs["xz"].flip(-1), "reverse": False}))
    assert_close(out, flipped[0].flip(1), EXACT)
    assert_close(conv_final, flipped[1], EXACT)
    assert_close(final, flipped[2], EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_results(dtype):
    kwargs = arguments("usual", dtype)
    assert [r.dtype for r in mamba_inner_ref(**kwargs)] == [dtype, dtype, torch.float32]
    kwargs["A"] = kwargs["A"].double()
    assert [r.dtype for r in mamba_inner_ref(**kwargs)] == [dtype, dtype, torch.float64]


def test_autocast_casts_nothing():
    kwargs = arguments("usual", torch.float32)
    expected = mamba_inner_ref(**kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = mamba_inner_ref(**kwargs)
    assert all(torch.equal(r, e) for r, e in zip(results, expected, strict=True))
