# SPDX-License-Identifier: Apache-2.0
"""What is special to selective_state_update: both forms, slots, padding, rollback, memory overlap.

Faults reported against other libraries are in test_faults_decode.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.differential import assert_same, call, check_update
from helpers.layouts import DISTINCT, LAYOUTS, lay_out
from helpers.op_inputs import scan_inputs, state_inputs

from statescan.errors import SlotIndexError
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

OP = "selective_state_update"
FLOAT32 = tolerance(OP, torch.float32)
HEADS = (4, 3)
FORMS = [
    pytest.param({}, id="one_token"),
    pytest.param({"ntokens": 3}, id="tokens"),
    pytest.param({"ntokens": 3, "ngroups": 2}, id="tokens_groups"),
    pytest.param({"ngroups": 4}, id="group_per_channel"),
    pytest.param({"heads": HEADS}, id="headed"),
    pytest.param({"heads": HEADS, "ngroups": 2}, id="headed_groups"),
    pytest.param({"heads": HEADS, "ntokens": 3, "ngroups": 4}, id="headed_tokens"),
    pytest.param({"is_complex": True, "ngroups": 2}, id="complex"),
    pytest.param({"is_complex": True, "heads": HEADS, "ntokens": 2}, id="complex_headed"),
]


def indices(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kind", [{}, {"ngroups": 2}, {"is_complex": True}, {"constant": "BC"}])
def test_steps_are_the_scan(backend, kind):
    """Token by token and in calls of several tokens, the states end where the scan's do."""
    made = scan_inputs(2, 4, 13, **kind)
    out, final_states = call("selective_scan", made, backend)
    dim = made["x"].shape[1]
    for name in ("B", "C"):
        if made[name].dim() == 2:
            made[name] = made[name][None, ..., None].expand(2, dim, -1, 13)
    for sizes in ([1] * 13, [4, 1, 8], [13]):
        state, parts, start = made["initial_states"].clone(), [], 0
        for size in sizes:
            tokens = {n: made[n][..., start : start + size] for n in ("x", "dt", "z", "B", "C")}
            if size == 1:
                tokens = {n: v.squeeze(-1) for n, v in tokens.items()}
            kwargs = {n: made[n] for n in ("A", "D", "dt_bias", "dt_softplus")} | tokens
            parts.append(call(OP, kwargs | {"ssm_state": state}, backend).reshape(2, dim, size))
            start += size
        bound = tolerance("selective_scan", torch.float32)
        assert_close(torch.cat(parts, 2), out, bound, "out")
        assert_close(state, final_states, bound, "state")


@pytest.mark.parametrize("form", FORMS)
def test_every_combination_of_options(backend, form):
    names = ("D", "z", "dt_bias")
    for given in itertools.product([False, True], repeat=3):
        options = " ".join(n for n, used in zip(names, given, strict=True) if used)
        for softplus, slots in itertools.product((False, True), repeat=2):
            kwargs = state_inputs(options=options, slots=6 if slots else None, **form)
            kwargs["dt_softplus"] = softplus
            if slots:
                kwargs["state_batch_indices"] = indices(4, 0, 2)
            check_update(OP, kwargs, backend)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(backend, form, layout):
    """Inputs of any strides; the states written through views of any strides with gaps."""
    gapped = layout if layout in DISTINCT else "every_other"
    for slots in (None, 7):
        kwargs = state_inputs(slots=slots, kept=4, **form)
        if slots:
            kwargs |= {"state_batch_indices": indices(6, -1, 0)}
        own = ("ssm_state", "intermediate_states", "state_batch_indices")
        laid = {n: v if n in own else lay_out(v, layout) for n, v in kwargs.items()}
        laid |= {n: lay_out(kwargs[n], gapped) for n in own[:2]}
        laid["out"] = lay_out(torch.full_like(kwargs["x"], math.nan), gapped)
        check_update(OP, laid, backend)


def test_gaps_between_the_states_stay(backend):
    parent = torch.full((9, 11, 13), 7.0)
    kwargs = state_inputs(3, 4, 5)
    kwargs["ssm_state"] = parent[1:9:3, 2:10:2, 3:13:2].copy_(kwargs["ssm_state"])
    before = parent.clone()
    check_update(OP, kwargs, backend)
    mask = torch.ones_like(parent, dtype=torch.bool)
    mask[1:9:3, 2:10:2, 3:13:2] = False
    assert_same(parent[mask], before[mask])


@pytest.mark.parametrize("form", FORMS)
def test_tied_arguments_of_stride_zero(backend, form):
    """A, dt, dt_bias and D with one number a head, a channel or altogether."""
    for layout in ("equal_tokens", "one_number"):
        kwargs = state_inputs(**form)
        for names in (
            ("A",),
            ("dt", "dt_bias"),
            ("A", "dt", "D", "dt_bias"),
            ("x", "z"),
            ("B", "C"),
        ):
            tied = {n: lay_out(kwargs[n], layout) for n in names}
            check_update(OP, kwargs | tied | {"ssm_state": kwargs["ssm_state"].clone()}, backend)


@pytest.mark.parametrize("form", FORMS)
def test_slots(backend, form):
    """A slot is read, perhaps another written; the other slots keep their bits."""
    reads = [None, indices(0, 1, 2), indices(5, 0, 3), indices(2, 2, 2), indices(-1, 4, -9)]
    writes = [None, indices(2, 0, 1), indices(1, -1, 0), indices(0, -2, -2)]
    for read, write, pad in itertools.product(reads, writes, (-1, 0, 4)):
        if write is None and read is not None and len(set(read.tolist())) < 3:
            continue
        kwargs = state_inputs(slots=3 if read is None else 6, **form)
        kwargs |= {
            "state_batch_indices": read,
            "dst_state_batch_indices": write,
            "pad_slot_id": pad,
        }
        check_update(OP, kwargs, backend)


def test_gather_and_destination_overlap(backend):
    """Every row reads its slot as it was before the call: a rotation, a swap, a copy."""
    for read, write in (
        ((0, 1, 2), (1, 2, 0)),
        ((1, 0, 2), (0, 1, 2)),
        ((0, 0, 0), (0, 1, 2)),
        ((2, 1, 0), (0, 2, 1)),
    ):
        for form in ({}, {"heads": HEADS, "ngroups": 2}, {"dim": 300, "dstate": 200}):
            kwargs = state_inputs(**form)
            kwargs |= {
                "state_batch_indices": indices(*read),
                "dst_state_batch_indices": indices(*write),
            }
            check_update(OP, kwargs, backend)


def test_padding_rows_touch_nothing(backend):
    """NaN in a padding row's inputs and slot reaches nobody, and its own output is 0."""
    for form in ({}, {"ntokens": 2}, {"heads": HEADS}, {"is_complex": True}):
        kwargs = state_inputs(4, slots=6, kept=None if form == {} else 2, **form)
        kwargs["state_batch_indices"] = indices(3, -1, 5, 2)
        kwargs["pad_slot_id"] = 5
        for name in ("x", "dt", "B", "C", "z"):
            kwargs[name][1:3] = math.nan
        for slot in (0, 1, 4, 5):
            kwargs["ssm_state"][slot] = math.nan
        if "intermediate_states" in kwargs:
            kwargs["intermediate_states"][1:3] = math.nan
        results = check_update(OP, kwargs, backend)
        assert not results["out"][1:3].any()
        assert results["out"][[0, 3]].isfinite().all()
        assert results["ssm_state"][[0, 1, 4, 5]].isnan().all()
        assert results["ssm_state"][[2, 3]].isfinite().all()


@pytest.mark.parametrize("pad_slot_id", [-1, 0, 2, 5, 1000])
def test_pad_slot_id(backend, pad_slot_id):
    """Any value may mark padding, also the number of a real slot or one beyond the pool."""
    kwargs = state_inputs(4, slots=6)
    kwargs |= {
        "state_batch_indices": indices(2, 0, 5, pad_slot_id if pad_slot_id > 5 else -1),
        "pad_slot_id": pad_slot_id,
    }
    check_update(OP, kwargs, backend)


def test_indices_of_padding_rows_are_not_judged(backend):
    """A row is padding by either index; the other one may collide or lie outside the pool."""
    cases = [
        ((-1, 3, 0), (2, 2, 1)),
        ((3, 4, 0), (-1, 1, -1)),
        ((99, 3, 0), (-1, 1, 2)),
        ((-1, 3, 0), (99, 1, 2)),
        ((-1, -1, 5), (0, 0, 0)),
    ]
    for read, write in cases:
        kwargs = state_inputs(slots=6, kept=2, ntokens=2)
        kwargs |= {
            "state_batch_indices": indices(*read),
            "dst_state_batch_indices": indices(*write),
        }
        check_update(OP, kwargs, backend)
        accepted = [77 if min(pair) < 0 else 1 for pair in zip(read, write, strict=True)]
        kwargs = state_inputs(slots=6, kept=2, ntokens=2) | {
            "num_accepted_tokens": indices(*accepted)
        }
        kwargs |= {
            "state_batch_indices": indices(*read),
            "dst_state_batch_indices": indices(*write),
        }
        check_update(OP, kwargs, backend)


@pytest.mark.parametrize("names", ["state_batch_indices", "dst_state_batch_indices"])
def test_wrong_slots_raise_before_anything_is_written(backend, names):
    for wrong in ((0, 6, 1), (0, 1000, -1), (3, 3, 1), (4, -1, 4)):
        kwargs = state_inputs(slots=6, kept=1) | {"state_batch_indices": indices(0, 1, 2)}
        kwargs |= {names: indices(*wrong), "out": torch.full((3, 4), 5.0)}
        before = {n: kwargs[n].clone() for n in ("ssm_state", "intermediate_states", "out")}
        with pytest.raises(SlotIndexError, match=names):
            call(OP, kwargs, backend)
        for name, old in before.items():
            assert_same(kwargs[name], old)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slots", [False, True])
def test_rollback(backend, form, slots):
    """Accepting n of the guesses continues as if only they had been seen, for every n."""
    ntokens = 4
    form = dict(form) | {"ntokens": ntokens}
    kwargs = state_inputs(5, slots=8 if slots else None, kept=ntokens, **form)
    if slots:
        kwargs |= {
            "state_batch_indices": indices(7, 0, 3, -1, 1),
            "dst_state_batch_indices": indices(7, 2, 4, 5, 1),
        }
    kwargs["num_accepted_tokens"] = indices(0, 0, 0, 0, 0)
    check_update(OP, kwargs, backend)
    follow = state_inputs(5, slots=8 if slots else None, kept=ntokens, **form, seed=8)
    for shift in range(ntokens + 1):
        again = follow | {n: kwargs[n].clone() for n in ("ssm_state", "intermediate_states")}
        again |= {n: kwargs[n] for n in kwargs if n.endswith("indices")}
        again["num_accepted_tokens"] = torch.tensor([(b + shift) % (ntokens + 1) for b in range(5)])
        check_update(OP, again, backend)


def test_speculative_decoding_equals_plain_decoding(backend):
    """Guess three, accept some, commit: the slot holds what the accepted tokens alone leave."""
    draft = state_inputs(2, ntokens=3, kept=3, seed=1)
    plain = {n: draft[n] for n in ("A", "D", "dt_bias", "dt_softplus")}
    tokens = {n: draft[n].clone() for n in ("x", "dt", "z", "B", "C")}
    state = draft["ssm_state"].clone()
    call(OP, draft | {"num_accepted_tokens": indices(0, 0)}, backend)
    assert_same(draft["ssm_state"], state)
    nothing = {n: v[..., :0] for n, v in tokens.items()}
    call(OP, draft | nothing | {"num_accepted_tokens": indices(2, 1)}, backend)
    for row, count in ((0, 2), (1, 1)):
        expected = state[row : row + 1].clone()
        for t in range(count):
            one = {n: v[row : row + 1, ..., t] for n, v in tokens.items()}
            call(OP, plain | one | {"ssm_state": expected}, backend)
        assert_close(draft["ssm_state"][row : row + 1], expected, FLOAT32)


def test_more_kept_states_than_tokens(backend):
    """Only the first ntokens entries are written, whatever was accepted before."""
    kwargs = state_inputs(3, kept=5, ntokens=2) | {"num_accepted_tokens": indices(5, 0, 3)}
    later = kwargs["intermediate_states"][:, 2:].clone()
    check_update(OP, kwargs, backend)
    assert_same(kwargs["intermediate_states"][:, 2:], later)


@pytest.mark.parametrize("form", FORMS)
def test_output_may_replace_an_input(backend, form):
    """out= may be x, z or dt themselves, or the same view once more."""
    for name in ("x", "z", "dt"):
        for again in (lambda t: t, lambda t: t.view(t.shape)):
            kwargs = state_inputs(**form)
            expected = call(
                OP,
                {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()},
                backend,
            )
            kwargs["out"] = again(kwargs[name])
            assert call(OP, kwargs, backend) is kwargs["out"]
            assert_same(kwargs[name], expected, name)


def test_output_in_the_memory_of_x_many_rows(backend):
    """The same where a call is cut into blocks of rows, also with rows of x one apart."""
    memory = torch.randn(41, 700)
    kwargs = state_inputs(40, 700, 16)
    kwargs["x"] = memory[:40]
    expected = call(
        OP, kwargs | {"ssm_state": kwargs["ssm_state"].clone(), "x": memory[:40].clone()}, backend
    )
    call(OP, kwargs | {"out": memory[1:]}, backend)
    assert_close(memory[1:], expected, FLOAT32)


def test_states_share_memory_with_inputs(backend):
    """B, C and A may be read out of the pool that the call overwrites."""
    kwargs = state_inputs(3, 4, 3)
    pool = torch.randn(3, 6, 3)
    kwargs |= {
        "ssm_state": pool[:, :4],
        "B": pool[:, 4],
        "C": pool[:, 5],
        "x": pool[:, :4, 0],
        "A": -pool[1, :4].abs(),
    }
    check_update(OP, kwargs, backend, shared=True)


def test_result_is_like_x(backend):
    kwargs = state_inputs(2, 5, ntokens=3)
    kwargs["x"] = lay_out(kwargs["x"], "channel_last")
    assert call(OP, kwargs, backend).stride() == kwargs["x"].stride()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        kwargs = state_inputs(2, 5)
        assert call(OP, kwargs | {"x": kwargs["x"].to(dtype)}, backend).dtype == dtype


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_mix_of_dtypes(backend, x_dtype):
    """States keep their own dtype, arithmetic is float32, or float64 where anything is."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for state, B, A, D, z in itertools.product(kinds, kinds, kinds, kinds, kinds[:2]):
        made = state_inputs(2, 3, 2, kept=1)
        mix = {
            "x": x_dtype,
            "ssm_state": state,
            "B": B,
            "C": A,
            "A": A,
            "D": D,
            "dt_bias": D,
            "z": z,
            "dt": B,
        }
        mix["intermediate_states"] = z
        kwargs = made | {name: made[name].to(dtype) for name, dtype in mix.items()}
        check_update(OP, kwargs, backend)
        assert kwargs["ssm_state"].dtype == state
    for double in (
        "x",
        "ssm_state",
        "A",
        "B",
        "C",
        "D",
        "z",
        "dt_bias",
        "dt",
        "intermediate_states",
    ):
        kwargs = state_inputs(2, 3, 2, kept=1)
        check_update(OP, kwargs | {double: kwargs[double].double()}, backend)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"batch": 0, "slots": 4},
        {"dim": 0},
        {"ntokens": 0},
        {"dstate": 1},
        {"dstate": 257},
    ],
)
def test_empty_and_extreme_sizes(backend, form, sizes):
    form = dict(form) | sizes
    if form.get("dim") == 0 and form.pop("heads", None):
        form["heads"] = (0, 3)
    kwargs = state_inputs(**form)
    if "slots" in form:
        kwargs["state_batch_indices"] = torch.zeros(0, dtype=torch.int64)
    check_update(OP, kwargs, backend)


def test_no_tokens_change_no_state(backend):
    kwargs = state_inputs(3, ntokens=0, kept=2)
    before = kwargs["ssm_state"].clone()
    check_update(OP, kwargs, backend)
    assert_same(kwargs["ssm_state"], before)
    kwargs |= {"dst_state_batch_indices": indices(1, 2, 0)}
    call(OP, kwargs, backend)
    assert_same(kwargs["ssm_state"], before[[2, 0, 1]])


def test_writes_are_visible_to_autograd(backend):
    """A state that a graph saved must not change behind its back."""
    kwargs = state_inputs()
    factor = torch.randn_like(kwargs["ssm_state"]).requires_grad_()
    product = (factor * kwargs["ssm_state"]).sum()
    with torch.no_grad():
        call(OP, kwargs, backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
