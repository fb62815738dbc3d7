# SPDX-License-Identifier: Apache-2.0
"""The cpu backend's decode ops: right at every vector level, for any strides, slots and threads.

Truth is the reference in float64, judged by the table of tolerances.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers.differential import check_update
from helpers.layouts import DISTINCT, LAYOUTS, lay_out
from helpers.op_inputs import state_inputs, taps_inputs

from statescan import ops
from statescan.backends import native
from statescan.errors import BackendUnavailableError
from statescan.testing import all_cases, assert_close, assert_passed, run_case, tolerance

STATUS = native.status()
pytestmark = pytest.mark.skipif(
    STATUS.library is None, reason=f"the native library is not usable: {STATUS.reason}"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE, CONV = "selective_state_update", "causal_conv1d_update"
WRITTEN = ("ssm_state", "conv_state", "intermediate_states", "out")
LISTS = ("state_batch_indices", "dst_state_batch_indices", "conv_state_indices")
LISTS += ("dst_conv_state_indices", "num_accepted_tokens", "cache_seqlens")


def placed(kwargs, layout):
    """Every tensor in the layout; what is written needs memory of its own for each element."""
    result = dict(kwargs)
    for name, value in kwargs.items():
        if name in LISTS or (name in WRITTEN and layout not in DISTINCT):
            continue
        result[name] = lay_out(value, layout)
    return result


def copies(kwargs):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*all_cases(STATE), *all_cases(CONV)], ids=lambda c: f"{c.op}-{c}")
def test_cases(case, dtype, level, guarded):
    if case.has("complex"):
        with pytest.raises(BackendUnavailableError, match="its kernels have no complex states"):
            run_case(case, dtype, backend="cpu")
        return
    assert_passed(run_case(case, dtype, backend="cpu"))


@pytest.mark.parametrize("dim", [1, 3, 17, 64, 65, 130])
@pytest.mark.parametrize("dstate", [1, 2, 3, 5, 17, 64, 100, 256])
def test_state_sizes(dstate, dim, level, guarded):
    check_update(STATE, state_inputs(2, dim, dstate), "cpu")


@pytest.mark.parametrize("dim", [1, 3, 17, 64, 65, 130])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 40])
def test_conv_sizes(width, dim, level, guarded):
    check_update(CONV, taps_inputs(2, dim, width), "cpu")


@pytest.mark.parametrize("op", [STATE, CONV])
@pytest.mark.parametrize("batch", [0, 1, 70])
def test_rows(batch, op, level, guarded):
    make = state_inputs if op == STATE else taps_inputs
    check_update(op, make(batch, 9), "cpu")


@pytest.mark.parametrize("ntokens", [0, 1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_tokens(dtype, ntokens, level, guarded):
    check_update(STATE, state_inputs(2, 19, 5, ntokens=ntokens, dtype=dtype), "cpu")
    check_update(
        STATE, state_inputs(2, dstate=5, heads=(3, 7), ntokens=ntokens, dtype=dtype), "cpu"
    )
    check_update(CONV, taps_inputs(2, 19, 4, ntokens=ntokens, state_len=6, dtype=dtype), "cpu")


@pytest.mark.parametrize("options", ["", "D", "z", "dt_bias", "D z"])
@pytest.mark.parametrize("softplus", [False, True])
def test_every_option_of_the_state_may_be_missing(softplus, options, level, guarded):
    kwargs = state_inputs(2, 19, 5, options=options) | {"dt_softplus": softplus}
    kwargs["dt"] = kwargs["dt"].abs()
    check_update(STATE, kwargs, "cpu")


@pytest.mark.parametrize("options", ["", "bias"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_option_of_the_taps_may_be_missing(activation, options, level, guarded):
    check_update(CONV, taps_inputs(2, 19, options=options, activation=activation), "cpu")


@pytest.mark.parametrize("groups", [(1, 1), (2, 2), (20, 20), (4, 10), (1, 20), (None, 5)])
@pytest.mark.parametrize("ntokens", [None, 3])
def test_groups(ntokens, groups, level, guarded):
    kwargs = state_inputs(2, 20, 5, ntokens=ntokens)
    tokens = () if ntokens is None else (ntokens,)
    for name, ngroups in zip("BC", groups, strict=True):
        axes = () if ngroups is None else (ngroups,)
        kwargs[name] = torch.randn(2, *axes, 5, *tokens)
    check_update(STATE, kwargs, "cpu")


@pytest.mark.parametrize("ngroups", [None, 1, 2, 4])
@pytest.mark.parametrize("headdim", [1, 5, 64, 70])
def test_heads(headdim, ngroups, level, guarded):
    check_update(STATE, state_inputs(2, dstate=6, heads=(4, headdim), ngroups=ngroups), "cpu")


def test_one_number_a_head_by_strides_of_zero(level, guarded):
    """As Mamba-2 has A, D and dt: one a head, expanded over channels and states."""
    kwargs = state_inputs(2, dstate=6, heads=(4, 70), ngroups=2)
    kwargs["A"] = kwargs["A"][:, :1, :1].expand(4, 70, 6)
    kwargs["dt"] = kwargs["dt"][..., :1].expand(2, 4, 70)
    for name in ("D", "dt_bias"):
        kwargs[name] = kwargs[name][:, :1].expand(4, 70)
    check_update(STATE, kwargs, "cpu")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, dtype, level, guarded):
    for sizes in ({}, {"ntokens": 3}, {"heads": (3, 7)}, {"heads": (3, 7), "ntokens": 2}):
        kwargs = state_inputs(2, 19, 5, dtype=dtype, ngroups=1, kept=3, **sizes)
        kwargs["out"] = torch.full_like(kwargs["x"], math.nan)
        check_update(STATE, placed(kwargs, layout), "cpu")
    for ntokens in (None, 3):
        kwargs = taps_inputs(2, 19, 4, state_len=5, dtype=dtype, ntokens=ntokens, kept=3)
        kwargs["out"] = torch.full_like(kwargs["x"], math.nan)
        check_update(CONV, placed(kwargs, layout), "cpu")


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_have_their_own_dtype(dtype, state_dtype, level, guarded):
    kwargs = state_inputs(2, 19, 5, dtype=dtype)
    kwargs["ssm_state"] = kwargs["ssm_state"].to(state_dtype)
    check_update(STATE, kwargs, "cpu")
    kwargs = taps_inputs(2, 19, dtype=dtype)
    kwargs["conv_state"] = kwargs["conv_state"].to(state_dtype)
    check_update(CONV, kwargs, "cpu")


def test_every_tensor_may_have_its_own_dtype(level, guarded):
    kinds = {"x": torch.bfloat16, "dt": torch.float16, "B": torch.float16, "D": torch.bfloat16}
    kwargs = state_inputs(2, 19, 5)
    check_update(STATE, kwargs | {n: kwargs[n].to(kind) for n, kind in kinds.items()}, "cpu")
    kinds = {"x": torch.bfloat16, "weight": torch.float16}
    kwargs = taps_inputs(2, 19)
    check_update(CONV, kwargs | {n: kwargs[n].to(kind) for n, kind in kinds.items()}, "cpu")


SLOTS = {
    "as_they_are": ([0, 1, 2], None),
    "others": ([4, 0, 2], None),
    "padding": ([4, -1, 2], None),
    "swap": ([1, 0, 2], [0, 1, 2]),
    "turn": ([0, 1, 2], [1, 2, 0]),
    "chain": ([0, 1, 2], [1, 2, 3]),
    "copies_of_one": ([3, 3, 3], [0, 1, 3]),
    "padding_by_destination": ([0, 1, 2], [4, -7, 3]),
    "only_destinations": (None, [2, 0, 1]),
    "pad_slot": ([5, 0, 1], [0, 5, 1]),
}


def pool_of(name):
    """Slots of the pool; without a list to read by, row b uses slot b and there is no other."""
    return 3 if SLOTS[name][0] is None else 6


def slots(op, name):
    read, write = SLOTS[name]
    prefix = "state_batch" if op == STATE else "conv_state"
    chosen = {f"{prefix}_indices": read, f"dst_{prefix}_indices": write}
    lists = {n: torch.tensor(v, dtype=torch.int32) for n, v in chosen.items() if v is not None}
    return lists | {"pad_slot_id": 5}


@pytest.mark.parametrize("ntokens", [None, 2])
@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("op", [STATE, CONV])
def test_slots(op, name, ntokens, level, guarded):
    """Every row reads its slot as it was before the call, whatever other rows write."""
    make = state_inputs if op == STATE else taps_inputs
    kwargs = make(3, 70, 4, slots=pool_of(name), ntokens=ntokens)
    check_update(op, kwargs | slots(op, name), "cpu")


@pytest.mark.parametrize("op", [STATE, CONV])
def test_swaps_on_several_threads(op, threads, level):
    """Rows that run at the same time do not read what the others have written."""
    make = state_inputs if op == STATE else taps_inputs
    kwargs = make(64, 600, 4)
    prefix = "state_batch" if op == STATE else "conv_state"
    kwargs[f"{prefix}_indices"] = torch.arange(64)
    kwargs[f"dst_{prefix}_indices"] = torch.arange(64).roll(1)
    threads(3)
    check_update(op, kwargs, "cpu")


@pytest.mark.parametrize("op", [STATE, CONV])
def test_padding_rows_give_zero_and_read_nothing(op, level, guarded):
    make = state_inputs if op == STATE else taps_inputs
    kwargs = make(3, 70, 4, slots=6) | slots(op, "padding")
    kwargs["x"][1] = math.nan
    result = check_update(op, kwargs, "cpu")["out"]
    assert not result[1].any()


@pytest.mark.parametrize("ntokens", [None, 3])
@pytest.mark.parametrize("state_len", [3, 4, 7])
@pytest.mark.parametrize("seen", [[0, 1, 2], [3, 4, 9], [7, 100, 2**40]])
def test_rings(seen, state_len, ntokens, level, guarded):
    kwargs = taps_inputs(3, 19, 4, state_len=state_len, ntokens=ntokens)
    kwargs["cache_seqlens"] = torch.tensor(seen)
    check_update(CONV, kwargs, "cpu")


@pytest.mark.parametrize("accepted", [None, [0, 0, 0], [1, 2, 4], [0, 4, 3]])
@pytest.mark.parametrize("ntokens", [1, 2, 4])
@pytest.mark.parametrize("name", ["as_they_are", "others", "turn", "padding"])
def test_rollback(name, ntokens, accepted, level, guarded):
    chosen = {} if accepted is None else {"num_accepted_tokens": torch.tensor(accepted)}
    for heads in (None, (2, 5)):
        kwargs = state_inputs(3, 9, 5, slots=6, ntokens=ntokens, kept=4, heads=heads)
        check_update(STATE, kwargs | slots(STATE, name) | chosen, "cpu")
    kwargs = taps_inputs(3, 9, 4, slots=6, ntokens=ntokens, kept=4, state_len=5)
    check_update(CONV, kwargs | slots(CONV, name) | chosen, "cpu")


def test_rollback_on_a_ring(level, guarded):
    kwargs = taps_inputs(3, 9, 4, ntokens=2, kept=3, state_len=5)
    kwargs["num_accepted_tokens"] = torch.tensor([0, 1, 3])
    kwargs["cache_seqlens"] = torch.tensor([0, 7, 4])
    check_update(CONV, kwargs, "cpu")


@pytest.mark.parametrize("ntokens", [None, 3])
@pytest.mark.parametrize("alias", ["x", "dt", "z"])
def test_state_update_out_may_be_an_input(alias, ntokens, level):
    kwargs = state_inputs(3, 70, 5, ntokens=ntokens)
    fresh = copies(kwargs)
    expected = ops.selective_state_update(**fresh, backend="cpu")
    out = ops.selective_state_update(**kwargs, out=kwargs[alias], backend="cpu")
    assert out is kwargs[alias]
    assert torch.equal(out, expected)
    assert torch.equal(kwargs["ssm_state"], fresh["ssm_state"])


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("ntokens", [None, 3])
def test_conv_update_out_may_be_x(ntokens, ring, level):
    kwargs = taps_inputs(3, 70, ntokens=ntokens)
    if ring:
        kwargs["cache_seqlens"] = torch.tensor([0, 1, 5])
    fresh = copies(kwargs)
    expected = ops.causal_conv1d_update(**fresh, backend="cpu")
    out = ops.causal_conv1d_update(**kwargs, out=kwargs["x"], backend="cpu")
    assert torch.equal(out, expected)
    assert torch.equal(kwargs["conv_state"], fresh["conv_state"])


@pytest.mark.parametrize("op", [STATE, CONV])
def test_equal_bits_for_any_number_of_threads(op, threads, level):
    make = state_inputs if op == STATE else taps_inputs
    kwargs = make(5, 700, 16 if op == STATE else 4, ntokens=3)
    found = []
    for number in (1, 1, 2, 3):
        threads(number)
        fresh = copies(kwargs)
        out = getattr(ops, op)(**fresh, backend="cpu")
        found.append((out, fresh["ssm_state" if op == STATE else "conv_state"]))
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(state, found[0][1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_or_channel_cannot_spoil_another(bad, level):
    for op, make, pool in ((STATE, state_inputs, "ssm_state"), (CONV, taps_inputs, "conv_state")):
        kwargs = make(3, 70, 4)
        clean, spoilt = copies(kwargs), copies(kwargs)
        spoilt["x"][1, 3] = bad
        spoilt[pool][2, 5] = bad
        results = [getattr(ops, op)(**given, backend="cpu") for given in (clean, spoilt)]
        same = torch.ones(3, 70, dtype=torch.bool)
        same[1, 3] = same[2, 5] = False
        assert torch.equal(results[1][same], results[0][same])
        assert torch.equal(spoilt[pool][same], clean[pool][same])
        assert not results[1][~same].isfinite().any()


@pytest.mark.parametrize(("dt_bias", "rate"), [(-40, -1e10), (30, -0.01), (0, 0), (5, -1e30)])
def test_extreme_steps(dt_bias, rate, level, guarded):
    kwargs = state_inputs(2, 19, 5, options="dt_bias")
    kwargs["dt_bias"] = torch.full((19,), float(dt_bias))
    kwargs["A"] = torch.full((19, 5), float(rate))
    check_update(STATE, kwargs, "cpu")


def test_an_infinite_rate_forgets_at_once(level):
    kwargs = state_inputs(2, 19, 5) | {"A": torch.full((19, 5), -math.inf)}
    fresh = copies(kwargs)
    found = ops.selective_state_update(**kwargs, backend="cpu")
    expected = ops.selective_state_update(**fresh, backend="reference")
    assert_close(found, expected, tolerance(STATE, torch.float32))
    assert_close(kwargs["ssm_state"], fresh["ssm_state"], tolerance(STATE, torch.float32))


def random_state_call(generator, seed, pool):
    heads = generator.choice([None, None, (4, generator.choice([1, 5, 70]))])
    dim = generator.choice([1, 4, 12, 66])
    channels = dim if heads is None else heads[0]
    kept = generator.choice([None, None, 4])
    return state_inputs(
        3, dim, generator.choice([1, 2, 4, 7, 16, 33]), slots=pool, heads=heads, seed=seed,
        kept=kept,
        ntokens=generator.choice([None, 1, 2, 4]), dtype=generator.choice(DTYPES),
        ngroups=generator.choice([None, *(n for n in range(1, channels + 1) if channels % n == 0)]),
        options=" ".join(n for n in ("D", "z", "dt_bias") if generator.random() < 0.7),
    )  # fmt: skip


def random_conv_call(generator, seed, pool):
    width = generator.choice([1, 2, 3, 4, 4, 6])
    kwargs = taps_inputs(
        3, generator.choice([1, 4, 12, 66]), width, slots=pool, seed=seed,
        state_len=width - 1 + generator.choice([0, 0, 1, 4]),
        kept=generator.choice([None, None, 4]), ntokens=generator.choice([None, 1, 2, 4]),
        dtype=generator.choice(DTYPES), options=generator.choice(["", "bias"]),
        activation=generator.choice([None, "silu"]),
    )  # fmt: skip
    if kwargs["conv_state"].shape[2] > 0 and generator.random() < 0.3:
        kwargs["cache_seqlens"] = torch.tensor([generator.randrange(9) for _ in range(3)])
    return kwargs


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("op", [STATE, CONV])
def test_random_calls(op, seed, level, guarded):
    generator = random.Random(seed)
    make = random_state_call if op == STATE else random_conv_call
    name = generator.choice(list(SLOTS))
    kwargs = make(generator, seed, pool_of(name)) | slots(op, name)
    if "intermediate_states" in kwargs and generator.random() < 0.5:
        kwargs["num_accepted_tokens"] = torch.tensor([generator.randrange(5) for _ in range(3)])
    check_update(op, placed(kwargs, generator.choice(DISTINCT)), "cpu")
