# SPDX-License-Identifier: Apache-2.0
"""Inputs on which other libraries' scans were reported wrong; here as whole kinds of inputs.

An entry's number in a docstring is that of the list of faults the tests were written from.
"""

from __future__ import annotations

import itertools

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
from helpers.layouts import lay_out
from helpers.op_inputs import Draw, inner_inputs, scan_inputs
from helpers.sparse import spread

from statescan.errors import DeviceError, ShapeError
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

OP = "selective_scan"
FLOAT32 = tolerance(OP, torch.float32)
FAR = [2**31 + 64, 2**32, 2**32 + 64]
AROUND = (*range(1, 10), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
LONG = (1023, 1024, 2049, 4097)


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", ["x", "dt", "z", "B", "C", "initial_states"])
def test_rows_further_apart_than_32_bits_count(backend, tmp_path, name, far):
    """B01, B02: offsets of states and activations beyond 2^31 and 2^32 elements."""
    kwargs = scan_inputs(2, 4, 9, ngroups=2)
    value = kwargs[name].to(torch.bfloat16)
    inner = value[0].contiguous().stride()
    kwargs[name] = spread(tmp_path, value, (far, *inner))
    check_sequence(OP, kwargs, backend)


@pytest.mark.parametrize("far", [2**28, 2**29 + 8])
def test_tokens_further_apart_than_32_bits_count(backend, tmp_path, far):
    """B05: a narrow slice of a wide projection, where token times stride wraps at 32 bits."""
    kwargs = scan_inputs(1, 3, 20)
    for name in ("x", "dt", "z", "B", "C"):
        value = kwargs[name].to(torch.bfloat16)
        kwargs[name] = spread(tmp_path, value, (1, 1, far))
    check_sequence(OP, kwargs, backend)
    check_sequence(OP, kwargs | {"reverse": True}, backend)


@pytest.mark.parametrize("far", [2**30, 2**31 + 8])
def test_channels_further_apart_than_32_bits_count(backend, tmp_path, far):
    """B02: the same along the other axes, parameters among them."""
    kwargs = scan_inputs(1, 4, 6)
    for name in ("x", "A"):
        value = kwargs[name].to(torch.bfloat16)
        strides = (1, far, 1) if value.dim() == 3 else (far, 1)
        kwargs[name] = spread(tmp_path, value, strides)
    check_sequence(OP, kwargs, backend)


@pytest.mark.parametrize(("batch", "dim"), [(1, 70000), (70000, 1)])
def test_more_channels_or_rows_than_a_grid_has_blocks(backend, batch, dim):
    """B07."""
    kwargs = scan_inputs(batch, dim, 2, 1)
    check_sequence(OP, kwargs | {"x": lay_out(kwargs["x"], "channel_last")}, backend)


@pytest.mark.parametrize("constant", ["B", "C", "BC"])
@pytest.mark.parametrize("seqlen", [1, 2, 7, 64, 200])
def test_constant_weights_reach_the_states(backend, constant, seqlen):
    """B12, S1: a constant B is part of the final state, a constant C is not."""
    kwargs = scan_inputs(1, 3, seqlen, constant=constant)
    check_sequence(OP, kwargs, backend, ill_conditioned=True)
    zero = kwargs | {"initial_states": None}
    _, states = call(OP, zero | {"B": torch.zeros_like(kwargs["B"])}, backend)
    assert not states.any()


@pytest.mark.parametrize("name", ["out", "final_states"])
@pytest.mark.parametrize("kind", [{}, {"constant": "BC"}, {"ngroups": 2}, {"is_complex": True}])
def test_loss_on_one_result_alone(backend, name, kind):
    """B13, S7: the gradient of a loss on the final states alone, or on the output alone."""
    kwargs = scan_inputs(**kind)
    cotangents = {name: draw_cotangents(OP, kwargs)[name]}
    results = check_sequence(OP, kwargs, backend, cotangents=cotangents)
    assert results["dx"].any() and results["dB"].any() and results["dinitial_states"].any()
    packed = scan_inputs(1, 4, 9, num_states=3, **kind) | {"cu_seqlens": torch.tensor([0, 4, 4, 9])}
    cotangents = {name: draw_cotangents(OP, packed)[name]}
    check_sequence(OP, packed, backend, cotangents=cotangents)


@pytest.mark.parametrize(
    "names", list(itertools.combinations(("b_norm_weight", "c_norm_weight", "dt_norm_weight"), 2))
)
def test_gradients_pass_through_norms_inside_the_fused_op(backend, names):
    """B14, S5, S6: each norm once, in the forward and in the backward, over the right axis."""
    kwargs = inner_inputs(2, 5, 9, options=f"conv_bias D dt_bias out_proj_weight {' '.join(names)}")
    results = check_sequence("mamba_inner", kwargs, backend)
    assert all(results[f"d{name}"].any() for name in names)


def test_output_bias_inside_the_fused_op_has_a_gradient(backend):
    """L1."""
    kwargs = inner_inputs(
        options="conv_bias D out_proj_weight out_proj_bias b_proj_bias c_proj_bias"
    )
    results = check_sequence("mamba_inner", kwargs, backend)
    assert results["dout_proj_bias"].shape == (5,)


@pytest.mark.parametrize("seqlen", AROUND)
@pytest.mark.parametrize("kind", [{}, {"ngroups": 2}, {"constant": "BC"}])
def test_any_length(backend, seqlen, kind):
    """B16. With constant B and C some states are small sums of large terms."""
    kwargs = scan_inputs(1, 2, seqlen, **kind) | {"reverse": seqlen % 2 == 0}
    check_sequence(OP, kwargs, backend, ill_conditioned=bool(kind.get("constant")))


@pytest.mark.parametrize("seqlen", LONG)
def test_any_long_length(backend, seqlen):
    """B16."""
    check_sequence(OP, scan_inputs(1, 2, seqlen, 2), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen", [8, 128])
@pytest.mark.parametrize("layout", ["offset_1", "offset_3", "slice_of_wide", "every_other"])
def test_any_alignment(backend, layout, seqlen, dtype):
    """B17, S3: no vector of 8 or 16 bytes starts where it should."""
    kwargs = {n: lay_out(v, layout) for n, v in scan_inputs(2, 2, seqlen, dtype=dtype).items()}
    check_sequence(OP, kwargs, backend, ill_conditioned=True)


def test_group_count_must_divide_the_channels(backend):
    """S2: more groups than channels, or a remainder, would read beyond B."""
    for dim, groups in ((5, 2), (4, 3), (2, 4), (4, 0)):
        for name in ("B", "C"):
            kwargs = scan_inputs(1, dim, 3)
            kwargs[name] = torch.randn(1, groups, 3, 3)
            with pytest.raises(ShapeError, match=f"{name}.*{groups} groups"):
                call(OP, kwargs, backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_range_of_half_precision(backend, dtype):
    """B21: results are finite wherever the exact ones fit the dtype."""
    draw = Draw(0)
    kwargs = scan_inputs(2, 6, 40, 4, options="D")
    kwargs |= {
        "x": (30 * draw.normal(2, 6, 40)).to(dtype),
        "dt": draw.uniform(0, 20, 2, 6, 40).to(dtype),
        "A": -torch.logspace(-3, 2, 24).view(6, 4),
        "dt_softplus": False,
    }
    cotangents = draw_cotangents(OP, kwargs)
    exact = exact_results(OP, kwargs, cotangents)
    results = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
    for name, result in results.items():
        fits = exact[name].abs() < torch.finfo(result.dtype).max
        assert result.isfinite()[fits].all(), name
        bound = tolerance(OP, dtype, result.dtype, gradient=name[0] == "d")
        assert_close(
            torch.where(fits, result, 0), torch.where(fits, exact[name], 0), 2 * bound, name
        )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_D", [False, True])
def test_gate_has_its_gradient(backend, reverse, with_D):
    """B22."""
    kwargs = scan_inputs(options="D z" if with_D else "z") | {"reverse": reverse}
    assert check_sequence(OP, kwargs, backend)["dz"].any()
    inner = inner_inputs(options="conv_bias D" if with_D else "conv_bias") | {"reverse": reverse}
    assert check_sequence("mamba_inner", inner, backend)["dxz"][:, 4:].any()


def test_gate_far_from_zero(backend):
    """Gates of which SiLU is 0 or the identity: values and gradients stay finite and right."""
    kwargs = scan_inputs(1, 2, 9, options="D z")
    gates = torch.tensor([-1e4, -200.0, -100.0, -88.8, -1e-3, 0.0, 20.0, 88.8, 1e4])
    kwargs["z"] = gates.expand(1, 2, 9)
    assert check_sequence(OP, kwargs, backend)["dz"].isfinite().all()


@pytest.mark.parametrize("total", [-1.0, -80.0, -87.4, -100.0, -1000.0, -1e30])
@pytest.mark.parametrize("seqlen", [64, 257])
def test_decay_to_nothing(backend, total, seqlen):
    """B38, B40: the exponent of a chunk, or of one step, is far below that of any float."""
    for one_step in (False, True):
        kwargs = scan_inputs(1, 2, seqlen, 2, options="D z initial_states")
        kwargs["dt_softplus"] = False
        kwargs["dt"] = (
            torch.full((1, 2, seqlen), 5.0) if one_step else torch.full((1, 2, seqlen), 0.5)
        )
        kwargs["A"] = torch.full((2, 2), total / (5 if one_step else 0.5 * min(seqlen, 64)))
        kwargs["A"][0, 0] = -0.01
        results = check_sequence(OP, kwargs, backend, ill_conditioned=True)
        assert all(result.isfinite().all() for result in results.values())


@pytest.mark.parametrize("is_complex", [False, True])
def test_one_channel_that_decays_at_once_beside_one_that_never_does(backend, is_complex):
    """B38, B40: no channel, row or token is scaled by what another one needs."""
    kwargs = scan_inputs(2, 4, 70, 3, is_complex=is_complex)
    kwargs["A"] = kwargs["A"] * torch.tensor([[0.0], [1e-6], [1.0], [1e6]])
    kwargs["dt"][0] -= 60
    check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("groups", [(2, 2), (4, 4), (8, 8), (1, 8), (8, 2)])
def test_gradients_of_groups(backend, groups):
    """B42: a group's gradient is the sum over its own channels, once each."""
    kwargs = scan_inputs(2, 16, 9, ngroups=groups[0])
    kwargs["C"] = scan_inputs(2, 16, 9, ngroups=groups[1], seed=4)["C"]
    check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize(
    "bounds", [(0, 5, 60, 90), (0, 63, 66, 130), (0, 64, 128, 129), (0, 1, 127, 128)]
)
@pytest.mark.parametrize("kind", [{}, {"ngroups": 2}])
def test_boundaries_inside_a_chunk(backend, bounds, kind):
    """B43: dB and dC of packed sequences equal those of separate calls."""
    kwargs = scan_inputs(1, 2, bounds[-1], num_states=3, **kind)
    cotangents = draw_cotangents(OP, kwargs | {"cu_seqlens": torch.tensor(bounds)})
    packed = kwargs | {"cu_seqlens": torch.tensor(bounds)}
    results = differentiate(lambda **named: call(OP, named, backend), OP, packed, cotangents)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = {n: kwargs[n][..., start:end] for n in ("x", "dt", "z", "B", "C")}
        alone = kwargs | alone | {"initial_states": kwargs["initial_states"][i : i + 1]}
        seeds = {
            "out": cotangents["out"][..., start:end],
            "final_states": cotangents["final_states"][i : i + 1],
        }
        exact = exact_results(OP, alone, seeds)
        for name in ("out", "dx", "ddt", "dz", "dB", "dC"):
            bound = tolerance(OP, torch.float32, gradient=True)
            assert_close(
                results[name][..., start:end], exact[name], bound, f"{name} of sequence {i}"
            )


TAILS = (
    -103.0,
    -100.0,
    -87.0,
    -40.0,
    -30.0,
    -20.0,
    -17.0,
    -15.9,
    -1.0,
    0.0,
    1.0,
    15.0,
    19.9,
    20.0,
    20.1,
    30.0,
    88.0,
    100.0,
    1e4,
    1e30,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_bias", [False, True])
def test_softplus_in_its_tails(backend, dtype, by_bias):
    """B44, S11: each value and slope to 1e-3 while it is a normal number, identity above 20."""
    raw = torch.tensor(TAILS, dtype=dtype)[:, None, None]
    one, zero = torch.ones_like(raw), torch.zeros_like(raw)
    bias = raw[:, 0, 0] if by_bias else None
    if by_bias:
        raw = raw.transpose(0, 1)
        one, zero = one.transpose(0, 1), zero.transpose(0, 1)
    kwargs = {"x": one, "dt": zero if by_bias else raw, "dt_bias": bias, "dt_softplus": True}
    kwargs["A"] = torch.zeros(raw.shape[1], 1, dtype=dtype)
    kwargs["B"] = kwargs["C"] = torch.ones_like(kwargs["A"])
    leaf = (bias if by_bias else raw).detach().requires_grad_()
    out = call(OP, kwargs | {"dt_bias" if by_bias else "dt": leaf}, backend)
    out.sum().backward()
    value = torch.nn.functional.softplus(torch.tensor(TAILS, dtype=torch.float64), threshold=700)
    slope = torch.tensor(TAILS, dtype=torch.float64).sigmoid()
    for result, expected in ((out.detach(), value), (leaf.grad, slope)):
        normal = expected.clamp(min=torch.finfo(dtype).tiny)
        relative = (result.double().flatten() - expected).abs() / normal
        assert relative.max() < (1e-3 if dtype == torch.float32 else 1e-8), relative


def test_mixed_precision_of_products(backend):
    """B46: half-precision gradients against float32 weights, and the other way round."""
    for x_dtype, C_dtype in itertools.permutations(
        (torch.float32, torch.bfloat16, torch.float16), 2
    ):
        kwargs = scan_inputs()
        kwargs |= {"x": kwargs["x"].to(x_dtype), "C": kwargs["C"].to(C_dtype)}
        check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("kind", [{}, {"is_complex": True}])
def test_autocast_changes_nothing(backend, kind):
    """B21, B46: A, D, the bias and the states are not cast down."""
    kwargs = scan_inputs(**kind)
    cotangents = draw_cotangents(OP, kwargs)

    def run():
        return differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)

    expected = run()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            results = run()
        for name, result in results.items():
            assert result.dtype == expected[name].dtype
            assert_same(result, expected[name], name)


@pytest.mark.parametrize("kind", [{}, {"ngroups": 2}, {"constant": "BC"}, {"is_complex": True}])
def test_equal_bits_whatever_the_number_of_threads(backend, kind):
    """B61: results and gradients of repeated runs, with one thread and with several."""
    kwargs = scan_inputs(3, 66, 150, 5, **kind)
    cotangents = draw_cotangents(OP, scan_inputs(3, 66, 1, 5, **kind))
    cotangents["out"] = Draw(3).normal(3, 66, 150)
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


def test_fake_tensors_and_mixed_devices(backend):
    """B69: shapes, dtypes and strides without data are the real ones; devices must agree."""
    kwargs = scan_inputs(ngroups=2)
    kwargs["x"] = lay_out(kwargs["x"], "channel_last")
    real = call(OP, kwargs, backend)
    meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {
            n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()
        }
        for result, expected in zip(call(OP, fake, backend), real, strict=True):
            assert (result.shape, result.dtype, result.stride()) == (
                expected.shape,
                expected.dtype,
                expected.stride(),
            )
    for name in ("dt", "A", "B", "D", "z", "initial_states"):
        with pytest.raises(DeviceError, match=name):
            call(OP, kwargs | {name: meta[name]}, backend)
