# SPDX-License-Identifier: Apache-2.0
"""What a decode step of the SSM state means: steps equal the scan, slots, padding, rollback."""

import math

import pytest
import torch

from statescan.errors import ArgumentError
from statescan.reference import selective_scan_ref, selective_state_update_ref
from statescan.testing import assert_close, get_case, make

EXACT = 1e-13


def arguments(name, **changes):
    """Float64 arguments of a case."""
    return make(get_case("selective_state_update", name), torch.float64) | changes


@pytest.mark.parametrize("name", ["usual", "two_groups", "complex_all"])
@pytest.mark.parametrize("several", [False, True])
def test_steps_equal_the_scan(name, several):
    scan_name = "all_options" if name == "usual" else name
    kwargs = make(get_case("selective_scan", scan_name), torch.float64)
    out, final = selective_scan_ref(**kwargs)
    constant = {n: kwargs[n] for n in ("A", "D", "dt_bias", "dt_softplus")}
    tokens = {n: kwargs[n] for n in ("x", "dt", "B", "C", "z")}
    state = kwargs["initial_states"].clone()
    stepped = []
    for start in range(0, 17, 5 if several else 1):
        part = {
            n: v[..., start : start + 5] if several else v[..., start] for n, v in tokens.items()
        }
        y = selective_state_update_ref(state, **part, **constant)
        stepped.append(y if several else y[..., None])
    assert_close(torch.cat(stepped, dim=-1), out, EXACT)
    assert_close(state, final, EXACT)


def test_headed_form_equals_the_flat_one():
    kwargs = arguments("headed_groups")
    flat = {
        name: value.flatten(1, 2).clone() if name in ("ssm_state", "x", "dt", "z") else value
        for name, value in kwargs.items()
    }
    flat |= {name: kwargs[name].flatten(0, 1) for name in ("A", "D", "dt_bias")}
    out = selective_state_update_ref(**kwargs)
    assert_close(selective_state_update_ref(**flat), out.flatten(1, 2), EXACT)
    assert_close(flat["ssm_state"], kwargs["ssm_state"].flatten(1, 2), EXACT)


def test_padding_rows_give_zero_and_touch_nothing():
    kwargs = arguments("read_write", out=torch.full((3, 6), math.nan, dtype=torch.float64))
    for name in ("x", "dt", "z", "B", "C"):
        kwargs[name][1] = math.nan
    before = kwargs["ssm_state"].clone()
    out = selective_state_update_ref(**kwargs)
    assert out is kwargs["out"]
    assert (out[1] == 0).all()
    assert out[[0, 2]].isfinite().all()
    changed = (kwargs["ssm_state"] != before).flatten(1).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [0, 2]


@pytest.mark.parametrize(
    ("read", "write"), [((-1, 1, 2), None), ((5, 1, 2), None), ((0, 1, 2), (-4, 1, 2))]
)
def test_a_negative_or_pad_index_on_either_side_makes_a_row_padding(read, write):
    def index(values):
        return None if values is None else torch.tensor(values)

    kwargs = arguments("usual", pad_slot_id=5)
    kwargs |= {"state_batch_indices": index(read), "dst_state_batch_indices": index(write)}
    before = kwargs["ssm_state"].clone()
    out = selective_state_update_ref(**kwargs)
    assert (out[0] == 0).all()
    assert (out[1:] != 0).all()
    assert torch.equal(kwargs["ssm_state"][0], before[0])


def test_rows_read_their_slots_before_any_row_writes():
    read, write = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    kwargs = arguments("usual", state_batch_indices=read, dst_state_batch_indices=write)
    in_place = kwargs | {
        "ssm_state": kwargs["ssm_state"].clone(),
        "dst_state_batch_indices": None,
    }
    assert torch.equal(selective_state_update_ref(**kwargs), selective_state_update_ref(**in_place))
    assert torch.equal(kwargs["ssm_state"][[1, 2, 0]], in_place["ssm_state"])


def test_nan_in_one_slot_stays_there():
    kwargs = arguments("usual")
    kwargs["ssm_state"][1] = math.nan
    out = selective_state_update_ref(**kwargs)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert kwargs["ssm_state"][[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", ["rollback", "complex_rollback"])
def test_rollback_equals_running_the_accepted_tokens_only(name):
    kwargs = arguments(name)
    per_token = ("x", "dt", "z", "B", "C")
    constant = {n: kwargs[n] for n in ("A", "D", "dt_bias", "dt_softplus")}
    history, pool = kwargs["intermediate_states"], kwargs["ssm_state"]
    guesses = {n: kwargs[n] for n in per_token}
    nothing_accepted = torch.zeros(3, dtype=torch.int32)
    original = pool.clone()
    selective_state_update_ref(
        pool, **guesses, **constant, intermediate_states=history,
        num_accepted_tokens=nothing_accepted,
    )  # fmt: skip
    assert torch.equal(pool, original)

    accepted = kwargs["num_accepted_tokens"]
    new = {n: v.flip(-1).contiguous() for n, v in guesses.items()}
    out = selective_state_update_ref(
        pool, **new, **constant, intermediate_states=history, num_accepted_tokens=accepted
    )
    for row, count in enumerate(accepted.tolist()):
        state = original[row : row + 1].clone()
        kept = {n: v[row : row + 1, ..., :count] for n, v in guesses.items()}
        selective_state_update_ref(state, **kept, **constant)
        assert_close(pool[row], state[0], EXACT)
        fresh = {n: v[row : row + 1] for n, v in new.items()}
        assert_close(out[row], selective_state_update_ref(state, **fresh, **constant)[0], EXACT)
        assert_close(history[row, -1], state[0], EXACT)


def test_no_tokens_only_commit():
    kwargs = arguments("only_commit")
    history, before = kwargs["intermediate_states"].clone(), kwargs["ssm_state"].clone()
    out = selective_state_update_ref(**kwargs)
    assert out.shape == (3, 6, 0)
    expected = torch.stack([before[0], history[1, 1], history[2, 0]])
    assert torch.equal(kwargs["ssm_state"], expected)
    assert torch.equal(kwargs["intermediate_states"], history)


def test_accepted_tokens_without_history_are_refused():
    kwargs = arguments("several_tokens", num_accepted_tokens=torch.tensor([0, 0, 0]))
    with pytest.raises(ArgumentError, match="num_accepted_tokens was given without"):
        selective_state_update_ref(**kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_state_keeps_its_own_dtype(dtype):
    kwargs = make(get_case("selective_state_update", "low_state"), dtype)
    out = selective_state_update_ref(**kwargs)
    assert kwargs["ssm_state"].dtype == out.dtype == dtype


def test_softplus_is_that_of_the_scan():
    """A step of dt -40 must not be 0, or decoding leaves the path of prefill."""
    one = torch.ones(1, 1)
    state = torch.zeros(1, 1, 1)
    out = selective_state_update_ref(
        state, one, torch.full((1, 1), -40.0), 0 * one, one, one, dt_softplus=True
    )
    assert out.item() == pytest.approx(math.exp(-40), rel=1e-6)


def test_outputs_are_differentiable_and_written_states_are_not():
    kwargs = arguments("several_tokens")
    x = kwargs["x"].requires_grad_()
    selective_state_update_ref(**kwargs).sum().backward()
    assert x.grad.abs().sum() > 0
    assert not kwargs["ssm_state"].requires_grad
