# SPDX-License-Identifier: Apache-2.0
"""Inputs on which other libraries' convolutions were reported wrong; here as whole kinds of inputs.

An entry's number in a docstring is that of the list of faults the tests were written from.
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
from helpers.layouts import lay_out
from helpers.op_inputs import Draw, conv_inputs
from helpers.sparse import spread

from statescan.errors import ArgumentError, DeviceError
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

OP = "causal_conv1d"
FLOAT32 = tolerance(OP, torch.float32)
GRADIENT = tolerance(OP, torch.float32, gradient=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("far", [2**31 + 64, 2**32, 2**32 + 64])
@pytest.mark.parametrize("name", ["x", "initial_states"])
def test_rows_further_apart_than_32_bits_count(backend, tmp_path, name, far):
    """B02, B03, S21: row 1 lies beyond 2^31 or 2^32 elements and is not row 0."""
    kwargs = conv_inputs(2, 4, 9)
    value = kwargs[name].to(torch.bfloat16)
    kwargs[name] = spread(tmp_path, value, (far, value.shape[2], 1))
    check_sequence(OP, kwargs, backend, ill_conditioned=True)
    assert not torch.equal(kwargs[name][0], kwargs[name][1])


@pytest.mark.parametrize("far", [2**28, 2**29 + 8])
def test_tokens_or_channels_further_apart_than_32_bits_count(backend, tmp_path, far):
    """B03, B05: a narrow slice of a wide projection, and the same with axes exchanged."""
    for axis in (1, 2):
        kwargs = conv_inputs(1, 6, 6)
        value = kwargs["x"].to(torch.bfloat16)
        kwargs["x"] = spread(tmp_path, value, (1, far, 1) if axis == 1 else (1, 1, far))
        check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize(("batch", "dim"), [(1, 70000), (70000, 1)])
def test_more_channels_or_rows_than_a_grid_has_blocks(backend, batch, dim, layout):
    """B07."""
    kwargs = conv_inputs(batch, dim, 3)
    check_sequence(OP, kwargs | {"x": lay_out(kwargs["x"], layout)}, backend, ill_conditioned=True)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("lengths", [range(1, 41), range(1020, 1033), range(2047, 2051)])
def test_final_states_at_any_length(backend, lengths, width):
    """B10: the kept tokens straddle whatever units the work is cut into."""
    for seqlen in lengths:
        for options, layout in (("bias", "contiguous"), ("bias initial_states", "channel_last")):
            kwargs = conv_inputs(1, 3, seqlen, width, options=options)
            kwargs["x"] = lay_out(kwargs["x"], layout)
            check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("seqlen", [1, 64, 65, 4099])
@pytest.mark.parametrize("reverse", [False, True])
def test_what_lies_behind_seq_idx_is_never_read(backend, seqlen, reverse):
    """B11: the ids are a view with foreign ids before and behind; any dtype, any strides."""
    ids = torch.arange(seqlen) // 7
    expected = None
    for dtype, foreign, step in itertools.product(
        (torch.int32, torch.int64), (-1, 0, 10**9), (1, 2)
    ):
        memory = torch.full((2, step * seqlen + 4), foreign, dtype=dtype)
        seq_idx = memory[:, 2 : 2 + step * seqlen : step].copy_(ids)
        kwargs = conv_inputs(2, 3, seqlen) | {"seq_idx": seq_idx, "reverse": reverse}
        kwargs["x"] = lay_out(kwargs["x"], "channel_last")
        results = call(OP, kwargs, backend)
        expected = results if expected is None else expected
        for result, first in zip(results, expected, strict=True):
            assert_same(result, first)


def test_extreme_ids(backend):
    """B11: ids may be any integers; only their being equal and negative matters."""
    low, high = -(2**63), 2**63 - 1
    kwargs = conv_inputs(1, 3, 8)
    plain = call(OP, kwargs | {"seq_idx": torch.tensor([[0, 0, 1, 1, -1, -1, 2, 3]])}, backend)
    ids = torch.tensor([[high, high, 2**32, 2**32, low, -(2**32), 0, high - 1]])
    for result, expected in zip(call(OP, kwargs | {"seq_idx": ids}, backend), plain, strict=True):
        assert_same(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channel_last", "every_other"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_without_bias_or_states(backend, dtype, layout, activation):
    """B23, B49: forward and backward with every subset of the optional inputs."""
    for options in ("", "bias", "initial_states"):
        kwargs = conv_inputs(4, 9, 50, dtype=dtype, options=options, activation=activation)
        kwargs["x"] = lay_out(kwargs["x"], layout)
        check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize(
    ("wide", "start", "dim"), [(386, 128, 256), (17, 3, 9), (10, 1, 8), (9, 0, 1)]
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channel_last_slices_of_a_projection(backend, batch, dtype, wide, start, dim):
    """B24, B34, L8: strides that are no multiple of 8, row counts of 1."""
    projection = Draw(2, dtype).normal(batch, 12, wide)
    kwargs = conv_inputs(batch, dim, 12, dtype=dtype)
    kwargs["x"] = projection[..., start : start + dim].transpose(1, 2)
    check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("dim", [*range(1, 65), 100, 333])
def test_any_number_of_channels_channel_last(backend, dim):
    """B25, B34: bfloat16 with sequence ids, where vectors of 8 channels would be loaded."""
    kwargs = conv_inputs(1, dim, 6, dtype=torch.bfloat16)
    kwargs |= {
        "x": lay_out(kwargs["x"], "channel_last"),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]),
    }
    check_sequence(OP, kwargs, backend, ill_conditioned=True)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last", "every_other", "axes_reversed"])
@pytest.mark.parametrize(
    "states_layout", ["contiguous", "channel_last", "every_other", "equal_batch"]
)
@pytest.mark.parametrize("packed", ["", "seq_idx", "cu_seqlens"])
def test_ids_and_states_in_any_layout(backend, layout, states_layout, packed):
    """B26, B27, B28: seq_idx with contiguous x, contiguous states with channel-last x, and both."""
    batch = 1 if packed == "cu_seqlens" else 2
    kwargs = conv_inputs(batch, 6, 12, num_states=3 if packed == "cu_seqlens" else batch)
    if packed == "seq_idx":
        kwargs["seq_idx"] = torch.tensor([[0] * 5 + [1] * 7, [2] * 12])
    elif packed:
        kwargs["cu_seqlens"] = torch.tensor([0, 1, 7, 12])
    kwargs["x"] = lay_out(kwargs["x"], layout)
    kwargs["initial_states"] = lay_out(kwargs["initial_states"], states_layout)
    check_sequence(OP, kwargs, backend)


@pytest.mark.parametrize("packed", [False, True])
def test_incoming_gradients_that_are_views(backend, packed):
    """B30: the gradient of a sum (stride 0), of a split, of a transposed result."""
    kwargs = conv_inputs(2, 6, 9)
    if packed:
        kwargs["seq_idx"] = torch.tensor([[0] * 5 + [1] * 4, [-1] * 3 + [0] * 6])
    generator = Draw(4)
    wide, turned = generator.normal(2, 9, 18), generator.normal(9, 6, 2)
    views = {
        "sum": torch.ones(1, 1, 1).expand(2, 6, 9),
        "split": wide.split(6, dim=2)[1].transpose(1, 2),
        "transposed": turned.permute(2, 1, 0),
        "one_row": generator.normal(1, 6, 9).expand(2, 6, 9),
    }
    for view in views.values():
        for states in (None, torch.ones(()).expand(2, 6, 3)):
            check_sequence(OP, kwargs, backend, cotangents={"out": view, "final_states": states})


def test_losses_written_as_users_write_them(backend):
    """B30: y.sum(), a part of y, y used twice."""
    kwargs = conv_inputs(2, 6, 9)
    exact = {}
    for loss in (
        lambda y: y.sum(),
        lambda y: y[:, 1:3, ::2].sum(),
        lambda y: (y * y.flip(2)).sum(),
        lambda y: y.mT.split(2, 2)[1].mean(),
    ):
        for function in ("reference", backend):
            leaf = kwargs["x"].double() if function == "reference" else kwargs["x"].clone()
            leaf.requires_grad_()
            y, _ = call(OP, kwargs | {"x": leaf}, function)
            loss(y).backward()
            exact.setdefault(function, []).append(leaf.grad)
    for result, expected in zip(exact[backend], exact["reference"], strict=True):
        assert_close(result, expected, GRADIENT)


def test_gradient_of_weights_over_packed_rows(backend):
    """B31: rows packed into one give the same weight gradient as rows side by side."""
    kwargs = conv_inputs(2, 8, 100, options="bias")
    cotangent = draw_cotangents(OP, kwargs)["out"]
    flat = kwargs | {"x": kwargs["x"].transpose(0, 1).reshape(1, 8, 200)}
    flat["cu_seqlens"] = torch.tensor([0, 100, 200])
    flat_cotangent = cotangent.transpose(0, 1).reshape(1, 8, 200)
    exact = exact_results(OP, kwargs, {"out": cotangent})
    results = differentiate(
        lambda **named: call(OP, named, backend), OP, flat, {"out": flat_cotangent}
    )
    for name in ("dweight", "dbias"):
        assert_close(results[name], exact[name], GRADIENT, name)
    with pytest.raises(ArgumentError, match="batch 2"):
        call(OP, kwargs | {"cu_seqlens": torch.tensor([0, 50, 100])}, backend)


@pytest.mark.parametrize("lengths", list(itertools.product((0, 1, 2, 5), repeat=3)))
def test_pieces_shorter_than_the_taps(backend, lengths):
    """B32: tokens of ranks that hold 0, 1 or 2 of them, their states handed on."""
    kwargs = conv_inputs(1, 3, sum(lengths), 4)
    cotangents = draw_cotangents(OP, kwargs)

    def handed_on(**named):
        state, outputs, start = named["initial_states"], [], 0
        for length in lengths:
            x = named["x"][..., start : start + length]
            out, state = call(OP, named | {"x": x, "initial_states": state}, backend)
            outputs.append(out)
            start += length
        return torch.cat(outputs, 2), state

    exact = exact_results(OP, kwargs, cotangents)
    results = differentiate(handed_on, OP, kwargs, cotangents)
    for name, result in results.items():
        assert_close(result, exact[name], GRADIENT if name[0] == "d" else FLOAT32, name)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_padding_takes_no_gradient(backend, activation):
    """S18: dout at a pad reaches no input, weight or bias, whatever it is."""
    kwargs = conv_inputs(2, 4, 9, activation=activation)
    kwargs["seq_idx"] = torch.tensor([[-1, -1, 0, 0, -1, 0, 1, 1, -5], [-1] * 9])
    pads = (kwargs["seq_idx"] < 0)[:, None]
    cotangents = draw_cotangents(OP, kwargs)
    clean = check_sequence(OP, kwargs, backend, cotangents=cotangents)
    for value in (1e30, math.inf, math.nan):
        spoilt = kwargs | {"x": torch.where(pads, value, kwargs["x"])}
        seeds = cotangents | {"out": torch.where(pads, value, cotangents["out"])}
        results = differentiate(lambda **named: call(OP, named, backend), OP, spoilt, seeds)
        for name, result in results.items():
            assert_same(result, clean[name], name)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("packed", [False, True])
def test_equal_bits_whatever_the_number_of_threads(backend, layout, packed):
    """B61: results and gradients of repeated runs, with one thread and with several."""
    kwargs = conv_inputs(3, 130, 700)
    kwargs["x"] = lay_out(kwargs["x"], layout)
    if packed:
        kwargs["seq_idx"] = (torch.arange(700) // 90).expand(3, 700)
    cotangents = {"out": Draw(3).normal(3, 130, 700), "final_states": Draw(4).normal(3, 130, 3)}
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


def test_autocast_changes_nothing(backend):
    kwargs = conv_inputs()
    cotangents = draw_cotangents(OP, kwargs)
    expected = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
    with torch.autocast("cpu", torch.bfloat16):
        results = differentiate(lambda **named: call(OP, named, backend), OP, kwargs, cotangents)
    for name, result in results.items():
        assert result.dtype == expected[name].dtype
        assert_same(result, expected[name], name)


def test_fake_tensors_and_mixed_devices(backend):
    """B69: shapes, dtypes and strides without data are the real ones; devices must agree."""
    for layout in ("contiguous", "channel_last", "every_other"):
        kwargs = conv_inputs()
        kwargs["x"] = lay_out(kwargs["x"], layout)
        real = call(OP, kwargs, backend)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = {
                n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                for n, v in kwargs.items()
            }
            for result, expected in zip(call(OP, fake, backend), real, strict=True):
                assert (result.shape, result.dtype, result.stride()) == (
                    expected.shape,
                    expected.dtype,
                    expected.stride(),
                )
        for name in ("weight", "bias", "initial_states"):
            with pytest.raises(DeviceError, match=name):
                call(OP, kwargs | {name: kwargs[name].to("meta")}, backend)


def test_wrong_bounds_are_refused(backend):
    kwargs = conv_inputs(1, 3, 9, num_states=3)
    for bounds in ([0, 5, 4, 9], [1, 4, 5, 9], [0, 4, 5, 8], [0, 4, 5, 10], [-1, 4, 5, 9]):
        with pytest.raises(ArgumentError, match="cu_seqlens"):
            call(OP, kwargs | {"cu_seqlens": torch.tensor(bounds)}, backend)
    for bounds in ([], [0]):
        with pytest.raises(ArgumentError):
            call(
                OP,
                kwargs
                | {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "initial_states": None},
                backend,
            )
