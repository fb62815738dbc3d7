# SPDX-License-Identifier: Apache-2.0
"""What is special to selective_scan: states, packing, reverse, layouts, sizes, complex, dtypes.

Faults reported against other libraries are in test_faults_scan.py.
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
from helpers.op_inputs import Draw, scan_inputs
from helpers.packing import PACKINGS, flip_runs, pieces, poison, runs_of

from statescan import reference
from statescan.testing import assert_close, in_double, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

OP = "selective_scan"
FLOAT32 = tolerance(OP, torch.float32)
GRADIENT = tolerance(OP, torch.float32, gradient=True)
TOKENS = ("x", "dt", "B", "C", "z")
KINDS = [
    pytest.param({}, id="plain"),
    pytest.param({"ngroups": 2}, id="groups"),
    pytest.param({"constant": "B"}, id="constant_B"),
    pytest.param({"constant": "BC"}, id="constant_B_C"),
    pytest.param({"is_complex": True, "ngroups": 2}, id="complex"),
    pytest.param({"is_complex": True, "constant": "BC"}, id="complex_constant"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(4, 5), (1, 8), (0, 9), (3, 0, 1, 5), (1,) * 9])
def test_state_carries_over(backend, kind, cuts):
    """Pieces of a sequence, each started from the state before it, are the whole, gradients too."""
    kwargs = scan_inputs(**kind)
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
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_each_alone(backend, kind, packing, reverse):
    """Outputs, states and the gradients of all inputs, with NaN wherever there is padding."""
    kwargs = scan_inputs(
        len(packing.rows), 4, packing.seqlen, num_states=packing.num_states, seed=3, **kind
    )
    kwargs = poison(kwargs | packing.arguments() | {"reverse": reverse}, packing)
    cotangents = draw_cotangents(OP, kwargs)
    exact = runs_of(OP, kwargs, packing, cotangents)
    results = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
    assert set(results) == set(exact)
    for name, result in results.items():
        assert_close(result, exact[name], GRADIENT if name[0] == "d" else FLOAT32, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("spread", ["rows", "seq_idx", "cu_seqlens"])
def test_nan_stays_in_its_sequence(backend, kind, reverse, spread):
    """What other sequences hold has no influence on the bits of outputs, states and gradients."""
    batch, seqlen = (3, 6) if spread == "rows" else (1, 18)
    kwargs = scan_inputs(
        batch, 4, seqlen, num_states=3 if spread == "cu_seqlens" else batch, **kind
    )
    kwargs["reverse"] = reverse
    if spread == "seq_idx":
        kwargs["seq_idx"] = torch.tensor([[0] * 6 + [1] * 6 + [2] * 6])
    elif spread == "cu_seqlens":
        kwargs["cu_seqlens"] = torch.tensor([0, 6, 12, 18])

    def middle(tensor):
        return tensor[1:2] if spread == "rows" else tensor[..., 6:12]

    cotangents = draw_cotangents(OP, kwargs)
    spoilt = dict(kwargs)
    for name in TOKENS:
        if kwargs[name].shape[-1] == seqlen and kwargs[name].dim() > 2:
            spoilt[name] = torch.full_like(kwargs[name], math.nan)
            middle(spoilt[name]).copy_(middle(kwargs[name]))
    if spread != "seq_idx":
        spoilt["initial_states"] = torch.full_like(kwargs["initial_states"], math.nan)
        spoilt["initial_states"][1] = kwargs["initial_states"][1]
    bad = {name: torch.full_like(value, math.nan) for name, value in cotangents.items()}
    middle(bad["out"]).copy_(middle(cotangents["out"]))
    if spread != "seq_idx":
        bad["final_states"][1] = cotangents["final_states"][1]

    def run(named, seeds):
        return differentiate(lambda **inner: call(OP, inner, backend), OP, named, seeds)

    clean, dirty = run(kwargs, cotangents), run(spoilt, bad)
    for name in ("out", *(f"d{token}" for token in TOKENS)):
        if dirty[name].dim() > 2:
            assert_same(middle(dirty[name]), middle(clean[name]), name)
            assert middle(dirty[name]).isfinite().all(), name
    if spread != "seq_idx":
        for name in ("final_states", "dinitial_states"):
            assert_same(dirty[name][1], clean[name][1], name)


@pytest.mark.parametrize("kind", KINDS)
def test_reverse_is_flip_scan_flip(backend, kind):
    kwargs = scan_inputs(**kind)
    out, states = call(OP, kwargs | {"reverse": True}, backend)
    flipped = {n: kwargs[n].flip(-1) for n in TOKENS if kwargs[n].dim() > 2}
    expected, expected_states = call(OP, kwargs | flipped, backend)
    assert_same(out, expected.flip(-1))
    assert_same(states, expected_states)


@pytest.mark.parametrize("packing", PACKINGS)
def test_reverse_flips_inside_each_run(backend, packing):
    kwargs = scan_inputs(len(packing.rows), 4, packing.seqlen, num_states=packing.num_states)
    kwargs |= packing.arguments()
    out, states = call(OP, kwargs | {"reverse": True}, backend)
    flipped = {n: flip_runs(kwargs[n], packing) for n in TOKENS}
    expected, expected_states = call(OP, kwargs | flipped, backend)
    assert_same(out, flip_runs(expected, packing))
    assert_same(states, expected_states)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(backend, layout, kind):
    kwargs = {n: lay_out(v, layout) for n, v in scan_inputs(2, 4, 11, **kind).items()}
    check_sequence(OP, kwargs, backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"])
def test_strides_of_one_argument(backend, layout, name):
    kwargs = scan_inputs(2, 4, 11, ngroups=2)
    check_sequence(OP, kwargs | {name: lay_out(kwargs[name], layout)}, backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reverse", [False, True])
def test_strides_of_incoming_gradients(backend, layout, reverse):
    kwargs = scan_inputs(2, 4, 11) | {"reverse": reverse}
    cotangents = {n: lay_out(v, layout) for n, v in draw_cotangents(OP, kwargs).items()}
    check_sequence(OP, kwargs, backend, cotangents=cotangents)


def test_layout_of_x_is_layout_of_results(backend):
    """Channel-last in, channel-last out, dense; and each gradient as its input."""
    kwargs = scan_inputs(2, 5, 11)
    for name in ("x", "z"):
        kwargs[name] = lay_out(kwargs[name], "channel_last")
    results = check_sequence(OP, kwargs, backend)
    assert results["out"].stride() == results["dx"].stride() == results["dz"].stride() == (55, 1, 5)
    assert results["ddt"].stride() == (55, 11, 1)
    kwargs["x"] = lay_out(kwargs["x"], "every_other")
    assert call(OP, kwargs, backend)[0].is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "dim", "seqlen"),
    [(0, 4, 8), (2, 4, 0), (2, 0, 8), (0, 0, 0), (2, 4, 1), (1, 4, 3), (0, 4, 0), (2, 0, 0)],
)
def test_empty_and_shortest(backend, batch, dim, seqlen, kind):
    results = check_sequence(OP, scan_inputs(batch, dim, seqlen, **kind), backend)
    if seqlen == 0:
        assert_same(
            results["dinitial_states"],
            draw_cotangents(OP, scan_inputs(batch, dim, 0, **kind))["final_states"],
        )


@pytest.mark.parametrize("reverse", [False, True])
def test_sequences_without_tokens(backend, reverse):
    """Their final state is their initial one, in memory of its own; without one it is zero."""
    for bounds in ([0], [0, 0], [0, 0, 0, 0]):
        kwargs = scan_inputs(1, 4, 0, num_states=len(bounds) - 1) | {"reverse": reverse}
        kwargs["cu_seqlens"] = torch.tensor(bounds)
        results = check_sequence(OP, kwargs, backend)
        assert_same(results["final_states"], kwargs["initial_states"])
        assert not call(OP, kwargs | {"initial_states": None}, backend)[1].any()
    only_pads = scan_inputs(2, 4, 5) | {"seq_idx": torch.full((2, 5), -3), "reverse": reverse}
    results = check_sequence(OP, only_pads, backend)
    assert_same(results["final_states"], only_pads["initial_states"])
    assert not results["out"].any() and not results["dx"].any() and not results["dD"].any()


@pytest.mark.parametrize("dstate", [1, 2, 3, 5, 8, 16, 17, 64, 100, 128, 256, 257])
@pytest.mark.parametrize("kind", KINDS)
def test_any_dstate(backend, dstate, kind):
    check_sequence(OP, scan_inputs(1, 2, 5, dstate, **kind), backend, ill_conditioned=True)


@pytest.mark.parametrize(
    ("dim", "groups"), [(6, (1, 2, 3, 6)), (68, (1, 2, 4)), (70, (2, 35)), (1, (1,))]
)
def test_any_number_of_groups(backend, dim, groups):
    """B and C may differ in theirs; neighbouring channels share a group."""
    for b, c in itertools.product(groups, repeat=2):
        kwargs = scan_inputs(2, dim, 5, ngroups=b)
        kwargs["C"] = scan_inputs(2, dim, 5, ngroups=c, seed=9)["C"]
        check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("is_complex", [False, True])
def test_every_combination_of_options(backend, is_complex):
    names = ("D", "z", "dt_bias", "initial_states")
    for given in itertools.product([False, True], repeat=4):
        options = " ".join(n for n, used in zip(names, given, strict=True) if used)
        kwargs = scan_inputs(1, 2, 4, 2, options=options, is_complex=is_complex)
        for softplus in (False, True):
            kwargs["dt_softplus"] = softplus
            check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("B_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_mix_of_dtypes(backend, x_dtype, B_dtype):
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    made = scan_inputs(1, 2, 3, 2)
    for A, D, z in itertools.product(kinds, repeat=3):
        mix = {"x": x_dtype, "B": B_dtype, "C": A, "A": A, "D": D, "dt_bias": z, "z": z, "dt": D}
        mix["initial_states"] = D
        kwargs = made | {name: made[name].to(dtype) for name, dtype in mix.items()}
        out, states = call(OP, kwargs, backend)
        exact = reference.selective_scan_ref(**in_double(kwargs))
        assert (out.dtype, states.dtype) == (x_dtype, torch.float32)
        assert_close(out, exact[0], tolerance(OP, x_dtype), "out")
        assert_close(states, exact[1], FLOAT32, "final_states")


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_keep_their_inputs_dtypes(backend, x_dtype):
    kinds = itertools.cycle((torch.float16, torch.float32, torch.bfloat16))
    for _ in range(3):
        made = scan_inputs(2, 3, 5)
        next(kinds)
        names = [n for n, v in made.items() if isinstance(v, torch.Tensor) and n != "x"]
        mix = {n: made[n].to(next(kinds)) for n in names} | {"x": made["x"].to(x_dtype)}
        check_sequence(OP, made | mix, backend, ill_conditioned=True)


@pytest.mark.parametrize(
    "double", ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"]
)
def test_one_double_makes_all_arithmetic_double(backend, double):
    kwargs = scan_inputs()
    kwargs[double] = kwargs[double].double()
    results = check_sequence(OP, kwargs, backend)
    assert results["final_states"].dtype == torch.float64
    assert results["out"].dtype == kwargs["x"].dtype
    exact = reference.selective_scan_ref(
        **{n: v.double() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    )
    assert_close(results["final_states"], exact[1], tolerance(OP, torch.float64), "final_states")


def test_lazily_conjugated_and_negated_inputs(backend):
    """Views with torch's conjugate and negative bits mean what they say."""
    kwargs = scan_inputs(is_complex=True, ngroups=2)
    lazy = dict(kwargs)
    for name in ("A", "B", "C", "initial_states"):
        lazy[name] = torch.conj(kwargs[name])
    for name in ("x", "dt", "z"):
        lazy[name] = torch.conj(torch.complex(kwargs["D"][0] + 0 * kwargs[name], kwargs[name])).imag
    check_sequence(OP, lazy, backend)
    check_sequence(
        OP, lazy | {"seq_idx": torch.tensor([[0] * 5 + [1] * 4, [-1] * 3 + [0] * 6])}, backend
    )


def test_one_input_at_a_time_requires_grad(backend):
    """The gradient of an input does not depend on which others have one."""
    for kind in ({"ngroups": 2}, {"constant": "BC"}):
        kwargs = scan_inputs(**kind)
        cotangents = draw_cotangents(OP, kwargs)
        exact = exact_results(OP, kwargs, cotangents)
        for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"):
            leaf = kwargs[name].detach().requires_grad_()
            results = call(OP, kwargs | {name: leaf}, backend)
            seeds = list(cotangents.values())
            (gradient,) = torch.autograd.grad(results, leaf, seeds)
            assert_close(gradient, exact[f"d{name}"], GRADIENT, name)


def test_many_sequences_of_random_lengths(backend):
    draw = Draw(5)
    lengths = [draw.choice((0, 1, 1, 2, 3, 7, 64, 65)) for _ in range(40)]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    for reverse in (False, True):
        kwargs = scan_inputs(1, 3, int(bounds[-1]), 2, num_states=len(lengths))
        kwargs |= {"cu_seqlens": bounds, "reverse": reverse}
        check_sequence(OP, kwargs, backend, ill_conditioned=True)


WIDE = [
    pytest.param(scan_inputs(1, 300, 200, 40), id="chunks_within_a_saved_one"),
    pytest.param(scan_inputs(1, 300, 100, 40, constant="BC"), id="chunks_of_constants"),
    pytest.param(scan_inputs(1, 1100, 12, 32), id="channels_in_parts"),
    pytest.param(scan_inputs(1, 1100, 12, 32, ngroups=2), id="groups_in_parts"),
    pytest.param(scan_inputs(1, 1100, 12, 32, ngroups=50), id="small_groups_in_parts"),
    pytest.param(scan_inputs(1, 1100, 12, 32, ngroups=1100), id="channels_of_their_own_in_parts"),
    pytest.param(scan_inputs(50, 30, 8, 30, ngroups=3), id="rows_in_parts"),
    pytest.param(scan_inputs(1, 40, 100, 120, is_complex=True, ngroups=2), id="complex_in_parts"),
    pytest.param(scan_inputs(7, 30, 40, 30, is_complex=True), id="complex_rows_in_parts"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kwargs", WIDE)
def test_larger_than_a_block_in_every_direction(backend, kwargs, packed):
    """Results do not show where work is cut, nor where sequences meet those cuts."""
    batch, _, seqlen = kwargs["x"].shape
    if packed:
        ids = torch.arange(seqlen) // 13
        ids[5:9] = -1
        seq_idx = torch.stack([ids.roll(row) for row in range(batch)])
        kwargs = kwargs | {"seq_idx": seq_idx, "reverse": True}
    check_sequence(OP, kwargs, backend, ill_conditioned=True)
