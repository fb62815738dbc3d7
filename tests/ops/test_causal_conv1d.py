# SPDX-License-Identifier: Apache-2.0
"""What is special to causal_conv1d: states, packing, reverse, layouts, channel counts, dtypes.

Faults reported against other libraries are in test_faults_conv.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.differential import (
    assert_same,
    call,
    check_sequence,
    differentiate,
    draw_cotangents,
    exact_results,
)
from helpers.layouts import LAYOUTS, lay_out
from helpers.op_inputs import Draw, conv_inputs
from helpers.packing import PACKINGS, flip_runs, pieces, poison, runs_of

from statescan import reference
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

OP = "causal_conv1d"
FLOAT32 = tolerance(OP, torch.float32)
GRADIENT = tolerance(OP, torch.float32, gradient=True)
WIDTHS = (1, 2, 3, 4, 5, 9)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cuts", [(4, 5), (1, 8), (0, 9), (3, 0, 1, 5), (1,) * 9])
def test_state_carries_over(backend, width, cuts):
    """Pieces of a sequence, each started from the state before it, are the whole, gradients too."""
    kwargs = conv_inputs(width=width)
    cotangents = draw_cotangents(OP, kwargs)
    exact = exact_results(OP, kwargs, cotangents)

    def in_pieces(**named):
        state, outputs, start = named["initial_states"], [], 0
        for length in cuts:
            part = pieces(named, start, start + length) | {"initial_states": state}
            out, state = call(OP, part, backend)
            outputs.append(out)
            start += length
        return torch.cat(outputs, dim=2), state

    results = differentiate(in_pieces, OP, kwargs, cotangents)
    for name, result in results.items():
        assert_close(result, exact[name], GRADIENT if name[0] == "d" else FLOAT32, name)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("width", [1, 2, 4, 9])
def test_packed_sequences_are_each_alone(backend, width, packing, reverse):
    """Outputs, states and the gradients of all inputs, with NaN wherever there is padding."""
    rows, states = len(packing.rows), packing.num_states
    for layout in ("contiguous", "channel_last"):
        kwargs = conv_inputs(rows, 5, packing.seqlen, width, num_states=states, seed=3)
        kwargs = poison(kwargs | packing.arguments() | {"reverse": reverse}, packing)
        kwargs["x"] = lay_out(kwargs["x"], layout)
        cotangents = draw_cotangents(OP, kwargs)
        exact = runs_of(OP, kwargs, packing, cotangents)
        results = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
        assert set(results) == set(exact)
        for name, result in results.items():
            assert_close(result, exact[name], GRADIENT if name[0] == "d" else FLOAT32, name)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("spread", ["rows", "seq_idx", "cu_seqlens"])
def test_nan_stays_in_its_sequence(backend, width, reverse, spread):
    """What other sequences hold has no influence on the bits of outputs, states and gradients."""
    batch, seqlen = (3, 6) if spread == "rows" else (1, 18)
    states = 3 if spread == "cu_seqlens" else batch
    kwargs = conv_inputs(batch, 5, seqlen, width, num_states=states) | {"reverse": reverse}
    if spread == "seq_idx":
        kwargs["seq_idx"] = torch.tensor([[0] * 6 + [1] * 6 + [2] * 6])
    elif spread == "cu_seqlens":
        kwargs["cu_seqlens"] = torch.tensor([0, 6, 12, 18])

    def middle(tensor):
        return tensor[1:2] if spread == "rows" else tensor[..., 6:12]

    cotangents = draw_cotangents(OP, kwargs)
    spoilt = kwargs | {"x": torch.full_like(kwargs["x"], math.nan)}
    middle(spoilt["x"]).copy_(middle(kwargs["x"]))
    bad = {name: torch.full_like(value, math.nan) for name, value in cotangents.items()}
    middle(bad["out"]).copy_(middle(cotangents["out"]))
    if spread != "seq_idx":
        spoilt["initial_states"] = torch.full_like(kwargs["initial_states"], math.nan)
        spoilt["initial_states"][1] = kwargs["initial_states"][1]
        bad["final_states"][1] = cotangents["final_states"][1]

    def run(named, seeds):
        return differentiate(lambda **inner: call(OP, inner, backend), OP, named, seeds)

    clean, dirty = run(kwargs, cotangents), run(spoilt, bad)
    for name in ("out", "dx"):
        assert_same(middle(dirty[name]), middle(clean[name]), name)
        assert middle(dirty[name]).isfinite().all(), name
    if spread != "seq_idx":
        for name in ("final_states", "dinitial_states"):
            assert_same(dirty[name][1], clean[name][1], name)


def test_nan_reaches_only_the_taps_that_meet_it(backend):
    """A NaN token spoils the width - 1 outputs behind it, a NaN state column those it reaches."""
    width = 4
    kwargs = conv_inputs(1, 2, 12, width)
    kwargs["x"][..., 5] = math.nan
    out, states = call(OP, kwargs, backend)
    assert out.isnan().any(dim=(0, 1)).nonzero().flatten().tolist() == [5, 6, 7, 8]
    assert states.isfinite().all()
    out, _ = call(OP, kwargs | {"reverse": True}, backend)
    assert out.isnan().any(dim=(0, 1)).nonzero().flatten().tolist() == [2, 3, 4, 5]
    for column in range(width - 1):
        kwargs = conv_inputs(1, 2, 12, width)
        kwargs["initial_states"][..., column] = math.nan
        out, _ = call(OP, kwargs, backend)
        reached = out.isnan().any(dim=(0, 1)).nonzero().flatten().tolist()
        assert reached == list(range(column + 1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_reverse_flips_inside_each_run(backend, width, packing):
    """Taps and state columns keep their order."""
    kwargs = conv_inputs(len(packing.rows), 4, packing.seqlen, width, num_states=packing.num_states)
    kwargs |= packing.arguments()
    out, states = call(OP, kwargs | {"reverse": True}, backend)
    expected, expected_states = call(OP, kwargs | {"x": flip_runs(kwargs["x"], packing)}, backend)
    assert_close(out, flip_runs(expected, packing), FLOAT32)
    assert_same(states, expected_states)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_strides(backend, layout, dtype):
    for seqlen, reverse in ((11, False), (16, True)):
        kwargs = conv_inputs(2, 6, seqlen, dtype=dtype) | {"reverse": reverse}
        kwargs = {n: lay_out(v, layout) for n, v in kwargs.items()}
        check_sequence(OP, kwargs, backend)
        packed = kwargs | {
            "seq_idx": lay_out(
                torch.tensor([[0] * seqlen, [0, 1] + [-1] * 2 + [1] * (seqlen - 4)]),
                "axes_reversed",
            )
        }
        check_sequence(OP, packed, backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "weight", "bias", "initial_states"])
def test_strides_of_one_argument(backend, layout, name):
    kwargs = conv_inputs(2, 6, 11)
    check_sequence(OP, kwargs | {name: lay_out(kwargs[name], layout)}, backend)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last", "every_other", "slice_of_wide"])
@pytest.mark.parametrize("dim", [*range(1, 18), 31, 32, 33, 63, 64, 65, 100, 333])
def test_any_number_of_channels(backend, dim, layout):
    kwargs = conv_inputs(2, dim, 7)
    check_sequence(OP, kwargs | {"x": lay_out(kwargs["x"], layout)}, backend)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33])
def test_any_width(backend, width, layout):
    for seqlen in (1, 2, width - 1, width, width + 1, 40):
        kwargs = conv_inputs(2, 3, seqlen, width)
        check_sequence(
            OP, kwargs | {"x": lay_out(kwargs["x"], layout)}, backend, ill_conditioned=True
        )


def test_layout_of_x_is_layout_of_results(backend):
    """Channel-last in, channel-last out, dense; the gradient likewise."""
    kwargs = conv_inputs(2, 5, 11)
    kwargs["x"] = lay_out(kwargs["x"], "channel_last")
    results = check_sequence(OP, kwargs, backend)
    assert results["out"].stride() == results["dx"].stride() == (55, 1, 5)
    results = check_sequence(OP, conv_inputs(2, 5, 11), backend)
    assert results["out"].stride() == results["dx"].stride() == (55, 11, 1)
    wide = torch.randn(2, 11, 40)[..., 7:12].transpose(1, 2)
    results = check_sequence(OP, kwargs | {"x": wide}, backend)
    assert results["out"].stride() == results["dx"].stride() == (55, 1, 5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("batch", "dim", "seqlen"),
    [(0, 4, 8), (2, 4, 0), (2, 0, 8), (0, 0, 0), (2, 4, 1), (1, 4, 3), (0, 4, 0), (2, 0, 0)],
)
def test_empty_and_shortest(backend, batch, dim, seqlen, width):
    for layout in ("contiguous", "channel_last"):
        kwargs = conv_inputs(batch, dim, seqlen, width)
        kwargs["x"] = lay_out(kwargs["x"], layout)
        results = check_sequence(OP, kwargs, backend)
        if seqlen == 0:
            assert_same(results["final_states"], kwargs["initial_states"])
            assert_same(results["dinitial_states"], draw_cotangents(OP, kwargs)["final_states"])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_sequences_without_tokens(backend, reverse, width):
    """Their final state is their initial one, in memory of its own; without one it is zero."""
    for bounds in ([0], [0, 0], [0, 0, 0, 0]):
        kwargs = conv_inputs(1, 4, 0, width, num_states=len(bounds) - 1) | {"reverse": reverse}
        kwargs["cu_seqlens"] = torch.tensor(bounds)
        results = check_sequence(OP, kwargs, backend)
        assert_same(results["final_states"], kwargs["initial_states"])
        assert not call(OP, kwargs | {"initial_states": None}, backend)[1].any()
    only_pads = conv_inputs(2, 4, 5, width)
    only_pads |= {"seq_idx": torch.full((2, 5), -3), "reverse": reverse}
    results = check_sequence(OP, only_pads, backend)
    assert_same(results["final_states"], only_pads["initial_states"])
    assert not results["out"].any() and not results["dx"].any() and not results["dbias"].any()


def test_sequence_shorter_than_the_taps_keeps_the_end_of_its_state(backend):
    kwargs = conv_inputs(1, 2, 2, 5)
    _, states = call(OP, kwargs, backend)
    assert_same(states, torch.cat([kwargs["initial_states"][..., 2:], kwargs["x"]], dim=2))
    _, states = call(OP, kwargs | {"initial_states": None}, backend)
    assert_same(states, torch.cat([torch.zeros(1, 2, 2), kwargs["x"]], dim=2))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_mix_of_dtypes(backend, x_dtype):
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    made = conv_inputs(1, 2, 6)
    for weight, bias, states in itertools.product(kinds, repeat=3):
        mix = {"x": x_dtype, "weight": weight, "bias": bias, "initial_states": states}
        kwargs = made | {name: made[name].to(dtype) for name, dtype in mix.items()}
        results = check_sequence(OP, kwargs, backend, ill_conditioned=True)
        assert results["out"].dtype == results["final_states"].dtype == x_dtype


def test_swish_is_silu_and_nothing_else_is_known(backend):
    kwargs = conv_inputs()
    silu, swish = (
        call(OP, kwargs | {"activation": name}, backend)[0] for name in ("silu", "swish")
    )
    assert_same(silu, swish)
    with pytest.raises(ValueError, match="activation"):
        call(OP, kwargs | {"activation": "gelu"}, backend)


def test_activation_far_from_zero(backend):
    """SiLU of large numbers is the identity or 0, its gradient 1 or 0, never NaN."""
    values = torch.tensor([-1e4, -200.0, -100.0, -88.8, -20.0, -1e-3, 0.0, 20.0, 88.8, 1e4])
    kwargs = {"x": values.view(1, 1, -1), "weight": torch.ones(1, 1), "activation": "silu"}
    check_sequence(OP, kwargs, backend)
    leaf = kwargs["x"].detach().requires_grad_()
    out = call(OP, kwargs | {"x": leaf}, backend)
    out.sum().backward()
    assert_close(out.detach(), reference.causal_conv1d_ref(**kwargs), FLOAT32)
    assert leaf.grad.isfinite().all() and leaf.grad[0, 0, 0] == 0 and leaf.grad[0, 0, -1] == 1


def test_lazily_negated_inputs(backend):
    kwargs = conv_inputs()
    lazy = {
        n: torch.conj(torch.complex(torch.ones_like(v), v)).imag
        if isinstance(v, torch.Tensor)
        else v
        for n, v in kwargs.items()
    }
    check_sequence(OP, lazy, backend)
    check_sequence(
        OP, lazy | {"seq_idx": torch.tensor([[0] * 5 + [1] * 4, [-1] * 3 + [0] * 6])}, backend
    )


def test_one_input_at_a_time_requires_grad(backend):
    kwargs = conv_inputs()
    cotangents = draw_cotangents(OP, kwargs)
    exact = exact_results(OP, kwargs, cotangents)
    for name in ("x", "weight", "bias", "initial_states"):
        leaf = kwargs[name].detach().requires_grad_()
        results = call(OP, kwargs | {name: leaf}, backend)
        (gradient,) = torch.autograd.grad(results, leaf, list(cotangents.values()))
        assert_close(gradient, exact[f"d{name}"], GRADIENT, name)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
def test_many_sequences_of_random_lengths(backend, reverse, layout):
    draw = Draw(5)
    lengths = [draw.choice((0, 1, 1, 2, 3, 7, 64, 65, 300)) for _ in range(60)]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    kwargs = conv_inputs(1, 3, int(bounds[-1]), 4, num_states=len(lengths))
    kwargs |= {"cu_seqlens": bounds, "reverse": reverse, "x": lay_out(kwargs["x"], layout)}
    check_sequence(OP, kwargs, backend, ill_conditioned=True)
    ids = torch.tensor([[i % 2 - (i % 7 == 3) for i, n in enumerate(lengths) for _ in range(n)]])
    packed = kwargs | {"cu_seqlens": None, "seq_idx": ids}
    packed["initial_states"] = kwargs["initial_states"][:1]
    check_sequence(OP, packed, backend, ill_conditioned=True)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("reverse", [False, True])
def test_longer_than_a_block_in_every_direction(backend, layout, reverse):
    """Results do not show where work is cut: long rows, many rows, many channels."""
    for batch, dim, seqlen in ((1, 2, 5003), (130, 9, 120), (2, 1100, 140)):
        kwargs = conv_inputs(batch, dim, seqlen) | {"reverse": reverse}
        kwargs["x"] = lay_out(kwargs["x"], layout)
        check_sequence(OP, kwargs, backend, ill_conditioned=True)
