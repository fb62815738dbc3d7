# SPDX-License-Identifier: Apache-2.0
"""What the selective scan means: packing, chunks, direction, padding, states, dtypes, extremes."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from statescan.errors import ArgumentError
from statescan.reference import selective_scan_ref
from statescan.testing import assert_close, get_case, make

EXACT = 1e-13
PER_TOKEN = ("x", "dt", "z", "B", "C")


def arguments(name, **changes):
    """Float64 arguments of a case, with final states asked for."""
    return make(get_case("selective_scan", name), torch.float64) | {
        "return_final_states": True,
        **changes,
    }


def cut(kwargs, row, start, end, **changes):
    """The same call for some tokens of one row, without packing."""
    part = {
        name: value[row : row + 1, ..., start:end]
        if name in PER_TOKEN and value.dim() > 2
        else value
        for name, value in kwargs.items()
    }
    return part | {"seq_idx": None, "cu_seqlens": None, "initial_states": None, **changes}


def gradients(kwargs, dout, dfinal):
    """Gradients of every tensor argument."""
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    }
    results = selective_scan_ref(**(kwargs | leaves))
    found = torch.autograd.grad(results, tuple(leaves.values()), (dout, dfinal))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_reverse", "complex_cu_seqlens"])
def test_cu_seqlens_equals_each_sequence_alone(name):
    kwargs = arguments(name)
    out, final = selective_scan_ref(**kwargs)
    bounds = kwargs["cu_seqlens"].tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        state = kwargs["initial_states"][i : i + 1]
        alone = selective_scan_ref(**cut(kwargs, 0, start, end, initial_states=state))
        assert_close(out[:, :, start:end], alone[0], EXACT)
        assert_close(final[i : i + 1], alone[1], EXACT)


@pytest.mark.parametrize("reverse", [False, True])
def test_seq_idx_equals_each_run_alone(reverse):
    kwargs = arguments("seq_idx", reverse=reverse)
    out, final = selective_scan_ref(**kwargs)
    # Row 0 of the case: padding 0-1, then ids 5, padding, 5 again, 7, 5 again, padding.
    runs = [(2, 6), (7, 10), (10, 11), (11, 15)]
    covered = torch.zeros(17, dtype=torch.bool)
    for i, (start, end) in enumerate(runs):
        state = kwargs["initial_states"][:1] if i == 0 else None
        alone = selective_scan_ref(**cut(kwargs, 0, start, end, initial_states=state))
        assert_close(out[:1, :, start:end], alone[0], EXACT)
        covered[start:end] = True
    assert_close(final[:1], alone[1], EXACT)
    assert (out[0][:, ~covered] == 0).all()


def test_row_of_padding_passes_its_state_on():
    kwargs = arguments("seq_idx")
    out, final = selective_scan_ref(**kwargs)
    assert (kwargs["seq_idx"][1] < 0).all()
    assert (out[1] == 0).all()
    assert torch.equal(final[1], kwargs["initial_states"][1])
    assert final.data_ptr() != kwargs["initial_states"].data_ptr()


@pytest.mark.parametrize("name", ["all_options", "two_groups", "constant_B", "complex_all"])
def test_chunks_with_carried_states_equal_the_whole(name):
    kwargs = arguments(name)
    out, final = selective_scan_ref(**kwargs)
    state, pieces = kwargs["initial_states"], []
    for start, end in [(0, 1), (1, 8), (8, 8), (8, 17)]:
        chunk = {
            n: v[..., start:end] if n in PER_TOKEN and v.dim() > 2 else v for n, v in kwargs.items()
        }
        piece, state = selective_scan_ref(**(chunk | {"initial_states": state}))
        pieces.append(piece)
    assert_close(torch.cat(pieces, dim=-1), out, EXACT)
    assert_close(state, final, EXACT)


@pytest.mark.parametrize("name", ["reverse", "complex_reverse_constant"])
def test_reverse_equals_flipped_tokens(name):
    kwargs = arguments(name)
    out, final = selective_scan_ref(**kwargs)
    flipped = {n: v.flip(-1) if n in PER_TOKEN and v.dim() > 2 else v for n, v in kwargs.items()}
    out_flipped, final_flipped = selective_scan_ref(**(flipped | {"reverse": False}))
    assert_close(out, out_flipped.flip(-1), EXACT)
    assert_close(final, final_flipped, EXACT)


@pytest.mark.parametrize("name", ["seq_idx", "seq_idx_reverse", "complex_seq_idx"])
def test_nan_in_padding_reaches_nothing(name):
    kwargs = arguments(name)
    pad = kwargs["seq_idx"] < 0
    assert kwargs["x"].movedim(1, 2)[pad].isnan().all()
    dout = torch.randn(kwargs["x"].shape, dtype=torch.float64)
    dout.movedim(1, 2)[pad] = math.nan
    dfinal = torch.randn_like(kwargs["initial_states"])
    out, final = selective_scan_ref(**kwargs)
    assert (out.movedim(1, 2)[pad] == 0).all()
    assert final.isfinite().all()
    for argument, gradient in gradients(kwargs, dout, dfinal).items():
        assert gradient.isfinite().all(), argument
        if argument in PER_TOKEN and gradient.dim() > 2:
            assert (gradient.movedim(-1, 1)[pad] == 0).all(), argument


def test_nan_in_one_sequence_stays_there():
    kwargs = arguments("cu_seqlens")
    for name in PER_TOKEN:
        kwargs[name][..., 0:5] = math.nan
    kwargs["initial_states"][1] = math.nan
    out, final = selective_scan_ref(**kwargs)
    assert out[..., :5].isnan().all()
    assert out[..., 5:].isfinite().all()
    assert final[[0, 2, 3, 4]].isfinite().all()
    found = gradients(kwargs, torch.ones_like(out), torch.ones_like(final))
    for name in PER_TOKEN:
        assert found[name][..., 5:].isfinite().all(), name
    assert found["initial_states"][[0, 2, 3, 4]].isfinite().all()


def test_nan_in_one_row_stays_there():
    kwargs = arguments("all_options")
    for name in PER_TOKEN:
        kwargs[name][0] = math.nan
    out, final = selective_scan_ref(**kwargs)
    found = gradients(kwargs, torch.ones_like(out), torch.ones_like(final))
    assert out[1].isfinite().all()
    assert final[1].isfinite().all()
    assert all(found[name][1].isfinite().all() for name in (*PER_TOKEN, "initial_states"))


def test_final_state_includes_a_constant_input_weight():
    kwargs = arguments("constant_B", initial_states=None, dt_softplus=False, dt_bias=None)
    kwargs |= {
        name: value[..., :1] for name, value in kwargs.items() if name in ("x", "dt", "z", "C")
    }
    _, final = selective_scan_ref(**kwargs)
    expected = (kwargs["dt"] * kwargs["x"]) * kwargs["B"]
    assert_close(final, expected, EXACT)


def test_gradient_flows_through_final_states():
    kwargs = arguments("all_options")
    out, final = selective_scan_ref(**kwargs)
    found = gradients(kwargs, torch.zeros_like(out), torch.ones_like(final))
    for name in ("x", "dt", "A", "B", "dt_bias", "initial_states"):
        assert found[name].abs().sum() > 0, name
    assert (found["C"] == 0).all()


def test_softplus_is_exact_in_both_tails():
    x = torch.ones(1, 1, 1)
    raw = torch.tensor([-80.0, -40.0, -20.0, 0.0, 19.9, 20.5, 100.0])
    ones = torch.ones(1, 1)
    for value in raw.tolist():
        dt = torch.full((1, 1, 1), value, requires_grad=True)
        # A 0, B 1, C 1: the output of the first token is the step itself.
        out = selective_scan_ref(x, dt, 0 * ones, ones, ones, dt_softplus=True)
        out.sum().backward()
        step, slope = out.item(), dt.grad.item()
        expected = value if value > 20 else math.log1p(math.exp(value))
        assert step == pytest.approx(expected, rel=1e-6)
        assert slope == pytest.approx(1 / (1 + math.exp(-value)), rel=1e-6)
    assert step == 100.0
    assert slope == 1.0


def test_large_decay_and_large_steps_stay_finite():
    """exp(dt A) underflows to 0 and nothing divides by it."""
    kwargs = arguments("several_chunks", dt_softplus=False)
    kwargs["dt"] = torch.full_like(kwargs["dt"], 20.0)
    kwargs["A"] = torch.full_like(kwargs["A"], -100.0)
    out, final = selective_scan_ref(**kwargs)
    found = gradients(kwargs, torch.ones_like(out), torch.ones_like(final))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("name", ["no_tokens", "no_rows", "no_channels"])
def test_empty_inputs(name):
    kwargs = arguments(name)
    out, final = selective_scan_ref(**kwargs)
    assert out.shape == kwargs["x"].shape
    assert torch.equal(final, kwargs["initial_states"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wide", ["x", "A", "D", "initial_states", None])
def test_dtypes_of_results(dtype, wide):
    kwargs = make(get_case("selective_scan", "all_options"), dtype) | {"return_final_states": True}
    if wide is not None:
        kwargs[wide] = kwargs[wide].double()
    out, final = selective_scan_ref(**kwargs)
    double = dtype == torch.float64 or wide is not None
    assert out.dtype == kwargs["x"].dtype
    assert final.dtype == (torch.float64 if double else torch.float32)


def test_complex_states_equal_their_conjugate_pairs():
    """A complex state stands for itself and its conjugate: a scan with both spelled out."""
    kwargs = arguments("complex", return_final_states=False)
    out = selective_scan_ref(**kwargs)
    both = {
        name: torch.cat([kwargs[name], kwargs[name].conj()], dim=1).to(torch.complex128) / scale
        for name, scale in (("A", 1), ("B", 1), ("C", 2))
    }
    assert_close(selective_scan_ref(**(kwargs | both)), out, EXACT)


def test_states_are_complex_exactly_if_the_decay_is():
    assert selective_scan_ref(**arguments("all_options"))[1].dtype == torch.float64
    assert selective_scan_ref(**arguments("complex_all"))[1].dtype == torch.complex128


def test_gate_is_silu_after_the_skip():
    kwargs = arguments("D_and_z", return_final_states=False)
    x, z, D = kwargs["x"], kwargs["z"], kwargs["D"]
    plain = selective_scan_ref(**(kwargs | {"D": None, "z": None}))
    assert_close(selective_scan_ref(**kwargs), (plain + D[:, None] * x) * F.silu(z), EXACT)


def test_two_kinds_of_packing_at_once_are_refused():
    kwargs = arguments("cu_seqlens", seq_idx=torch.zeros(1, 17, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="seq_idx and cu_seqlens were both given"):
        selective_scan_ref(**kwargs)
