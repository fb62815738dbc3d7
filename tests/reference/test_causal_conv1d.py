# SPDX-License-Identifier: Apache-2.0
"""What the causal convolution means: packing, chunks, direction, padding, states, dtypes."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from statescan.errors import ArgumentError
from statescan.reference import causal_conv1d_ref
from statescan.testing import assert_close, get_case, make

EXACT = 1e-13


def arguments(name, **changes):
    """Float64 arguments of a case, with final states asked for."""
    return make(get_case("causal_conv1d", name), torch.float64) | {
        "return_final_states": True,
        **changes,
    }


def alone(kwargs, row, start, end, initial_states):
    """The same call for some tokens of one row, without packing."""
    return causal_conv1d_ref(
        **(
            kwargs
            | {
                "x": kwargs["x"][row : row + 1, :, start:end],
                "initial_states": initial_states,
                "seq_idx": None,
                "cu_seqlens": None,
            }
        )
    )


def gradients(kwargs, dout, dfinal):
    """Gradients of every tensor argument."""
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    results = causal_conv1d_ref(**(kwargs | leaves))
    found = torch.autograd.grad(results, tuple(leaves.values()), (dout, dfinal))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_equals_torch_conv1d(width):
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    weight, bias = torch.randn(5, width, dtype=x.dtype), torch.randn(5, dtype=x.dtype)
    expected = F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], bias, groups=5)
    assert_close(causal_conv1d_ref(x, weight, bias), expected, EXACT)
    silu = causal_conv1d_ref(x, weight, bias, activation="silu")
    assert_close(silu, F.silu(expected), EXACT)
    assert torch.equal(silu, causal_conv1d_ref(x, weight, bias, activation="swish"))


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_reverse", "cu_seqlens_wide"])
def test_cu_seqlens_equals_each_sequence_alone(name):
    kwargs = arguments(name)
    out, final = causal_conv1d_ref(**kwargs)
    bounds = kwargs["cu_seqlens"].tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        expected = alone(kwargs, 0, start, end, kwargs["initial_states"][i : i + 1])
        assert_close(out[:, :, start:end], expected[0], EXACT)
        assert_close(final[i : i + 1], expected[1], EXACT)


@pytest.mark.parametrize("name", ["seq_idx", "seq_idx_reverse", "seq_idx_wide"])
def test_seq_idx_equals_each_run_alone(name):
    kwargs = arguments(name)
    out, final = causal_conv1d_ref(**kwargs)
    # Row 0 of the case: padding 0-1, then ids 5, padding, 5 again, 7, 5 again, padding.
    for i, (start, end) in enumerate([(2, 6), (7, 10), (10, 11), (11, 15)]):
        state = kwargs["initial_states"][:1] if i == 0 else None
        expected = alone(kwargs, 0, start, end, state)
        assert_close(out[:1, :, start:end], expected[0], EXACT)
    assert_close(final[:1], expected[1], EXACT)


def test_row_of_padding_passes_its_state_on():
    kwargs = arguments("seq_idx")
    out, final = causal_conv1d_ref(**kwargs)
    assert (out[1] == 0).all()
    assert torch.equal(final[1], kwargs["initial_states"][1])


@pytest.mark.parametrize("name", ["all_options", "width_1", "width_9"])
def test_chunks_with_carried_states_equal_the_whole(name):
    kwargs = arguments(name)
    out, final = causal_conv1d_ref(**kwargs)
    state, pieces = kwargs["initial_states"], []
    for start, end in [(0, 1), (1, 3), (3, 3), (3, 17)]:
        chunk = {"x": kwargs["x"][:, :, start:end], "initial_states": state}
        piece, state = causal_conv1d_ref(**(kwargs | chunk))
        pieces.append(piece)
    assert_close(torch.cat(pieces, dim=-1), out, EXACT)
    assert_close(state, final, EXACT)


def test_reverse_equals_flipped_tokens():
    kwargs = arguments("reverse")
    out, final = causal_conv1d_ref(**kwargs)
    flipped = kwargs | {"x": kwargs["x"].flip(-1), "reverse": False}
    out_flipped, final_flipped = causal_conv1d_ref(**flipped)
    assert_close(out, out_flipped.flip(-1), EXACT)
    assert_close(final, final_flipped, EXACT)


def test_final_state_holds_the_last_inputs_filled_up_from_the_initial_state():
    kwargs = arguments("shorter_than_width")
    _, final = causal_conv1d_ref(**kwargs)
    expected = torch.cat([kwargs["initial_states"], kwargs["x"]], dim=-1)[..., -3:]
    assert torch.equal(final, expected)


@pytest.mark.parametrize("name", ["seq_idx", "seq_idx_reverse", "seq_idx_wide"])
def test_nan_in_padding_reaches_nothing(name):
    kwargs = arguments(name)
    pad = kwargs["seq_idx"] < 0
    assert kwargs["x"].movedim(1, 2)[pad].isnan().all()
    dout = torch.randn_like(kwargs["x"])
    dout.movedim(1, 2)[pad] = math.nan
    out, final = causal_conv1d_ref(**kwargs)
    assert (out.movedim(1, 2)[pad] == 0).all()
    assert final.isfinite().all()
    found = gradients(kwargs, dout, torch.randn_like(final))
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert (found["x"].movedim(1, 2)[pad] == 0).all()


def test_nan_in_one_sequence_stays_there():
    kwargs = arguments("cu_seqlens")
    kwargs["x"][..., 0:5] = math.nan
    out, final = causal_conv1d_ref(**kwargs)
    assert out[..., 5:].isfinite().all()
    assert final[[0, 2, 3, 4]].isfinite().all()
    found = gradients(kwargs, torch.ones_like(out), torch.ones_like(final))
    assert found["x"][..., 5:].isfinite().all()
    assert found["initial_states"][[0, 2, 3, 4]].isfinite().all()


def test_gradient_flows_through_final_states():
    kwargs = arguments("shorter_than_width")
    out, final = causal_conv1d_ref(**kwargs)
    found = gradients(kwargs, torch.zeros_like(out), torch.ones_like(final))
    assert (found["x"] == 1).all()
    assert torch.equal(found["initial_states"][0, 0], torch.tensor([0.0, 0.0, 1.0]).double())


@pytest.mark.parametrize("name", ["no_tokens", "no_rows", "no_channels"])
def test_empty_inputs(name):
    kwargs = arguments(name)
    out, final = causal_conv1d_ref(**kwargs)
    assert out.shape == kwargs["x"].shape
    assert torch.equal(final, kwargs["initial_states"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_have_the_dtype_of_x(dtype):
    kwargs = make(get_case("causal_conv1d", "all_options"), dtype)
    out, final = causal_conv1d_ref(**(kwargs | {"weight": kwargs["weight"].double()}))
    assert out.dtype == final.dtype == dtype


def test_half_precision_taps_add_up_in_float32():
    """1 + 1024 times 2^-11 is 1.5; added up in half precision it stays 1."""
    weight = torch.full((1, 1025), 2.0**-11, dtype=torch.float16)
    weight[0, 0] = 1
    out = causal_conv1d_ref(torch.ones(1, 1, 1025, dtype=torch.float16), weight)
    assert out[0, 0, -1].item() == 1.5


def test_unknown_activation_is_refused():
    x, weight = torch.ones(1, 2, 3), torch.ones(2, 2)
    with pytest.raises(ArgumentError, match="activation is 'gelu'"):
        causal_conv1d_ref(x, weight, activation="gelu")
