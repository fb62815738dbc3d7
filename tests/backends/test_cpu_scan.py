# SPDX-License-Identifier: Apache-2.0
"""The cpu backend's selective scan: right at every vector level, size and stride, fixed bits.

Truth is the reference in float64, judged by the table of tolerances.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache, partial

import pytest
import torch
from helpers.differential import (
    allowed,
    bound_from,
    differentiate,
    exact_results,
    plain_errors,
)
from helpers.layouts import DISTINCT, LAYOUTS, lay_out
from helpers.op_inputs import scan_inputs
from helpers.packing import PACKINGS, Packing, poison

from statescan import ops
from statescan.backends import native
from statescan.backends.cpu import selective_scan as cpu
from statescan.backends.torch import selective_scan as plain
from statescan.errors import BackendUnavailableError
from statescan.testing import all_cases, assert_close, assert_passed, error, run_case, tolerance
from statescan.testing.compare import compare

STATUS = native.status()
pytestmark = pytest.mark.skipif(
    STATUS.library is None, reason=f"the native library is not usable: {STATUS.reason}"
)

OP = "selective_scan"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS, DSTATES = (1, 3, 17, 130), (1, 2, 3, 5, 17, 64, 100, 256)
SEQLENS = (0, 1, 63, 64, 65, 200)


@lru_cache(maxsize=8)
def truth(packing=None, reverse=False, layout="contiguous", **sizes):
    """Arguments, gradients of the results, and what the reference makes of both in float64."""
    if packing is not None:
        sizes |= {"batch": len(packing.rows), "seqlen": packing.seqlen}
        sizes["num_states"] = packing.num_states
    kwargs = scan_inputs(**sizes) | {"reverse": reverse}
    kwargs |= {} if packing is None else packing.arguments()
    # The equal_ layouts change values, so everything is placed before the truth is asked.
    placed = {
        name: value if name in ("seq_idx", "cu_seqlens") else lay_out(value, layout)
        for name, value in kwargs.items()
    }
    cotangents = draw_cotangents(placed, layout)
    return placed, cotangents, exact_results(OP, placed, cotangents)


def draw_cotangents(kwargs, layout="contiguous", seed=1):
    generator = torch.Generator().manual_seed(seed)
    batch, dim, dstate = kwargs["x"].shape[0], *kwargs["A"].shape
    bounds = kwargs.get("cu_seqlens")
    rows = batch if bounds is None else bounds.numel() - 1
    dout = torch.randn(kwargs["x"].shape, generator=generator).to(kwargs["x"].dtype)
    dfinal = torch.randn((rows, dim, dstate), generator=generator)
    return {"out": lay_out(dout, layout), "final_states": lay_out(dfinal, layout)}


def run(kwargs, cotangents, backend="cpu"):
    """Results and all gradients by name."""
    return differentiate(partial(ops.selective_scan, backend=backend), OP, kwargs, cotangents)


def judge(results, kwargs, exact, cotangents=None):
    """With `cotangents`, sums that cancel may lose as many digits as the plain reference does."""
    assert results.keys() == exact.keys()
    bounds = {name: allowed(OP, kwargs, name, result) for name, result in results.items()}
    if cotangents is not None and any(error(results[n], exact[n]) > bounds[n] for n in results):
        costs = plain_errors(OP, kwargs, cotangents)
        bounds = {n: max(bound, bound_from(costs[n], results[n])) for n, bound in bounds.items()}
        if "ddt_bias" in exact:
            # The sum of ddt over all tokens, so its error goes with the size of what is added.
            added = float(exact["ddt"].abs().sum((0, 2)).max())
            bounds["ddt_bias"] *= added / float(exact["ddt_bias"].abs().max())
    assert_passed([compare(n, result, exact[n], bounds[n]) for n, result in results.items()])


def check(**options):
    """Every result and gradient of the call equals the float64 reference's."""
    kwargs, cotangents, exact = truth(**options)
    before = {n: v.clone() for n, v in kwargs.items() if isinstance(v, torch.Tensor)}
    judge(run(kwargs, cotangents), kwargs, exact, cotangents)
    for name, value in before.items():
        assert torch.equal(kwargs[name], value), f"{name} was modified"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", all_cases(OP), ids=str)
def test_cases(case, dtype, level, guarded):
    if case.has("complex"):
        with pytest.raises(BackendUnavailableError, match="its kernels have no complex states"):
            run_case(case, dtype, backend="cpu")
        return
    assert_passed(run_case(case, dtype, backend="cpu"))


def every_pair_of_sizes():
    """dim and dstate in all pairs, each with lengths in turn; all dims and lengths meet."""
    for i, dim in enumerate(DIMS):
        for j, dstate in enumerate(DSTATES):
            yield dim, SEQLENS[(3 * i + j + j // 4) % len(SEQLENS)], dstate
    for i, dim in enumerate(DIMS):
        for seqlen in SEQLENS:
            yield dim, seqlen, DSTATES[(i + seqlen) % 5]


@pytest.mark.parametrize("sizes", sorted(set(every_pair_of_sizes())), ids=str)
def test_sizes(sizes, level, guarded):
    dim, seqlen, dstate = sizes
    check(batch=2, dim=dim, seqlen=seqlen, dstate=dstate)


@pytest.mark.parametrize("shape", [(0, 5, 9, 3), (3, 0, 9, 3), (3, 5, 0, 3), (0, 0, 0, 1)], ids=str)
def test_no_elements(shape, guarded):
    check(**dict(zip(("batch", "dim", "seqlen", "dstate"), shape, strict=True)))


def test_many_rows(level, guarded):
    check(batch=70, dim=5, seqlen=3, dstate=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ngroups", [1, 2, 3, 4, 6, 12, 60])
def test_groups(ngroups, dtype, level, guarded):
    """Up to one group a channel, so that no vector of channels is full."""
    check(batch=2, dim=60, seqlen=40, dstate=5, ngroups=ngroups, dtype=dtype)


@pytest.mark.parametrize("groups", [(1, 60), (60, 1), (4, 6), (3, 15), (20, None), (None, 2)])
def test_groups_of_the_two_weights_may_differ(groups, level, guarded):
    kwargs, cotangents, _ = truth(batch=2, dim=60, seqlen=66, dstate=3)
    kwargs = dict(kwargs)
    for name, ngroups in zip("BC", groups, strict=True):
        axes = () if ngroups is None else (ngroups,)
        kwargs[name] = torch.randn(2, *axes, 3, 66)
    judge(run(kwargs, cotangents), kwargs, exact_results(OP, kwargs, cotangents))


@pytest.mark.parametrize("ngroups", [None, 3, 33])
@pytest.mark.parametrize("constant", ["B", "C", "BC"])
def test_constant_weights(constant, ngroups, level, guarded):
    check(batch=2, dim=33, seqlen=70, dstate=6, constant=constant, ngroups=ngroups)


OPTIONS = ("", "D", "z", "dt_bias", "initial_states", "D z", "dt_bias initial_states")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_may_be_missing(options, reverse, level, guarded):
    check(batch=2, dim=11, seqlen=67, dstate=3, options=options, reverse=reverse)


def test_without_softplus(level, guarded):
    kwargs, cotangents, _ = truth(batch=2, dim=11, seqlen=30, dstate=3, options="D z dt_bias")
    kwargs = kwargs | {"dt_softplus": False, "dt": kwargs["dt"].abs() / 4, "dt_bias": None}
    judge(run(kwargs, cotangents), kwargs, exact_results(OP, kwargs, cotangents))


@pytest.mark.parametrize("results", [("out",), ("final_states",)], ids=str)
def test_either_result_may_have_no_gradient(results, level, guarded):
    kwargs, cotangents, _ = truth(batch=2, dim=11, seqlen=67, dstate=3)
    cotangents = {name: cotangents[name] for name in results}
    judge(run(kwargs, cotangents), kwargs, exact_results(OP, kwargs, cotangents))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, dtype, level, guarded):
    check(batch=2, dim=19, seqlen=75, dstate=3, layout=layout, dtype=dtype)


@pytest.mark.parametrize("layout", DISTINCT)
def test_the_arriving_gradient_may_lie_otherwise_than_x(layout, level):
    kwargs, cotangents, _ = truth(batch=2, dim=19, seqlen=75, dstate=3)
    expected = run(kwargs, cotangents)
    placed = {name: lay_out(value, layout) for name, value in cotangents.items()}
    for name, result in run(kwargs, placed).items():
        assert torch.equal(result, expected[name]), name


def test_dtypes_may_be_mixed(level, guarded):
    kwargs, cotangents, _ = truth(batch=2, dim=21, seqlen=70, dstate=5)
    kwargs = kwargs | {
        "x": kwargs["x"].bfloat16(),
        "dt": kwargs["dt"].half(),
        "B": kwargs["B"].bfloat16(),
        "D": kwargs["D"].half(),
    }
    cotangents = {name: value.bfloat16() for name, value in cotangents.items()}
    cotangents["final_states"] = cotangents["final_states"].float()
    judge(run(kwargs, cotangents), kwargs, exact_results(OP, kwargs, cotangents))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_packing(packing, reverse, level, guarded):
    check(packing=packing, reverse=reverse, dim=9, dstate=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_in_every_dtype(dtype, level, guarded):
    packing = Packing((((0, 64), (64, 70), (72, 130)), ((3, 131),)), 131)
    check(packing=packing, dim=33, dstate=4, dtype=dtype, ngroups=3, layout="channel_last")


@pytest.mark.parametrize("seed", range(30))
def test_random_calls(seed, level, guarded):
    generator = random.Random(seed)
    dim = generator.choice([1, 4, 8, 12, 16, 36, 72])
    divisors = [None, *(n for n in range(1, dim + 1) if dim % n == 0)]
    check(
        batch=generator.choice([1, 2, 5]),
        dim=dim,
        seqlen=generator.choice([1, 5, 17, 64, 100, 129]),
        dstate=generator.choice([1, 2, 3, 4, 7, 16, 20]),
        ngroups=generator.choice(divisors),
        constant=generator.choice(["", "", "", "B", "C", "BC"]),
        options=" ".join(
            n for n in ("D", "z", "dt_bias", "initial_states") if generator.random() < 0.7
        ),
        reverse=generator.random() < 0.5,
        dtype=generator.choice(DTYPES),
        layout=generator.choice(DISTINCT),
        seed=seed,
    )


THREADED = {
    "wide": {"batch": 1, "dim": 333, "seqlen": 70, "dstate": 16},
    "rows": {"batch": 37, "dim": 5, "seqlen": 20, "dstate": 3},
    "groups": {"batch": 3, "dim": 96, "seqlen": 70, "dstate": 5, "ngroups": 32},
    "constant": {"batch": 5, "dim": 65, "seqlen": 70, "dstate": 7, "constant": "BC"},
    "bfloat16": {"batch": 2, "dim": 200, "seqlen": 65, "dstate": 4, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("name", THREADED)
def test_equal_bits_for_any_number_of_threads(name, layout, threads, level):
    kwargs = {n: lay_out(v, layout) for n, v in scan_inputs(**THREADED[name]).items()}
    cotangents = draw_cotangents(kwargs, layout)
    threads(1)
    alone = run(kwargs, cotangents)
    for number in (1, 2, 3):
        threads(number)
        for label, result in run(kwargs, cotangents).items():
            assert torch.equal(result, alone[label]), (label, number)


def test_equal_bits_for_any_number_of_threads_packed(threads, level):
    kwargs = scan_inputs(2, 100, 301, 4)
    kwargs["seq_idx"] = (torch.arange(301) // 37)[None].repeat(2, 1)
    kwargs["seq_idx"][1, 100:120] = -1
    cotangents = draw_cotangents(kwargs)
    threads(1)
    alone = run(kwargs, cotangents)
    for number in (2, 3):
        threads(number)
        for label, result in run(kwargs, cotangents).items():
            assert torch.equal(result, alone[label]), (label, number)


PER_TOKEN = ("out", "dx", "ddt", "dz", "dB", "dC")


@pytest.mark.parametrize("reverse", [False, True])
def test_nan_in_one_sequence_stays_there(reverse, level):
    bounds = [0, 5, 6, 6, 90, 200]
    kwargs = scan_inputs(1, 9, 200, 3, num_states=5) | {"reverse": reverse}
    kwargs["cu_seqlens"] = torch.tensor(bounds)
    cotangents = draw_cotangents(kwargs)
    clean = run(kwargs, cotangents)
    for name in ("x", "dt", "B", "C", "z"):
        kwargs[name][..., 6:90] = math.nan
    cotangents["out"][..., 6:90] = math.nan
    kwargs["initial_states"][3] = math.nan
    found = run(kwargs, cotangents)
    for name in PER_TOKEN:
        for part in (slice(0, 6), slice(90, 200)):
            assert torch.equal(found[name][..., part], clean[name][..., part]), name
    for name in ("final_states", "dinitial_states"):
        for sequence in (0, 1, 2, 4):
            assert torch.equal(found[name][sequence], clean[name][sequence]), name


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("reverse", [False, True])
def test_nothing_of_padding_is_read(reverse, layout, level):
    """Neither of the inputs nor of the gradient that arrives at a padding token."""
    packing = Packing((((1, 4), (6, 90), (130, 190)), ((0, 3),), ()), 191)
    kwargs = scan_inputs(3, 9, 191, 3) | packing.arguments() | {"reverse": reverse}
    cotangents = draw_cotangents(kwargs)
    clean = run(kwargs, cotangents)
    pad = (kwargs["seq_idx"] < 0)[:, None]
    spoilt = poison(kwargs, packing)
    spoilt = {n: v if n == "seq_idx" else lay_out(v, layout) for n, v in spoilt.items()}
    cotangents["out"] = lay_out(cotangents["out"].masked_fill(pad, math.inf), layout)
    found = run(spoilt, cotangents)
    for name, expected in clean.items():
        assert torch.equal(found[name], expected), name
    for name in PER_TOKEN:
        assert not found[name].masked_select(pad).any(), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_channel_cannot_spoil_another(bad, level):
    """Only the gradients that sum over channels may, and those of A, D, dt_bias are not such."""
    kwargs = scan_inputs(2, 19, 70, 5)
    cotangents = draw_cotangents(kwargs)
    clean = run(kwargs, cotangents)
    kwargs["x"][1, 3, 10:] = bad
    found = run(kwargs, cotangents)
    others = [channel for channel in range(19) if channel != 3]
    for name in ("out", "final_states", "dx", "ddt", "dz", "dinitial_states"):
        assert torch.equal(found[name][0], clean[name][0]), name
        assert torch.equal(found[name][1, others], clean[name][1, others]), name
    for name in ("dA", "dD", "ddt_bias"):
        assert torch.equal(found[name][others], clean[name][others]), name
    assert not found["out"][1, 3, 10:].isfinite().any()


def extreme(dt_bias, rate, options="dt_bias initial_states", **values):
    kwargs = scan_inputs(2, 19, 70, 5, options=options)
    kwargs["dt_bias"] = torch.full((19,), float(dt_bias))
    kwargs["A"] = torch.full((19, 5), float(rate))
    return kwargs | values


@pytest.mark.parametrize(
    ("dt_bias", "rate"),
    [(-40, -1e10), (-40, -1), (-20, -1), (30, -0.01), (30, 0), (0, 0), (80, -1e-3)],
)
def test_tails_of_softplus_are_as_exact_as_its_middle(dt_bias, rate, level, guarded):
    kwargs = extreme(dt_bias, rate)
    cotangents = draw_cotangents(kwargs)
    judge(run(kwargs, cotangents), kwargs, exact_results(OP, kwargs, cotangents))


def test_a_tiny_step_is_not_lost(level):
    """softplus(-40) is 4e-18: the sum of such steps is what out consists of."""
    kwargs = extreme(-40, -1, options="dt_bias")
    out, _ = ops.selective_scan(**kwargs, backend="cpu")
    assert 0 < float(out.abs().max()) < 1e-14


@pytest.mark.parametrize("rate", [-1e3, -1e30, -3e38])
def test_a_decay_that_underflows_is_zero(rate, level, guarded):
    kwargs = extreme(5, rate)
    cotangents = draw_cotangents(kwargs)
    found, exact = run(kwargs, cotangents), exact_results(OP, kwargs, cotangents)
    for name in ("out", "final_states", "dx", "dB", "dC", "dinitial_states"):
        assert_close(found[name], exact[name], allowed(OP, kwargs, name, found[name]), name)
    for name, result in found.items():
        assert result.isfinite().all(), name


def test_an_infinite_rate_forgets_at_once(level, guarded):
    kwargs = extreme(0, -math.inf)
    found, exact = (ops.selective_scan(**kwargs, backend=name) for name in ("cpu", "reference"))
    for name, result, expected in zip(("out", "final_states"), found, exact, strict=True):
        assert_close(result, expected, tolerance(OP, torch.float32), name)


def test_a_growth_that_overflows_is_infinite(level):
    ones = torch.ones(2, 19, 70)
    weights = torch.ones(2, 5, 70)
    kwargs = extreme(5, 1e3, x=ones, dt=ones, B=weights, C=weights)
    kwargs["initial_states"] = torch.ones(2, 19, 5)
    out, final_states = ops.selective_scan(**kwargs, backend="cpu")
    assert (out == math.inf).all()
    assert (final_states == math.inf).all()


PACKED = {
    "plain": {},
    "bounds": {"cu_seqlens": torch.tensor([0, 1, 70, 70, 300])},
    "ids": {"seq_idx": torch.tensor([[-1] * 60 + [0] * 90 + [-1] * 80 + [1] * 70])},
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("dstate", [3, 20])
def test_a_backward_of_torch_reads_what_this_forward_saved(dstate, packed, reverse, level):
    """And the other way round: what is saved has one meaning for all (docs/design/0005)."""
    num_states = 4 if packed == "bounds" else 1
    kwargs = scan_inputs(1, 9, 300, dstate, ngroups=1, num_states=num_states)
    kwargs |= {"reverse": reverse} | PACKED[packed]
    cotangents = draw_cotangents(kwargs)
    exact = exact_results(OP, kwargs, cotangents)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    tensors = [kwargs.get(name) for name in (*names, "seq_idx", "cu_seqlens")]
    saved = [module.selective_scan_fwd(*tensors, True, reverse, True)[2] for module in (cpu, plain)]
    assert saved[0].shape == saved[1].shape
    arriving = (cotangents["out"], cotangents["final_states"])
    for module, states in ((plain, saved[0]), (cpu, saved[1])):
        gradients = module.selective_scan_bwd(*arriving, *tensors, states, True, reverse)
        for name, gradient in zip(names, gradients, strict=True):
            bound = allowed(OP, kwargs, f"d{name}", gradient)
            assert_close(gradient, exact[f"d{name}"], bound, f"d{name} by {module.__name__}")


def test_chunk_states_are_not_made_when_not_wanted():
    kwargs = scan_inputs(1, 4, 9, 2, ngroups=1)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    tensors = [kwargs[name] for name in names]
    assert cpu.selective_scan_fwd(*tensors, None, None, True, False, False)[2].numel() == 0
