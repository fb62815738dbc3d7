# SPDX-License-Identifier: Apache-2.0
"""What is special to mamba_inner: the projections, norms and constant parts around conv and scan.

Convolution and scan themselves have their own test files.
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
from helpers.op_inputs import Draw, inner_inputs
from helpers.packing import PACKINGS, flip_runs, pieces, poison, runs_of
from torch.nn import functional as F

from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

OP = "mamba_inner"
FLOAT32 = tolerance(OP, torch.float32)
GRADIENT = tolerance(OP, torch.float32, gradient=True)
STATES = "conv_initial_states initial_states"
USUAL = f"conv_bias D dt_bias out_proj_weight {STATES}"
NORMS = "b_norm_weight c_norm_weight dt_norm_weight"
KINDS = [
    pytest.param({}, id="usual"),
    pytest.param({"options": STATES}, id="no_out_proj"),
    pytest.param({"options": f"{USUAL} out_proj_bias b_proj_bias c_proj_bias"}, id="biases"),
    pytest.param({"options": f"{USUAL} {NORMS} b_proj_bias"}, id="norms"),
    pytest.param({"constant": "B", "options": f"{USUAL} c_norm_weight"}, id="constant_B"),
    pytest.param({"constant": "C", "options": f"{USUAL} b_proj_bias"}, id="constant_C"),
    pytest.param({"constant": "BC"}, id="constant_B_C"),
    pytest.param({"is_complex": True, "options": f"{USUAL} {NORMS} c_proj_bias"}, id="complex"),
]
PACKED_KINDS = [kind for kind in KINDS if kind.id in ("biases", "norms", "constant_B_C", "complex")]


def time_axis(kwargs):
    return 1 if kwargs.get("out_proj_weight") is not None else 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(3, 4), (0, 7), (2, 0, 1, 4), (1,) * 7])
def test_states_carry_over(backend, kind, cuts):
    """Pieces, each started from the states before it, are the whole, gradients too."""
    kwargs = inner_inputs(**kind)
    cotangents = draw_cotangents(OP, kwargs)
    exact = exact_results(OP, kwargs, cotangents)

    def in_pieces(**named):
        states, outputs, start = [named["conv_initial_states"], named["initial_states"]], [], 0
        for length in cuts:
            part = pieces(named, start, start + length)
            part |= {"conv_initial_states": states[0], "initial_states": states[1]}
            out, *states = call(OP, part, backend)
            outputs.append(out)
            start += length
        return torch.cat(outputs, dim=time_axis(kwargs)), *states

    results = differentiate(in_pieces, OP, kwargs, cotangents)
    for name, result in results.items():
        assert_close(result, exact[name], GRADIENT if name[0] == "d" else FLOAT32, name)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_sequences_are_each_alone(backend, kind, packing, reverse):
    """Outputs, states and the gradients of all inputs, with NaN wherever there is padding."""
    kwargs = inner_inputs(
        len(packing.rows), seqlen=packing.seqlen, num_states=packing.num_states, seed=3, **kind
    )
    kwargs = poison(kwargs | packing.arguments() | {"reverse": reverse}, packing)
    cotangents = draw_cotangents(OP, kwargs)
    exact = runs_of(OP, kwargs, packing, cotangents)
    results = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
    assert set(results) == set(exact)
    for name, result in results.items():
        assert_close(result, exact[name], GRADIENT if name[0] == "d" else FLOAT32, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_eps", [0.0, 1e-6])
def test_padding_gives_zero_and_takes_nothing(backend, kind, norm_eps):
    """No bias of a projection shows at a pad, and NaN in inputs and gradients there is unseen."""
    kwargs = inner_inputs(2, **kind) | {"norm_eps": norm_eps}
    kwargs["seq_idx"] = torch.tensor([[-1, -1, 0, 0, -1, 0, 0], [-2] * 7])
    pads = kwargs["seq_idx"] < 0
    kwargs["xz"] = torch.where(pads[:, None], math.nan, kwargs["xz"])
    cotangents = draw_cotangents(OP, kwargs)
    mask = pads[:, :, None] if time_axis(kwargs) == 1 else pads[:, None]
    cotangents["out"] = torch.where(mask, math.nan, cotangents["out"])
    results = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
    assert not results["out"].masked_select(mask).any()
    assert not results["dxz"].masked_select(pads[:, None]).any()
    for name, result in results.items():
        assert result.isfinite().all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row(backend, kind):
    kwargs = inner_inputs(3, **kind)
    clean = call(OP, kwargs, backend)
    spoilt = dict(kwargs)
    for name in ("xz", "conv_initial_states", "initial_states"):
        spoilt[name] = kwargs[name].clone()
        spoilt[name][::2] = math.nan
    for result, expected in zip(call(OP, spoilt, backend), clean, strict=True):
        assert_close(result[1], expected[1], FLOAT32)
        assert result[::2].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_reverse_flips_inside_each_run(backend, kind, packing):
    kwargs = inner_inputs(
        len(packing.rows), seqlen=packing.seqlen, num_states=packing.num_states, **kind
    )
    kwargs |= packing.arguments()
    out, *states = call(OP, kwargs | {"reverse": True}, backend)
    flipped = kwargs | {"xz": flip_runs(kwargs["xz"], packing)}
    expected, *expected_states = call(OP, flipped, backend)
    if time_axis(kwargs) == 1:
        out, expected = out.transpose(1, 2), expected.transpose(1, 2)
    assert_close(out, flip_runs(expected, packing), FLOAT32)
    for state, expected_state in zip(states, expected_states, strict=True):
        assert_close(state, expected_state, FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(backend, layout, kind):
    kwargs = {n: lay_out(v, layout) for n, v in inner_inputs(**kind).items()}
    check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [{}, {"options": STATES}])
def test_strides_of_incoming_gradients(backend, layout, kind):
    kwargs = inner_inputs(**kind)
    cotangents = {n: lay_out(v, layout) for n, v in draw_cotangents(OP, kwargs).items()}
    check_sequence(OP, kwargs, backend, cotangents=cotangents)


def test_layout_of_results(backend):
    """Channel-last xz gives channel-last results; a projected output is contiguous."""
    kwargs = inner_inputs(options=STATES)
    kwargs["xz"] = lay_out(kwargs["xz"], "channel_last")
    results = check_sequence(OP, kwargs, backend)
    assert results["out"].stride() == (28, 1, 4)
    assert results["dxz"].stride() == (56, 1, 8)
    assert call(OP, inner_inputs(), backend)[0].is_contiguous()


OPTIONS = (
    *("conv_bias", "D", "dt_bias", "b_proj_bias", "c_proj_bias", "out_proj_weight"),
    *("out_proj_bias", "b_norm_weight", "c_norm_weight", "dt_norm_weight"),
    *("conv_initial_states", "initial_states"),
)


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_options_together_and_alone(backend, first, is_complex):
    """Each alone, each left out, and all pairs, with and without softplus and activation."""
    chosen = [set(pair) for pair in itertools.combinations_with_replacement(OPTIONS, 2)]
    chosen += [set(OPTIONS) - {name} for name in OPTIONS] + [set(), set(OPTIONS)]
    for number, names in list(enumerate(chosen))[first :: 6 if is_complex else 3]:
        if "out_proj_bias" in names:
            names = names | {"out_proj_weight"}
        options = " ".join(n for n in OPTIONS if n in names)
        kwargs = inner_inputs(1, 3, 4, 2, options=options, is_complex=is_complex)
        kwargs["dt_softplus"] = number % 2 == 0
        if not kwargs["dt_softplus"]:
            # Steps may be negative then, and states grow.
            kwargs["A"] = kwargs["A"] / 16
        kwargs["activation"] = (None, "silu", "swish")[number % 3]
        check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("constant", ["B", "C", "BC"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_constant_parts(backend, constant, is_complex):
    other = {"B": "c_proj_bias c_norm_weight", "C": "b_proj_bias b_norm_weight", "BC": ""}
    for reverse in (False, True):
        options = f"{USUAL} {other[constant]} dt_norm_weight"
        kwargs = inner_inputs(constant=constant, is_complex=is_complex, options=options)
        check_sequence(OP, kwargs | {"reverse": reverse}, backend)


@pytest.mark.parametrize("norm_eps", [0.0, 1e-12, 1e-6, 0.5, 1e3])
def test_norms(backend, norm_eps):
    """Written out in torch: the gradient passes through each norm, to its weight as well."""
    kwargs = inner_inputs(options=f"{NORMS} D dt_bias conv_bias") | {"norm_eps": norm_eps}
    check_sequence(OP, kwargs, backend)
    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    x, z = wide["xz"].chunk(2, dim=1)
    x = F.conv1d(F.pad(x, (3, 0)), wide["conv_weight"][:, None], wide["conv_bias"], groups=4)
    x = F.silu(x)
    parts = torch.einsum("bdl,rd->blr", x, wide["x_proj_weight"]).split((2, 3, 3), dim=-1)
    dt = F.rms_norm(parts[0] @ wide["dt_proj_weight"].t(), (4,), wide["dt_norm_weight"], norm_eps)
    B = F.rms_norm(parts[1], (3,), wide["b_norm_weight"], norm_eps)
    C = F.rms_norm(parts[2], (3,), wide["c_norm_weight"], norm_eps)
    scan = {"x": x, "dt": dt.mT, "A": wide["A"], "B": B.mT, "C": C.mT, "z": z, "dt_softplus": True}
    expected = call("selective_scan", scan | {n: wide[n] for n in ("D", "dt_bias")}, backend)
    assert_close(call(OP, kwargs, backend)[0], expected, FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0}, {"seqlen": 0}, {"batch": 0, "seqlen": 0}, {"seqlen": 1}, {"dt_rank": 1},
        {"dim": 1}, {"d_model": 1}, {"dstate": 1}, {"width": 1}, {"width": 9},
        {"seqlen": 70, "dim": 2}, {"dstate": 33, "dim": 2},
    ],
)  # fmt: skip
def test_empty_and_extreme_sizes(backend, kind, sizes):
    results = check_sequence(OP, inner_inputs(**kind, **sizes), backend, ill_conditioned=True)
    if sizes.get("seqlen") == 0:
        kwargs = inner_inputs(**kind, **sizes)
        assert_same(results["final_states"], kwargs["initial_states"])
        assert_same(results["conv_final_states"], kwargs["conv_initial_states"])


def test_no_channels_and_no_rank(backend):
    check_sequence(OP, inner_inputs(dim=0, d_model=3), backend)
    check_sequence(OP, inner_inputs(d_model=0), backend)
    check_sequence(OP, inner_inputs(dt_rank=0), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS[:7])
def test_half_precision(backend, dtype, kind):
    """Projections round to the dtype of xz as the reference's do; A and D stay as they are."""
    kwargs = inner_inputs(2, 8, 12, dtype=dtype, **kind)
    for name in ("D", "dt_bias"):
        if name in kwargs:
            kwargs[name] = kwargs[name].float()
    check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("xz_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_mix_of_dtypes(backend, xz_dtype):
    kinds = itertools.cycle((torch.float32, torch.bfloat16, torch.float16, torch.bfloat16))
    for _ in range(4):
        made = inner_inputs(options=f"{USUAL} {NORMS} b_proj_bias c_proj_bias out_proj_bias")
        next(kinds)
        names = [n for n, v in made.items() if isinstance(v, torch.Tensor)]
        kwargs = made | {n: made[n].to(next(kinds)) for n in names}
        kwargs["xz"] = made["xz"].to(xz_dtype)
        results = check_sequence(OP, kwargs, backend, ill_conditioned=True)
        assert results["out"].dtype == results["conv_final_states"].dtype == xz_dtype
        assert results["final_states"].dtype == torch.float32


def test_one_double_makes_all_arithmetic_double(backend):
    made = inner_inputs(options=f"{USUAL} {NORMS} b_proj_bias c_proj_bias out_proj_bias")
    for name, value in made.items():
        if isinstance(value, torch.Tensor):
            results = check_sequence(OP, made | {name: value.double()}, backend)
            assert results["final_states"].dtype == torch.float64, name
            assert results["out"].dtype == (torch.float64 if name == "xz" else torch.float32), name


def test_autocast_changes_nothing(backend):
    """Under autocast the op keeps to the dtypes that it is given, forward and backward."""
    kwargs = inner_inputs(options=f"{USUAL} {NORMS}")
    cotangents = draw_cotangents(OP, kwargs)

    def run():
        return differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        results = run()
    for name, result in results.items():
        assert result.dtype == expected[name].dtype
        assert_same(result, expected[name], name)


def test_one_input_at_a_time_requires_grad(backend):
    for kind in (
        {"options": f"{USUAL} {NORMS} b_proj_bias c_proj_bias out_proj_bias"},
        {"constant": "BC"},
    ):
        kwargs = inner_inputs(**kind)
        cotangents = draw_cotangents(OP, kwargs)
        exact = exact_results(OP, kwargs, cotangents)
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                leaf = value.detach().requires_grad_()
                results = call(OP, kwargs | {name: leaf}, backend)
                (gradient,) = torch.autograd.grad(results, leaf, list(cotangents.values()))
                assert_close(gradient, exact[f"d{name}"], GRADIENT, name)


def test_one_result_at_a_time_has_a_gradient(backend):
    """A loss on the conv's or the scan's final states alone reaches everything before them."""
    kwargs = inner_inputs(options=f"{USUAL} {NORMS}")
    cotangents = draw_cotangents(OP, kwargs)
    for name in cotangents:
        check_sequence(OP, kwargs, backend, cotangents={name: cotangents[name]})


@pytest.mark.parametrize(
    "kind", [{"options": f"{USUAL} {NORMS} out_proj_bias b_proj_bias"}, {"is_complex": True}]
)
def test_equal_bits_whatever_the_number_of_threads(backend, kind):
    """Results and gradients of repeated runs, with one thread and with several."""
    kwargs = inner_inputs(3, 70, 210, 5, d_model=37, **kind)
    cotangents = {"out": Draw(3).normal(3, 210, 37)}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results = differentiate(
                lambda **named: call(OP, named, backend), OP, kwargs, cotangents
            )
            for name, result in results.items():
                assert_same(result, expected[name], f"{name} with {threads} threads")
    finally:
        torch.set_num_threads(before)
