# SPDX-License-Identifier: Apache-2.0
"""mamba_inner as composed of a backend's conv and scan: what is saved, padding, sums and bits."""

from __future__ import annotations

import math

import pytest
import torch

from statescan import ops
from statescan.backends import _mamba_inner, _projections
from statescan.backends._mamba_inner import Functions, Inputs, Options, compose_bwd, compose_fwd
from statescan.backends._projections import bias_gradient, project, weight_gradient
from statescan.backends._rms_norm import rms_norm, rms_norm_gradient
from statescan.backends.torch.causal_conv1d import causal_conv1d_bwd, causal_conv1d_fwd
from statescan.backends.torch.selective_scan import selective_scan_bwd, selective_scan_fwd
from statescan.testing import assert_close

FUNCTIONS = Functions(causal_conv1d_fwd, causal_conv1d_bwd, selective_scan_fwd, selective_scan_bwd)
OPTIONS = Options(dt_softplus=True, silu=True, norm_eps=1e-6, reverse=False)


@pytest.fixture
def threads():
    """Set the number of threads; the old number comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make_inputs(
    batch=2, dim=6, seqlen=9, dstate=4, dt_rank=3, d_model=5, dtype=torch.float32, **changes
):
    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = Inputs(
        xz=draw(batch, 2 * dim, seqlen),
        conv_weight=draw(dim, 4),
        conv_bias=draw(dim),
        x_proj_weight=draw(dt_rank + 2 * dstate, dim) / dim**0.5,
        dt_proj_weight=draw(dim, dt_rank),
        A=-draw(dim, dstate).abs().to(wide),
        B=None,
        C=None,
        D=draw(dim),
        dt_bias=draw(dim),
        b_proj_bias=draw(dstate),
        c_proj_bias=None,
        out_proj_weight=draw(d_model, dim),
        out_proj_bias=draw(d_model),
        b_norm_weight=draw(dstate),
        c_norm_weight=draw(dstate),
        dt_norm_weight=draw(dim),
        conv_initial_states=draw(batch, dim, 3),
        initial_states=draw(batch, dim, dstate).to(wide),
        seq_idx=None,
        cu_seqlens=None,
    )
    return inputs._replace(**changes)


def both(inputs, dout=None, options=OPTIONS):
    """The six results of the forward and the 19 gradients."""
    results = compose_fwd(FUNCTIONS, inputs, options, True)
    dout = torch.ones_like(results[0]) if dout is None else dout
    douts = (dout, torch.ones_like(results[1]), torch.ones_like(results[2]))
    return results, compose_bwd(FUNCTIONS, douts, inputs, results[3:], options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 37, 301, 5, 3, 19), (1, 200, 65, 16, 20, 100)], ids=str)
def test_equal_bits_for_any_number_of_threads(threads, sizes, dtype):
    """Odd sizes of every projection, which a BLAS cuts differently for each number of threads."""
    inputs = make_inputs(*sizes, dtype=dtype)
    found = []
    for number in (1, 2, 3, 5):
        threads(number)
        results, gradients = both(inputs)
        found.append([*results, *gradients])
    for other in found[1:]:
        for one, many in zip(found[0], other, strict=True):
            assert torch.equal(one, many)


def test_a_backend_brings_only_conv_and_scan():
    """Each of the four functions given is used, and nothing else convolves or scans."""
    calls = []

    def spy(name, function):
        def call(*args):
            calls.append(name)
            return function(*args)

        return call

    spies = Functions(*(spy(n, f) for n, f in zip(Functions._fields, FUNCTIONS, strict=True)))
    inputs = make_inputs()
    results = compose_fwd(spies, inputs, OPTIONS, True)
    assert calls == ["conv_fwd", "scan_fwd"]
    compose_bwd(spies, (results[0], None, None), inputs, results[3:], OPTIONS)
    assert calls[2:] == ["conv_fwd", "scan_bwd", "conv_bwd"]


def test_saved_tensors_are_those_that_the_backward_needs():
    inputs = make_inputs()
    *_, x_dbl, chunk_states, gated = compose_fwd(FUNCTIONS, inputs, OPTIONS, True)
    assert x_dbl.shape == (2, 9, 11)
    assert chunk_states.shape == (2, 1, 6, 4)
    assert gated.shape == (2, 6, 9)
    *_, x_dbl, chunk_states, gated = compose_fwd(FUNCTIONS, inputs, OPTIONS, False)
    assert [saved.numel() for saved in (x_dbl, chunk_states, gated)] == [0, 0, 0]
    inputs = inputs._replace(out_proj_weight=None, out_proj_bias=None)
    results = compose_fwd(FUNCTIONS, inputs, OPTIONS, True)
    assert results[0].shape == (2, 6, 9)
    assert results[5].numel() == 0


def test_absent_inputs_have_empty_gradients():
    absent = dict.fromkeys(
        name
        for name in Inputs._fields
        if name not in ("xz", "conv_weight", "x_proj_weight", "dt_proj_weight", "A")
    )
    inputs = make_inputs(**absent)
    _, gradients = both(inputs)
    for value, gradient in zip(inputs[: len(gradients)], gradients, strict=True):
        assert gradient.numel() == (0 if value is None else value.numel())


@pytest.mark.parametrize("norm_eps", [0.0, 1e-6])
def test_padding_does_not_exist(norm_eps):
    """Neither NaN in it nor in its arriving gradient reaches anything, norms of zeros included."""
    seq_idx = torch.tensor([[-1, 0, 0, -1, 0, 1, 1, 1, -1], [-1] * 9])
    inputs, dout = make_inputs(seq_idx=seq_idx), torch.randn(2, 9, 5)
    options = OPTIONS._replace(norm_eps=norm_eps)
    clean = both(inputs, dout, options)
    pad = seq_idx[:, None] < 0
    inputs = inputs._replace(xz=inputs.xz.masked_fill(pad, math.nan))
    dirty = both(inputs, dout.masked_fill(pad.transpose(1, 2), math.nan), options)
    for expected, result in zip([*clean[0], *clean[1]], [*dirty[0], *dirty[1]], strict=True):
        assert result.isfinite().all()
        assert torch.equal(expected, result)
    assert not dirty[0][0].masked_select(pad.transpose(1, 2)).any()
    assert not dirty[1][0].masked_select(pad).any()


def test_autocast_changes_nothing():
    inputs = make_inputs()
    plain = both(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = both(inputs)
    for expected, result in zip([*plain[0], *plain[1]], [*cast[0], *cast[1]], strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(expected, result)


def test_one_double_input_makes_all_arithmetic_double():
    inputs = make_inputs(dtype=torch.float64)
    narrow = inputs._replace(xz=inputs.xz.float())
    exact, mixed = both(inputs._replace(xz=narrow.xz.double())), both(narrow)
    assert mixed[0][0].dtype == torch.float32
    assert mixed[1][0].dtype == torch.float32
    assert torch.equal(mixed[0][0], exact[0][0].float())
    # Not bit for bit: the cast makes x dense, and torch's loops depend on strides.
    for one, other in zip(mixed[1][1:], exact[1][1:], strict=True):
        if other.numel():
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_weight_gradients_of_half_precision_are_summed_in_float32():
    """Thousands of equal products: a bfloat16 sum would stop growing at 256."""
    ones = torch.ones(1, 3, 5000, dtype=torch.bfloat16)
    assert torch.equal(weight_gradient(ones, ones, torch.float32), torch.full((3, 3), 5000.0))
    assert torch.equal(bias_gradient(ones, torch.float32), torch.full((3,), 5000.0))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (16, 5, 32), (16, 3, 7), (1, 0, 2), (4, 3, 0)])
def test_projections_of_every_size(sizes, transposed, add):
    features, inputs, seqlen = sizes
    weight = torch.randn(features, inputs, dtype=torch.float64)
    tokens = torch.randn(2, inputs, seqlen, dtype=torch.float64)
    target = torch.ones(2, features, seqlen, dtype=torch.float64)
    if transposed:
        tokens = tokens.transpose(1, 2).contiguous().transpose(1, 2)
        target = target.transpose(1, 2).contiguous().transpose(1, 2)
    project(weight, tokens, target, add=add)
    assert_close(target, weight @ tokens + add, 1e-14)
    dweight = weight_gradient(target, tokens, torch.float64)
    assert_close(dweight, (target @ tokens.transpose(1, 2)).sum(0), 1e-14)
    assert_close(bias_gradient(target, torch.float64), target.sum((0, 2)), 1e-14)


def test_weight_gradients_in_pieces(monkeypatch):
    dtarget, tokens = torch.randn(2, 3, 50), torch.randn(2, 4, 50)
    whole = weight_gradient(dtarget, tokens, torch.float64)
    monkeypatch.setattr(_projections, "_TOKENS", 7)
    assert_close(weight_gradient(dtarget, tokens, torch.float64), whole, 1e-14)


@pytest.mark.parametrize("axis", [-1, -2])
def test_rms_norm_gradients_are_those_of_its_formula(axis):
    values = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(values.shape[axis], dtype=torch.float64, requires_grad=True)
    scale = (values.square().mean(axis, keepdim=True) + 0.1).rsqrt()
    exact = values * scale * (weight if axis == -1 else weight[:, None])
    dout = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, (values, weight), dout)
    with torch.no_grad():
        assert_close(rms_norm(values, weight, 0.1, axis), exact, 1e-14)
        for result, truth in zip(
            rms_norm_gradient(dout, values, weight, 0.1, axis), expected, strict=True
        ):
            assert_close(result, truth, 1e-13)


@pytest.mark.parametrize("layout", ["channel_first", "channel_last"])
def test_forward_without_gradients_equals_forward_with(layout):
    inputs = make_inputs()
    if layout == "channel_last":
        inputs = inputs._replace(xz=inputs.xz.transpose(1, 2).contiguous().transpose(1, 2))
    positional, named = inputs[:6], inputs._asdict()
    options = {name: named[name] for name in Inputs._fields[6:]}
    with torch.no_grad():
        plain = ops.mamba_inner(*positional, **options, backend="torch")
    leaf = inputs.xz.detach().requires_grad_()
    recorded = ops.mamba_inner(leaf, *positional[1:], **options, backend="torch")
    assert torch.equal(plain, recorded)


def test_inputs_are_in_the_order_of_the_op():
    schema = torch.ops.statescan.mamba_inner_fwd.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == [*Inputs._fields, *Options._fields, "save_states", "backend"]
    assert _mamba_inner._NUM_GRADIENTS == 19
