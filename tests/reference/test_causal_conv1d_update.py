# SPDX-License-Identifier: Apache-2.0
"""What a decode step of the convolution means: steps equal the sequence, rings, slots, rollback."""

import math

import pytest
import torch

from statescan.reference import causal_conv1d_ref, causal_conv1d_update_ref
from statescan.testing import assert_close, get_case, make

EXACT = 1e-13


def arguments(name, **changes):
    """Float64 arguments of a case."""
    return make(get_case("causal_conv1d_update", name), torch.float64) | changes


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("longer", [0, 1, 5])
@pytest.mark.parametrize("ntokens", [None, 1, 4])
@pytest.mark.parametrize("ring", [False, True])
def test_steps_equal_the_convolution(width, longer, ntokens, ring):
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    weight, bias = torch.randn(3, width, dtype=x.dtype), torch.randn(3, dtype=x.dtype)
    state_len = width - 1 + longer
    state = torch.zeros(2, 3, state_len, dtype=x.dtype)
    pieces = []
    for start in range(0, 12, ntokens or 1):
        part = x[..., start] if ntokens is None else x[..., start : start + ntokens]
        seen = torch.tensor([start, start]) if ring else None
        y = causal_conv1d_update_ref(
            part, state, weight, bias, activation="silu", cache_seqlens=seen
        )
        pieces.append(y if ntokens else y[..., None])
    expected = causal_conv1d_ref(x, weight, bias, activation="silu")
    assert_close(torch.cat(pieces, dim=-1), expected, EXACT)
    if state_len:
        newest_last = state.roll(-(12 % state_len), dims=-1) if ring else state
        assert torch.equal(newest_last, x[..., -state_len:])


def test_each_row_of_a_ring_stands_where_its_own_count_says():
    kwargs = arguments("ring")
    before = kwargs["conv_state"].clone()
    causal_conv1d_update_ref(**kwargs)
    changed = (kwargs["conv_state"] != before).all(dim=1)
    columns = [count % 5 for count in kwargs["cache_seqlens"].tolist()]
    assert changed.nonzero().tolist() == [[row, column] for row, column in enumerate(columns)]


def test_padding_rows_give_zero_and_touch_nothing():
    kwargs = arguments("read_write", out=torch.full((3, 6), math.nan, dtype=torch.float64))
    kwargs["x"][1] = math.nan
    before = kwargs["conv_state"].clone()
    out = causal_conv1d_update_ref(**kwargs)
    assert out is kwargs["out"]
    assert (out[1] == 0).all()
    assert out[[0, 2]].isfinite().all()
    changed = (kwargs["conv_state"] != before).flatten(1).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [0, 2]


def test_several_slots_move_with_their_indices():
    """Rows read slots 4 and 0 and write slots 2 and 0."""
    kwargs = arguments("read_write")
    before = kwargs["conv_state"].clone()
    causal_conv1d_update_ref(**kwargs)
    x = kwargs["x"]
    for row, (source, target) in {0: (4, 2), 2: (0, 0)}.items():
        expected = torch.cat([before[source][:, 1:], x[row][:, None]], dim=1)
        assert torch.equal(kwargs["conv_state"][target], expected)


def test_nan_in_one_slot_stays_there():
    kwargs = arguments("bias_silu")
    kwargs["conv_state"][1] = math.nan
    out = causal_conv1d_update_ref(**kwargs)
    assert out[[0, 2]].isfinite().all()
    assert kwargs["conv_state"][[0, 2]].isfinite().all()


@pytest.mark.parametrize("ring", [False, True])
def test_rollback_equals_running_the_accepted_tokens_only(ring):
    kwargs = arguments("ring_rollback" if ring else "rollback")
    kwargs |= {"conv_state_indices": None, "dst_conv_state_indices": None}
    constant = {name: kwargs[name] for name in ("weight", "bias", "activation")}
    pool, history, guesses = (kwargs[n] for n in ("conv_state", "intermediate_states", "x"))
    seen = kwargs["cache_seqlens"]
    original = pool.clone()
    speculate = {"intermediate_states": history, **constant}
    none = torch.zeros(3, dtype=torch.int32)
    causal_conv1d_update_ref(
        guesses, pool, cache_seqlens=seen, num_accepted_tokens=none, **speculate
    )
    assert torch.equal(pool[:3], original[:3])

    accepted = kwargs["num_accepted_tokens"]
    new = guesses.flip(-1).contiguous()
    now = None if seen is None else seen + accepted
    out = causal_conv1d_update_ref(
        new, pool, cache_seqlens=now, num_accepted_tokens=accepted, **speculate
    )
    for row, count in enumerate(accepted.tolist()):
        state, one = original[row : row + 1].clone(), slice(row, row + 1)
        before, after = (None if s is None else s[one] for s in (seen, now))
        causal_conv1d_update_ref(guesses[one, :, :count], state, cache_seqlens=before, **constant)
        assert torch.equal(pool[row], state[0])
        y = causal_conv1d_update_ref(new[one], state, cache_seqlens=after, **constant)
        assert torch.equal(out[row], y[0])
        assert torch.equal(history[row, -1], state[0])


def test_out_may_be_x():
    kwargs = arguments("several_tokens")
    expected = causal_conv1d_update_ref(**(kwargs | {"conv_state": kwargs["conv_state"].clone()}))
    out = causal_conv1d_update_ref(**(kwargs | {"out": kwargs["x"]}))
    assert out is kwargs["x"]
    assert torch.equal(out, expected)
