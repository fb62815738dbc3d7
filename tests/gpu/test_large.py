# SPDX-License-Identifier: Apache-2.0
"""Tensors whose offsets need more than 32 bits, and more rows and channels than a grid has blocks.

The last part of a large call must be what the same part gives alone. An entry's number in a
docstring is that of the list of faults the tests were written from.
"""

from __future__ import annotations

import pytest
import torch

from statescan import ops
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
FAR = 2**32
STATES = 256


def normal(*shape, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.empty(shape, device="cuda", dtype=dtype)
    return drawn.normal_(generator=generator)


def parameters(dim, dstate):
    rates = -torch.arange(1, dstate + 1, device="cuda", dtype=torch.float32) / dstate
    return {
        "A": rates.expand(dim, dstate).contiguous(),
        "D": normal(dim, dtype=torch.float32, seed=5),
        "dt_bias": normal(dim, dtype=torch.float32, seed=6) - 4,
    }


def scan_with_gradients(kwargs, cotangent):
    leaves = {n: v.detach().requires_grad_() for n, v in kwargs.items()}
    out, final = ops.selective_scan(
        **leaves, dt_softplus=True, return_final_states=True, backend="cuda"
    )
    found = torch.autograd.grad(out, tuple(leaves.values()), cotangent)
    return {"out": out.detach(), "final_states": final.detach()} | {
        f"d{n}": g for n, g in zip(leaves, found, strict=True)
    }


def conv_with_gradients(kwargs, cotangent):
    leaves = {n: v.detach().requires_grad_() for n, v in kwargs.items()}
    out = ops.causal_conv1d(**leaves, activation="silu", backend="cuda")
    found = torch.autograd.grad(out, tuple(leaves.values()), cotangent)
    return {"out": out.detach()} | {f"d{n}": g for n, g in zip(leaves, found, strict=True)}


def assert_matches(op, found, expected, names):
    for name in names:
        value = found[name]
        allowed = tolerance(op, BF16, value.dtype, gradient=name.startswith("d"))
        assert_close(value, expected[name], allowed, name)


@pytest.mark.large
def test_states_beyond_32_bits(room):
    """B01: batch times dim times dstate is 2.15e9."""
    room(60)
    batch, dim, seqlen = 1025, 8192, 8
    kwargs = {n: normal(batch, dim, seqlen, seed=i) for i, n in enumerate(("x", "dt", "z"))}
    kwargs |= {n: normal(batch, STATES, seqlen, seed=i) for i, n in enumerate("BC", 3)}
    cotangent = normal(batch, dim, seqlen, seed=9)
    rows = slice(batch - 1, batch)
    shared = parameters(dim, STATES)
    alone = scan_with_gradients({n: v[rows] for n, v in kwargs.items()} | shared, cotangent[rows])
    whole = scan_with_gradients(kwargs | shared, cotangent)
    names = ("out", "final_states", "dx", "ddt", "dz", "dB", "dC")
    assert_matches("selective_scan", {n: whole[n][rows] for n in names}, alone, names)


@pytest.mark.large
@pytest.mark.parametrize("far", [2**31 + 64, FAR, FAR + 64])
@pytest.mark.parametrize("name", ["x", "dt", "z", "B", "C"])
def test_rows_of_a_scan_far_apart(room, name, far):
    """B02: a stride of 2^32, of which 32 bits keep nothing."""
    room(12)
    kwargs = {n: normal(2, 64, 1024, seed=i) for i, n in enumerate(("x", "dt", "z"))}
    kwargs |= {n: normal(2, 16, 1024, seed=i) for i, n in enumerate("BC", 3)}
    kwargs |= parameters(64, 16)
    cotangent = normal(2, 64, 1024, seed=9)
    near = scan_with_gradients(kwargs, cotangent)
    spread = far_apart(kwargs[name], far)
    found = scan_with_gradients_of_views(kwargs | {name: spread}, cotangent)
    for key, value in found.items():
        assert torch.equal(value, near[key]), key


def far_apart(value, far):
    """A view with the same values whose rows lie ``far`` elements apart."""
    count = far + value[0].numel()
    storage = torch.empty(count, dtype=value.dtype, device="cuda")
    view = storage.as_strided(value.shape, (far, *value.stride()[1:]))
    return view.copy_(value)


def scan_with_gradients_of_views(kwargs, cotangent):
    """Gradients are those of the views: leaves that share their memory."""
    found = scan_with_gradients(kwargs, cotangent)
    return {n: v.contiguous() for n, v in found.items()}


@pytest.mark.large
@pytest.mark.parametrize("far", [2**31 + 64, FAR, FAR + 64])
def test_rows_of_a_convolution_far_apart(room, far):
    """B02, B03."""
    room(12)
    kwargs = {"x": normal(2, 64, 1024), "weight": normal(64, 4, seed=1), "bias": normal(64, seed=2)}
    cotangent = normal(2, 64, 1024, seed=9)
    near = conv_with_gradients(kwargs, cotangent)
    found = conv_with_gradients(kwargs | {"x": far_apart(kwargs["x"], far)}, cotangent)
    spread = far_apart(cotangent, far)
    from_afar = conv_with_gradients(kwargs, spread)
    for key, value in near.items():
        assert torch.equal(found[key], value), key
        assert torch.equal(from_afar[key], value), key


@pytest.mark.large
@pytest.mark.parametrize("channel_last", [False, True])
def test_a_convolution_of_4e9_elements(room, channel_last):
    """B03: (65, 8192, 8192)."""
    room(60)
    shape = (65, 8192, 8192)
    x, cotangent = normal(*shape), normal(*shape, seed=9)
    if channel_last:
        x, cotangent = x.transpose(1, 2), cotangent.transpose(1, 2)
    shared = {"weight": normal(8192, 4, seed=1), "bias": normal(8192, seed=2)}
    rows = slice(64, 65)
    alone = conv_with_gradients({"x": x[rows], **shared}, cotangent[rows])
    whole = conv_with_gradients({"x": x, **shared}, cotangent)
    for name in ("out", "dx"):
        assert torch.equal(whole[name][rows], alone[name]), name
    # Every row counts in the sum over rows: the weights' gradient is that of two halves.
    first = conv_with_gradients({"x": x[:32], **shared}, cotangent[:32])
    second = conv_with_gradients({"x": x[32:], **shared}, cotangent[32:])
    for name in ("dweight", "dbias"):
        halves = first[name].double() + second[name].double()
        assert_close(whole[name], halves, 2e-2, name)


@pytest.mark.large
def test_slices_of_a_wide_projection(room):
    """B05: token times stride wraps at 32 bits beyond token 120,000."""
    room(40)
    seqlen, wide = 131072, 17792
    parent = normal(1, seqlen, wide)
    widths = {"x": 256, "z": 256, "dt": 256, "B": 16, "C": 16}
    kwargs, start = {}, wide - sum(widths.values())
    for name, width in widths.items():
        kwargs[name] = parent[..., start : start + width].transpose(1, 2)
        start += width
    shared, cotangent = parameters(256, 16), normal(1, 256, seqlen, seed=9)
    found = scan_with_gradients(kwargs | shared, cotangent)
    apart = {n: v.contiguous() for n, v in kwargs.items()}
    expected = scan_with_gradients(apart | shared, cotangent)
    late = slice(120_000, None)
    names = ("out", "dx", "ddt", "dz", "dB", "dC")
    tails = {n: found[n][..., late] for n in names}
    assert_matches("selective_scan", tails, {n: expected[n][..., late] for n in names}, names)
    conv = {"weight": normal(256, 4, seed=1), "bias": normal(256, seed=2)}
    one = conv_with_gradients({"x": kwargs["x"], **conv}, cotangent)
    two = conv_with_gradients({"x": apart["x"], **conv}, cotangent)
    tails = {n: one[n][..., late] for n in ("out", "dx")}
    expected = {n: two[n][..., late] for n in ("out", "dx")}
    assert_matches("causal_conv1d", tails, expected, ("out", "dx"))


@pytest.mark.parametrize(("batch", "dim"), [(1, 70000), (70000, 1), (70000, 3), (3, 70001)])
def test_more_rows_or_channels_than_a_grid_has_blocks(batch, dim):
    """B07, in a scan, a convolution, and their updates."""
    seqlen = 64 if batch == 1 else 5
    kwargs = {n: normal(batch, dim, seqlen, seed=i) for i, n in enumerate(("x", "dt", "z"))}
    kwargs |= {n: normal(batch, 4, seqlen, seed=i) for i, n in enumerate("BC", 3)}
    shared, cotangent = parameters(dim, 4), normal(batch, dim, seqlen, seed=9)
    whole = scan_with_gradients(kwargs | shared, cotangent)
    row, channel = slice(batch - 1, batch), slice(dim - 1, dim)
    last = {n: (v[row, channel] if n in ["x", "dt", "z"] else v[row]) for n, v in kwargs.items()}
    last |= {n: v[channel] for n, v in shared.items()}
    alone = scan_with_gradients(last, cotangent[row, channel])
    names = ("out", "final_states", "dx", "ddt", "dz")
    assert_matches("selective_scan", {n: whole[n][row, channel] for n in names}, alone, names)
    conv = {"weight": normal(dim, 4, seed=1), "bias": normal(dim, seed=2)}
    whole = conv_with_gradients({"x": kwargs["x"], **conv}, cotangent)
    part = {n: v[channel] for n, v in conv.items()}
    alone = conv_with_gradients({"x": last["x"], **part}, cotangent[row, channel])
    found = {n: whole[n][row, channel] for n in ("out", "dx")}
    assert_matches("causal_conv1d", found, alone, ("out", "dx"))


@pytest.mark.parametrize(("batch", "dim"), [(1, 70000), (70000, 1), (70000, 3)])
def test_steps_of_more_rows_or_channels_than_a_grid_has_blocks(batch, dim):
    """B07."""
    state = normal(batch, dim, 4, dtype=torch.float32)
    given = {n: normal(batch, dim, seed=i) for i, n in enumerate(("x", "dt", "z"), 1)}
    given |= {n: normal(batch, 4, seed=i) for i, n in enumerate("BC", 5)} | parameters(dim, 4)
    expected_state = state.clone()
    expected = ops.selective_state_update(
        expected_state, **given, dt_softplus=True, backend="torch"
    )
    out = ops.selective_state_update(state, **given, dt_softplus=True, backend="cuda")
    assert_close(out, expected, 1e-2, "out")
    assert_close(state, expected_state, 1e-5, "state")
    taps, weight, bias = normal(batch, dim, 3), normal(dim, 4, seed=1), normal(dim, seed=2)
    expected_taps = taps.clone()
    expected = ops.causal_conv1d_update(given["x"], expected_taps, weight, bias, backend="torch")
    out = ops.causal_conv1d_update(given["x"], taps, weight, bias, backend="cuda")
    assert_close(out, expected, 1e-2, "out")
    assert torch.equal(taps, expected_taps)


@pytest.mark.large
def test_a_slot_beyond_32_bits(room):
    """B09: slot 8999 of (9000, 64, 64, 64); the others keep every bit."""
    room(24)
    pool = normal(9000, 64, 64, 64, dtype=torch.float32)
    slot = torch.tensor([8999], device="cuda")
    given = {"x": normal(1, 64, 64, seed=1), "dt": normal(1, 64, 64, seed=2)}
    given |= {n: normal(1, 1, 64, seed=i) for i, n in enumerate("BC", 3)}
    given["A"] = -torch.rand(64, 64, 64, device="cuda")
    small, before = pool[8999:].clone(), pool[:8999].sum(dtype=torch.float64)
    zeroth = pool[0].clone()
    expected = ops.selective_state_update(small, **given, dt_softplus=True, backend="cuda")
    out = ops.selective_state_update(
        pool, **given, dt_softplus=True, state_batch_indices=slot, backend="cuda"
    )
    assert torch.equal(out, expected)
    assert torch.equal(pool[8999:], small)
    assert torch.equal(pool[0], zeroth)
    assert bool(pool[:8999].sum(dtype=torch.float64) == before)


@pytest.mark.large
def test_a_slot_of_a_convolution_beyond_32_bits(room):
    """B09."""
    room(12)
    pool = normal(90_000, 8192, 3)
    slot = torch.tensor([89_999], device="cuda")
    x, weight, bias = normal(1, 8192, seed=1), normal(8192, 4, seed=2), normal(8192, seed=3)
    small, zeroth = pool[89_999:].clone(), pool[0].clone()
    expected = ops.causal_conv1d_update(x, small, weight, bias, backend="cuda")
    out = ops.causal_conv1d_update(x, pool, weight, bias, conv_state_indices=slot, backend="cuda")
    assert torch.equal(out, expected)
    assert torch.equal(pool[89_999:], small)
    assert torch.equal(pool[0], zeroth)


@pytest.mark.large
def test_a_scan_of_2e9_elements(room):
    """A million tokens of 2048 channels: the last channels are what they are alone."""
    room(100)
    dim, seqlen, kept = 2048, 1_060_000, 8
    kwargs = {n: normal(1, dim, seqlen, seed=i) for i, n in enumerate(("x", "dt"))}
    kwargs |= {n: normal(1, 16, seqlen, seed=i) for i, n in enumerate("BC", 3)}
    shared, cotangent = parameters(dim, 16), normal(1, dim, seqlen, seed=9)
    assert kwargs["x"].numel() > 2**31
    channels = slice(dim - kept, dim)
    last = {n: (v[:, channels] if n in ("x", "dt") else v) for n, v in kwargs.items()}
    last |= {n: v[channels] for n, v in shared.items()}
    alone = scan_with_gradients(last, cotangent[:, channels])
    whole = scan_with_gradients(kwargs | shared, cotangent)
    names = ("out", "final_states", "dx", "ddt")
    assert_matches("selective_scan", {n: whole[n][:, channels] for n in names}, alone, names)
    assert_close(whole["dA"][channels], alone["dA"], 1e-4, "dA")
