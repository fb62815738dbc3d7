# SPDX-License-Identifier: Apache-2.0
"""What is special to causal_conv1d_update: state lengths, rings, slots, rollback, memory overlap.

Faults reported against other libraries are in test_faults_decode.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.differential import assert_same, call, check_update
from helpers.layouts import DISTINCT, LAYOUTS, lay_out
from helpers.op_inputs import conv_inputs, taps_inputs

from statescan.errors import SlotIndexError
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

OP = "causal_conv1d_update"
FLOAT32 = tolerance(OP, torch.float32)
FORMS = [
    pytest.param({}, id="one_token"),
    pytest.param({"ntokens": 3}, id="tokens"),
    pytest.param({"state_len": 7, "ntokens": 2}, id="longer_state"),
    pytest.param({"width": 2, "ntokens": 5}, id="more_tokens_than_state"),
    pytest.param({"width": 1, "ntokens": 2}, id="no_state"),
    pytest.param({"width": 1, "state_len": 2}, id="state_without_taps"),
]
WITH_STATE = [form for form in FORMS if form.id != "no_state"]


def indices(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("ring", [False, True])
def test_steps_are_the_convolution(backend, width, ring):
    """In calls of one or several tokens, from states of any length, rings included."""
    made = conv_inputs(2, 4, 13, width)
    out, final_states = call("causal_conv1d", made, backend)
    bound = tolerance("causal_conv1d", torch.float32)
    weights = {n: made[n] for n in ("weight", "bias", "activation")}
    for extra, sizes in itertools.product((0, 1, 4), ([1] * 13, [4, 1, 8], [13])):
        state_len = width - 1 + extra
        if ring and state_len == 0:
            continue
        state = torch.cat([torch.full((2, 4, extra), math.nan), made["initial_states"]], dim=2)
        seen = torch.tensor([state_len * 3, state_len * 5])
        parts, start = [], 0
        for size in sizes:
            x = made["x"][..., start : start + size]
            kwargs = weights | {"conv_state": state, "x": x.squeeze(-1) if size == 1 else x}
            if ring:
                kwargs["cache_seqlens"] = seen + start
            parts.append(call(OP, kwargs, backend).reshape(2, 4, size))
            start += size
        assert_close(torch.cat(parts, 2), out, bound, "out")
        if ring:
            state = state.roll(-(13 % state_len), dims=2)
        assert_same(state[..., extra:], final_states)


@pytest.mark.parametrize("form", FORMS)
def test_every_combination_of_options(backend, form):
    for options, activation, slots in itertools.product(("", "bias"), (None, "silu"), (None, 6)):
        kwargs = taps_inputs(options=options, activation=activation, slots=slots, **form)
        if slots:
            kwargs["conv_state_indices"] = indices(4, 0, 2)
        check_update(OP, kwargs, backend)


@pytest.mark.parametrize(
    ("width", "state_len"), [(1, 1), (1, 5), (2, 1), (2, 2), (2, 6), (4, 3), (4, 4), (4, 8)]
)
def test_rings(backend, width, state_len):
    """Any number of tokens, from any position, wraps around; each row stands somewhere else."""
    for ntokens, start in itertools.product(
        (None, 0, 1, 2, 5, 2 * state_len + 3), range(state_len + 2)
    ):
        kwargs = taps_inputs(width=width, state_len=state_len, ntokens=ntokens, kept=ntokens or 1)
        kwargs["cache_seqlens"] = indices(start, start + 1, 10 * start + 3)
        check_update(OP, kwargs, backend)


def test_ring_positions_at_the_end_of_int32(backend):
    for dtype, top in ((torch.int32, 2**31 - 1), (torch.int64, 2**62)):
        kwargs = taps_inputs(state_len=5, ntokens=7)
        kwargs["cache_seqlens"] = torch.tensor([top, top - 1, top - 4], dtype=dtype)
        check_update(OP, kwargs, backend)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(backend, form, layout):
    """Inputs of any strides; the states written through views of any strides with gaps."""
    gapped = layout if layout in DISTINCT else "every_other"
    for slots, ring in itertools.product((None, 7), (False, True)):
        kwargs = taps_inputs(slots=slots, kept=5, **form)
        if slots:
            kwargs["conv_state_indices"] = indices(6, -1, 0)
        if ring and kwargs["conv_state"].shape[2]:
            kwargs["cache_seqlens"] = indices(1, 5, 12)
        own = ("conv_state", "intermediate_states", "conv_state_indices", "cache_seqlens")
        laid = {n: v if n in own else lay_out(v, layout) for n, v in kwargs.items()}
        laid |= {n: lay_out(kwargs[n], gapped) for n in own[:2]}
        laid["out"] = lay_out(torch.full_like(kwargs["x"], math.nan), gapped)
        check_update(OP, laid, backend)


@pytest.mark.parametrize("ring", [False, True])
def test_gaps_between_the_states_stay(backend, ring):
    """A state that is a slice of a longer cache, its columns before and behind untouched."""
    for slots in (None, indices(4, 2, 0)):
        parent = torch.full((5, 9, 20), 7.0)
        kwargs = taps_inputs(slots=3 if slots is None else 5, state_len=4)
        kwargs["conv_state"] = parent[: kwargs["conv_state"].shape[0], 1::2, 3:7].copy_(
            kwargs["conv_state"]
        )
        kwargs["conv_state_indices"] = slots
        kwargs["cache_seqlens"] = indices(2, 3, 9) if ring else None
        check_update(OP, kwargs, backend)
        mask = torch.ones_like(parent, dtype=torch.bool)
        mask[:, 1::2, 3:7] = False
        assert bool((parent[mask] == 7.0).all())


@pytest.mark.parametrize("form", WITH_STATE)
@pytest.mark.parametrize("ring", [False, True])
def test_slots(backend, form, ring):
    """A slot is read, perhaps another written; the other slots keep their bits."""
    reads = [None, indices(0, 1, 2), indices(5, 0, 3), indices(2, 2, 2), indices(-1, 4, -9)]
    writes = [None, indices(2, 0, 1), indices(1, -1, 0), indices(0, -2, -2)]
    for read, write, pad in itertools.product(reads, writes, (-1, 0, 4)):
        if write is None and read is not None and len(set(read.tolist())) < 3:
            continue
        kwargs = taps_inputs(slots=3 if read is None else 6, **form)
        kwargs |= {"conv_state_indices": read, "dst_conv_state_indices": write, "pad_slot_id": pad}
        kwargs["cache_seqlens"] = indices(0, 5, 12) if ring else None
        check_update(OP, kwargs, backend)


def test_gather_and_destination_overlap(backend):
    """Every row reads its slot as it was before the call: a rotation, a swap, a copy."""
    for read, write in (((0, 1, 2), (1, 2, 0)), ((1, 0, 2), (0, 1, 2)), ((0, 0, 0), (0, 1, 2))):
        for form in ({}, {"ntokens": 2, "kept": 3}, {"dim": 3000, "state_len": 40}):
            kwargs = taps_inputs(**form)
            kwargs |= {
                "conv_state_indices": indices(*read),
                "dst_conv_state_indices": indices(*write),
            }
            check_update(OP, kwargs, backend)


@pytest.mark.parametrize("ring", [False, True])
def test_padding_rows_touch_nothing(backend, ring):
    """NaN in a padding row's input and slot reaches nobody, and its own output is 0."""
    kwargs = taps_inputs(4, slots=6, ntokens=2, kept=2, state_len=5)
    kwargs |= {"conv_state_indices": indices(3, -1, 5, 2), "pad_slot_id": 5}
    kwargs["cache_seqlens"] = torch.tensor([1, -(2**62), 2**62, 9]) if ring else None
    kwargs["x"][1:3] = math.nan
    kwargs["intermediate_states"][1:3] = math.nan
    for slot in (0, 1, 4, 5):
        kwargs["conv_state"][slot] = math.nan
    results = check_update(OP, kwargs, backend)
    assert not results["out"][1:3].any()
    assert results["out"][[0, 3]].isfinite().all()
    assert results["conv_state"][[0, 1, 4, 5]].isnan().all()
    assert results["conv_state"][[2, 3]].isfinite().all()


@pytest.mark.parametrize("ring", [False, True])
def test_nan_in_a_state_reaches_only_the_taps_that_meet_it(backend, ring):
    """Columns older than width - 1 may hold anything."""
    for column in range(6):
        kwargs = taps_inputs(1, width=4, state_len=6, ntokens=3)
        kwargs["cache_seqlens"] = indices(6 * 7) if ring else None
        kwargs["conv_state"][..., column] = math.nan
        out = call(OP, kwargs, backend)
        reached = out.isnan().any(dim=(0, 1)).nonzero().flatten().tolist()
        assert reached == list(range(column - 2)), column


def test_indices_of_padding_rows_are_not_judged(backend):
    """A row is padding by either index; the other one may collide or lie outside the pool."""
    cases = [
        ((-1, 3, 0), (2, 2, 1)),
        ((3, 4, 0), (-1, 1, -1)),
        ((99, 3, 0), (-1, 1, 2)),
        ((-1, 3, 0), (99, 1, 2)),
    ]
    for read, write in cases:
        slots = {"conv_state_indices": indices(*read), "dst_conv_state_indices": indices(*write)}
        check_update(OP, taps_inputs(slots=6, kept=2, ntokens=2) | slots, backend)
        accepted = [77 if min(pair) < 0 else 1 for pair in zip(read, write, strict=True)]
        kwargs = taps_inputs(slots=6, kept=2, ntokens=2) | slots
        check_update(OP, kwargs | {"num_accepted_tokens": indices(*accepted)}, backend)


@pytest.mark.parametrize("name", ["conv_state_indices", "dst_conv_state_indices"])
def test_wrong_slots_raise_before_anything_is_written(backend, name):
    for wrong in ((0, 6, 1), (0, 1000, -1), (3, 3, 1), (4, -1, 4)):
        kwargs = taps_inputs(slots=6, kept=1) | {"conv_state_indices": indices(0, 1, 2)}
        kwargs |= {name: indices(*wrong), "out": torch.full((3, 4), 5.0)}
        before = {n: kwargs[n].clone() for n in ("conv_state", "intermediate_states", "out")}
        with pytest.raises(SlotIndexError, match=name):
            call(OP, kwargs, backend)
        for written, old in before.items():
            assert_same(kwargs[written], old)


@pytest.mark.parametrize("form", WITH_STATE)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_rollback(backend, form, ring, slots):
    """Accepting n of the guesses continues as if only they had been seen, for every n."""
    ntokens = 4
    form = dict(form) | {"ntokens": ntokens}
    kwargs = taps_inputs(5, slots=8 if slots else None, kept=ntokens, **form)
    if slots:
        kwargs |= {
            "conv_state_indices": indices(7, 0, 3, -1, 1),
            "dst_conv_state_indices": indices(7, 2, 4, 5, 1),
        }
    kwargs["num_accepted_tokens"] = indices(0, 0, 0, 0, 0)
    kwargs["cache_seqlens"] = indices(0, 1, 2, 8, 9) if ring else None
    check_update(OP, kwargs, backend)
    follow = taps_inputs(5, slots=8 if slots else None, kept=ntokens, **form, seed=8)
    for shift in range(ntokens + 1):
        again = follow | {n: kwargs[n].clone() for n in ("conv_state", "intermediate_states")}
        again |= {n: kwargs[n] for n in kwargs if n.endswith("indices")}
        accepted = torch.tensor([(b + shift) % (ntokens + 1) for b in range(5)])
        again["num_accepted_tokens"] = accepted
        again["cache_seqlens"] = kwargs["cache_seqlens"] + accepted if ring else None
        check_update(OP, again, backend)


@pytest.mark.parametrize("ring", [False, True])
def test_speculative_decoding_equals_plain_decoding(backend, ring):
    """Guess three, accept some, commit: the slot holds what the accepted tokens alone leave."""
    draft = taps_inputs(2, ntokens=3, kept=3, state_len=5)
    x, state, seen = draft["x"].clone(), draft["conv_state"].clone(), indices(4, 11)
    position = {"cache_seqlens": seen} if ring else {}
    call(OP, draft | position | {"num_accepted_tokens": indices(0, 0)}, backend)
    assert_same(draft["conv_state"], state)
    call(OP, draft | position | {"x": x[..., :0], "num_accepted_tokens": indices(2, 1)}, backend)
    for row, count in ((0, 2), (1, 1)):
        expected = state[row : row + 1].clone()
        one = {n: draft[n] for n in ("weight", "bias", "activation")}
        for t in range(count):
            position = {"cache_seqlens": seen[row : row + 1] + t} if ring else {}
            call(
                OP, one | position | {"x": x[row : row + 1, :, t], "conv_state": expected}, backend
            )
        assert_same(draft["conv_state"][row : row + 1], expected)


def test_more_kept_states_than_tokens(backend):
    """Only the first ntokens entries are written, whatever was accepted before."""
    kwargs = taps_inputs(3, kept=5, ntokens=2) | {"num_accepted_tokens": indices(5, 0, 3)}
    later = kwargs["intermediate_states"][:, 2:].clone()
    check_update(OP, kwargs, backend)
    assert_same(kwargs["intermediate_states"][:, 2:], later)


@pytest.mark.parametrize("form", FORMS)
def test_output_may_replace_x(backend, form):
    for again in (lambda t: t, lambda t: t.view(t.shape)):
        kwargs = taps_inputs(**form)
        expected = call(OP, kwargs | {"conv_state": kwargs["conv_state"].clone()}, backend)
        kwargs["out"] = again(kwargs["x"])
        assert call(OP, kwargs, backend) is kwargs["out"]
        assert_same(kwargs["x"], expected)


def test_x_in_the_memory_of_the_state(backend):
    """x may be a column of the very pool that is shifted, or the token that lies behind it."""
    for ring, width in itertools.product((False, True), (2, 4)):
        position = {"cache_seqlens": indices(5, 2, 9)} if ring else {}
        for column in range(5):
            kwargs = taps_inputs(width=width, state_len=5) | position
            check_update(
                OP, kwargs | {"x": kwargs["conv_state"][..., column]}, backend, shared=True
            )
            kwargs = taps_inputs(width=width, state_len=5, ntokens=2) | position
            kwargs["x"] = kwargs["conv_state"][..., column : column + 1].expand(-1, -1, 2)
            check_update(OP, kwargs, backend, shared=True)
        kwargs = taps_inputs(width=width, state_len=5, ntokens=2) | position
        cache = torch.randn(3, 4, 7)
        kwargs |= {"conv_state": cache[..., :5], "x": cache[..., 5:]}
        check_update(OP, kwargs, backend, shared=True)


def test_result_is_like_x(backend):
    kwargs = taps_inputs(2, 5, ntokens=3)
    kwargs["x"] = lay_out(kwargs["x"], "channel_last")
    assert call(OP, kwargs, backend).stride() == kwargs["x"].stride()


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_mix_of_dtypes(backend, x_dtype):
    """States keep their own dtype, arithmetic is float32, or float64 where anything is."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for state, weight, bias, ring in itertools.product(kinds, kinds, kinds, (False, True)):
        made = taps_inputs(2, 3, state_len=4, ntokens=2, kept=2)
        mix = {
            "x": x_dtype,
            "conv_state": state,
            "weight": weight,
            "bias": bias,
            "intermediate_states": bias,
        }
        kwargs = made | {name: made[name].to(dtype) for name, dtype in mix.items()}
        kwargs["cache_seqlens"] = indices(3, 10) if ring else None
        check_update(OP, kwargs, backend)
        assert kwargs["conv_state"].dtype == state


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"batch": 0, "slots": 4}, {"dim": 0}, {"ntokens": 0}, {"dim": 1}, {"width": 33}],
)
@pytest.mark.parametrize("form", WITH_STATE)
def test_empty_and_extreme_sizes(backend, form, sizes, ring):
    sizes = dict(form) | sizes
    if sizes.get("width") == 33:
        sizes["state_len"] = 35
    kwargs = taps_inputs(**sizes)
    if "slots" in sizes:
        kwargs["conv_state_indices"] = torch.zeros(0, dtype=torch.int64)
    if ring:
        kwargs["cache_seqlens"] = torch.arange(kwargs["x"].shape[0]) * 5
    check_update(OP, kwargs, backend)


def test_no_tokens_change_no_state(backend):
    kwargs = taps_inputs(3, ntokens=0, kept=2)
    before = kwargs["conv_state"].clone()
    check_update(OP, kwargs, backend)
    assert_same(kwargs["conv_state"], before)
    call(OP, kwargs | {"dst_conv_state_indices": indices(1, 2, 0)}, backend)
    assert_same(kwargs["conv_state"], before[[2, 0, 1]])


def test_writes_are_visible_to_autograd(backend):
    """A state that a graph saved must not change behind its back."""
    kwargs = taps_inputs()
    factor = torch.randn_like(kwargs["conv_state"]).requires_grad_()
    product = (factor * kwargs["conv_state"]).sum()
    with torch.no_grad():
        call(OP, kwargs, backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
