# SPDX-License-Identifier: Apache-2.0
"""The originals' functions over their own test grids and the corners that these leave out.

Every call is compared, outputs and all gradients, with the reference in float64.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.nn import functional as F

from statescan.compat import _gradients
from statescan.compat.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
    causal_conv1d_varlen_states,
    causal_conv1d_varlen_states_ref,
)
from statescan.compat.selective_scan import SelectiveScanFn, selective_scan_fn, selective_scan_ref
from statescan.compat.selective_state_update import (
    selective_state_update,
    selective_state_update_ref,
)
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("device")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def wide(tensor):
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def check(op, function, exact_function, tensors, **options):
    """Outputs and gradients of ``function`` against ``exact_function`` in float64."""
    given = {n: t if t is None else t.detach().requires_grad_() for n, t in tensors.items()}
    exact = {n: t if t is None else wide(t).detach().requires_grad_() for n, t in tensors.items()}
    found, truth = function(**given, **options), exact_function(**exact, **options)
    found = found if isinstance(found, tuple) else (found,)
    truth = truth if isinstance(truth, tuple) else (truth,)
    activations = next(iter(tensors.values())).dtype
    cotangents = [torch.randn(t.shape, dtype=f.dtype) for t, f in zip(truth, found)]
    for result, expected in zip(found, truth):
        assert_close(result, expected, tolerance(op, activations, result.dtype), "output")
    leaves = [t for t in given.values() if t is not None]
    targets = [t for t in exact.values() if t is not None]
    grads = torch.autograd.grad(found, leaves, cotangents)
    exact_grads = torch.autograd.grad(truth, targets, [wide(c) for c in cotangents])
    names = [n for n, t in given.items() if t is not None]
    for name, grad, expected in zip(names, grads, exact_grads):
        assert grad.dtype == tensors[name].dtype
        allowed = tolerance(op, activations, grad.dtype, gradient=True)
        assert_close(grad, expected, allowed, f"gradient of {name}")


def scan_tensors(dtype, length, groups=1, constant="", is_complex=False, absent=()):
    batch, dim, dstate = 2, 4, 8
    kind = torch.complex64 if is_complex else torch.float32

    def projection(name):
        if name in constant:
            return torch.randn(dim, dstate, dtype=kind)
        span = 2 * length if is_complex else length
        shape = (batch, groups, dstate, span) if groups > 1 else (batch, dstate, span)
        return torch.randn(shape).to(dtype)

    rates = -0.5 * torch.rand(dim, dstate)
    found = {
        "u": torch.randn(batch, dim, length).to(dtype),
        "delta": (0.5 * torch.rand(batch, dim, length)).to(dtype),
        "A": torch.complex(rates, torch.randn(dim, dstate)) if is_complex else rates,
        "B": projection("B"),
        "C": projection("C"),
        "D": torch.randn(dim),
        "z": torch.randn(batch, dim, length).to(dtype),
        "delta_bias": 0.5 * torch.rand(dim),
    }
    return {name: None if name in absent else tensor for name, tensor in found.items()}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", [1, 7, 128, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scan_over_the_originals_grid(dtype, length, groups):
    tensors = scan_tensors(dtype, length, groups)
    options = {"delta_softplus": True, "return_last_state": True}
    check("selective_scan", selective_scan_fn, selective_scan_ref, tensors, **options)


@pytest.mark.parametrize("absent", [("z",), ("D",), ("delta_bias",), ("z", "D", "delta_bias")])
@pytest.mark.parametrize("constant", ["", "B", "C", "BC"])
@pytest.mark.parametrize("softplus", [False, True])
def test_scan_in_the_corners_that_the_original_leaves_untested(absent, constant, softplus):
    tensors = scan_tensors(torch.float32, 33, constant=constant, absent=absent)
    options = {"delta_softplus": softplus, "return_last_state": True}
    check("selective_scan", selective_scan_fn, selective_scan_ref, tensors, **options)


@pytest.mark.parametrize("constant", ["", "B", "BC"])
@pytest.mark.parametrize("groups", [1, 2])
def test_scan_takes_the_originals_complex_layout(constant, groups):
    """B and C of the original lay real and imaginary parts in turn along the last axis."""
    tensors = scan_tensors(torch.float32, 20, groups, constant, is_complex=True)
    options = {"delta_softplus": True, "return_last_state": True}
    check("selective_scan", selective_scan_fn, selective_scan_ref, tensors, **options)
    pairs = tensors["B"]
    if "B" not in constant:
        by_hand = torch.complex(pairs[..., 0::2], pairs[..., 1::2])
        assert torch.equal(
            selective_scan_fn(**{**tensors, "B": by_hand}), selective_scan_fn(**tensors)
        )


def test_last_state_has_the_factor_of_a_constant_b():
    """The original's last_state lacks B when B is constant."""
    tensors = scan_tensors(torch.float32, 5, constant="B", absent=("z", "D", "delta_bias"))
    state = torch.zeros(2, 4, 8)
    for t in range(5):
        step, u = tensors["delta"][..., t, None], tensors["u"][..., t, None]
        state = torch.exp(step * tensors["A"]) * state + step * tensors["B"] * u
    last_state = selective_scan_fn(**tensors, return_last_state=True)[1]
    assert_close(last_state, state, tolerance("selective_scan", torch.float32), "last_state")


def test_scan_continues_packs_and_reverses_by_extra_keywords():
    tensors = scan_tensors(torch.float32, 12, absent=("z",))
    whole, last = selective_scan_fn(**tensors, return_last_state=True)

    def part(start, end):
        return {
            n: t[..., start:end] if n in ("u", "delta", "B", "C") else t for n, t in tensors.items()
        }

    first, state = selective_scan_fn(**part(0, 5), return_last_state=True)
    second, end = selective_scan_fn(**part(5, 12), return_last_state=True, initial_states=state)
    assert_close(torch.cat((first, second), -1), whole, tolerance("selective_scan", torch.float32))
    assert_close(end, last, tolerance("selective_scan", torch.float32))
    ids = torch.tensor([[0] * 5 + [1] * 7] * 2, dtype=torch.int32)
    packed = selective_scan_fn(**tensors, seq_idx=ids)
    alone = selective_scan_fn(**part(5, 12))
    assert_close(packed[..., 5:], alone, tolerance("selective_scan", torch.float32))
    flipped = {n: t.flip(-1) if n in ("u", "delta", "B", "C") else t for n, t in tensors.items()}
    turned = selective_scan_fn(**flipped).flip(-1)
    assert_close(
        selective_scan_fn(**tensors, reverse=True),
        turned,
        tolerance("selective_scan", torch.float32),
    )


def test_flags_are_taken_by_their_truth():
    """As the originals take them: programs pass None, 0 or 1."""
    tensors = scan_tensors(torch.float32, 6)
    plain = selective_scan_fn(**tensors)
    assert torch.equal(
        selective_scan_fn(**tensors, delta_softplus=None, return_last_state=None), plain
    )
    out, _ = selective_scan_fn(**tensors, delta_softplus=1, return_last_state=1)
    assert torch.equal(out, selective_scan_fn(**tensors, delta_softplus=True))
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    assert isinstance(causal_conv1d_fn(x, weight, return_final_states=None), torch.Tensor)


def test_autograd_functions_are_served_by_apply():
    tensors = scan_tensors(torch.float32, 6)
    assert torch.equal(SelectiveScanFn.apply(*tensors.values()), selective_scan_fn(**tensors))


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution_with_states_in_both_layouts(dtype, width, activation):
    for channel_last, dim in itertools.product((False, True), (5, 8)):
        x = torch.randn(2, dim, 19).to(dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if channel_last else x
        tensors = {
            "x": x,
            "weight": torch.randn(dim, width),
            "bias": torch.randn(dim),
            "initial_states": torch.randn(2, dim, width - 1).to(dtype),
        }
        options = {"return_final_states": True, "activation": activation}
        check("causal_conv1d", causal_conv1d_fn, causal_conv1d_ref, tensors, **options)


def test_convolution_writes_the_given_final_states():
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    given = torch.full((2, 6, 3), float("nan"))
    out, final_states = causal_conv1d_fn(
        x, weight, return_final_states=True, final_states_out=given
    )
    assert final_states is given
    assert torch.equal(given, x[..., -3:])
    assert torch.equal(out, causal_conv1d_fn(x, weight))


def test_convolution_keeps_packed_sequences_apart_and_padding_without_gradient():
    x = torch.randn(1, 4, 9, requires_grad=True)
    weight, bias = torch.randn(4, 3), torch.randn(4)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1]], dtype=torch.int32)
    out = causal_conv1d_fn(x, weight, bias, seq_idx=ids)
    assert_close(out[..., 4:7], causal_conv1d_fn(x[..., 4:7], weight, bias), 1e-6)
    assert not out[..., 7:].any()
    (grad,) = torch.autograd.grad(out.sum() + (out * 3)[..., 7:].sum(), x)
    assert not grad[..., 7:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [None, 1, 4])
@pytest.mark.parametrize("ring", [False, True])
@torch.no_grad()
def test_conv_update(dtype, tokens, ring):
    shape = (3, 8) if tokens is None else (3, 8, tokens)
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(8, 4), torch.randn(8)
    state = torch.randn(3, 8, 6).to(dtype)
    seen = torch.tensor([0, 5, 11], dtype=torch.int32) if ring else None
    exact_state = wide(state)
    exact = causal_conv1d_update_ref(wide(x), exact_state, wide(weight), wide(bias), "silu", seen)
    out = causal_conv1d_update(x, state, weight, bias, "silu", seen)
    assert_close(out, exact, tolerance("causal_conv1d_update", dtype), "out")
    assert torch.equal(wide(state), exact_state)


@torch.no_grad()
def test_conv_update_gathers_slots_and_skips_padding():
    pool, x, weight = torch.randn(5, 4, 3), torch.randn(3, 4), torch.randn(4, 4)
    before, slots = pool.clone(), torch.tensor([3, -1, 0], dtype=torch.int32)
    out = causal_conv1d_update(x, pool, weight, conv_state_indices=slots)
    assert not out[1].any()
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])
    alone = before[[3, 0]].clone()
    assert_close(out[[0, 2]], causal_conv1d_update(x[[0, 2]], alone, weight), 1e-6)
    assert torch.equal(pool[[3, 0]], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("headed", [False, True])
@pytest.mark.parametrize("absent", [(), ("D",), ("dt_bias",), ("D", "z", "dt_bias")])
@torch.no_grad()
def test_state_update(dtype, headed, absent):
    """D and dt_bias may be left out, which fails in the original."""
    channels = (2, 3) if headed else (6,)
    tensors = {
        "state": torch.randn(4, *channels, 8),
        "x": torch.randn(4, *channels).to(dtype),
        "dt": torch.rand(4, *channels).to(dtype),
        "A": -torch.rand(*channels, 8),
        "B": torch.randn(4, *((1,) if headed else ()), 8).to(dtype),
        "C": torch.randn(4, *((1,) if headed else ()), 8).to(dtype),
        "D": torch.randn(channels),
        "z": torch.randn(4, *channels).to(dtype),
        "dt_bias": torch.randn(channels),
    }
    tensors = {n: None if n in absent else t for n, t in tensors.items()}
    exact = {n: wide(t) for n, t in tensors.items()}
    expected = selective_state_update_ref(**exact, dt_softplus=True)
    out = selective_state_update(**tensors, dt_softplus=True)
    assert_close(out, expected, tolerance("selective_state_update", dtype), "out")
    allowed = tolerance("selective_state_update", dtype, torch.float32)
    assert_close(tensors["state"], exact["state"], allowed, "state")


def test_step_and_scan_use_one_softplus():
    """The original's step returns 0 where its scan returns exp(delta), below about -17."""
    u, delta = torch.ones(1, 1, 1), torch.full((1, 1, 1), -25.0)
    A, B = -torch.ones(1, 1), torch.ones(1, 1, 1)
    scanned = selective_scan_fn(u, delta, A, B, B, delta_softplus=True)
    state = torch.zeros(1, 1, 1)
    with torch.no_grad():
        stepped = selective_state_update(
            *(state, u[..., 0], delta[..., 0], A, B[..., 0], B[..., 0]), dt_softplus=True
        )
    exact = F.softplus(torch.tensor(-25.0, dtype=torch.float64))
    assert_close(scanned.flatten(), exact.view(1), 1e-5)
    assert_close(stepped.flatten(), exact.view(1), 1e-5)


def test_a_step_in_grad_mode_says_once_that_it_cuts_the_graph(monkeypatch):
    monkeypatch.setattr(_gradients, "_told", set())
    weight = torch.randn(4, 3, requires_grad=True)
    x, state = torch.randn(2, 4), torch.zeros(2, 4, 2)
    with pytest.warns(UserWarning, match=r"causal_conv1d_update: .* torch\.no_grad\(\)"):
        out = causal_conv1d_update(x, state, weight)
    assert not out.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        causal_conv1d_update(x, state, weight)


@pytest.mark.parametrize("state_len", [1, 3, 5])
def test_varlen_states_keep_the_last_tokens_of_each_sequence(state_len):
    x, bounds = torch.randn(9, 4), torch.tensor([0, 2, 2, 8, 9])
    found = causal_conv1d_varlen_states(x, bounds, state_len)
    assert found.shape == (4, 4, state_len)
    assert torch.equal(found, causal_conv1d_varlen_states_ref(x, bounds, state_len))
    assert torch.equal(found[2, :, -min(state_len, 6) :], x[8 - min(state_len, 6) : 8].T)
    assert not found[1].any()
    assert found.stride(1) == 1
