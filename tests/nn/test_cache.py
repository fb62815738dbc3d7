# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from helpers.tiny_models import tiny_lm

from statescan.errors import ArgumentError, DtypeError, SlotIndexError
from statescan.nn import InferenceCache


@pytest.fixture
def cache() -> InferenceCache:
    """States of two layers after three rows have read four different bytes each."""
    model = tiny_lm()
    cache = model.allocate_inference_cache(3)
    with torch.no_grad():
        model(torch.arange(12).view(3, 4), cache=cache)
    return cache


def flat(cache: InferenceCache) -> list[torch.Tensor]:
    return [state for layer in cache for state in layer]


def test_it_knows_its_sizes(cache: InferenceCache) -> None:
    assert (len(cache), cache.batch_size, cache.seqlen_offset) == (2, 3, 4)
    assert cache.nbytes == 2 * 3 * 32 * (3 + 4) * 4
    assert "batch_size=3" in repr(cache)
    assert all(state.any() for state in flat(cache))


@pytest.mark.parametrize("make", [InferenceCache.clone, copy.deepcopy])
def test_a_clone_shares_nothing(cache: InferenceCache, make) -> None:
    twin = make(cache)
    for state, copied in zip(flat(cache), flat(twin), strict=True):
        assert torch.equal(state, copied)
        copied.zero_()
        assert state.any()
    assert twin.seqlen_offset == cache.seqlen_offset


@pytest.mark.parametrize("rows", [[2], [1, 1, 0, 2], [], torch.tensor([2, 0])])
def test_select_takes_rows_into_new_memory(cache: InferenceCache, rows) -> None:
    chosen = cache.select(rows)
    assert chosen.seqlen_offset == 4
    for state, taken in zip(flat(cache), flat(chosen), strict=True):
        assert torch.equal(taken, state[torch.as_tensor(rows, dtype=torch.long)])
        taken.fill_(7)
        assert not (state == 7).any()


def test_reorder_works_in_place(cache: InferenceCache) -> None:
    before, pointers = cache.clone(), [state.data_ptr() for state in flat(cache)]
    cache.reorder([2, 2, 0])
    assert [state.data_ptr() for state in flat(cache)] == pointers
    for state, old in zip(flat(cache), flat(before), strict=True):
        assert torch.equal(state, old[[2, 2, 0]])


def test_a_selected_row_continues_like_the_original() -> None:
    model = tiny_lm()
    cache = model.allocate_inference_cache(3)
    tokens = torch.tensor([[5], [6], [7]])
    with torch.no_grad():
        model(torch.arange(12).view(3, 4), cache=cache)
        chosen = cache.select([2, 0])
        expected = model(tokens, cache=cache).logits[[2, 0]]
        found = model(tokens[[2, 0]], cache=chosen).logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_reset_forgets(cache: InferenceCache) -> None:
    cache.reset()
    assert not any(state.any() for state in flat(cache))
    assert cache.seqlen_offset == 0


@pytest.mark.parametrize("rows", [[3], [-1], [0, 5]])
def test_rows_outside_are_refused(cache: InferenceCache, rows) -> None:
    before = cache.clone()
    for call in (cache.select, cache.reorder):
        with pytest.raises((SlotIndexError, ArgumentError), match=r"0 to 2|exactly one"):
            call(rows)
    assert all(torch.equal(a, b) for a, b in zip(flat(cache), flat(before), strict=True))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (torch.tensor([True, False, True]), "bool"),
        ([True, False, True], "bool"),
        (torch.tensor([0.0, 1.0, 2.0]), "float32"),
        ([0.5, 1.0, 2.0], "float32"),
    ],
)
def test_masks_and_fractions_are_no_rows(cache: InferenceCache, rows, dtype) -> None:
    """A mask read as numbers would pick rows 0 and 1, whatever it means."""
    before = cache.clone()
    for call in (cache.select, cache.reorder):
        with pytest.raises(DtypeError, match=rf"has dtype {dtype}.*\n.*row numbers.*\n.*nonzero"):
            call(rows)
    assert all(torch.equal(a, b) for a, b in zip(flat(cache), flat(before), strict=True))


@pytest.mark.parametrize("rows", [[], torch.tensor([], dtype=torch.long)])
def test_no_rows_at_all(cache: InferenceCache, rows) -> None:
    assert cache.select(rows).batch_size == 0


def test_other_bad_arguments_are_refused(cache: InferenceCache) -> None:
    with pytest.raises(ArgumentError, match="2 indices for 3 rows"):
        cache.reorder([0, 1])
    with pytest.raises(ArgumentError, match="one list"):
        cache.select(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ArgumentError, match="empty"):
        InferenceCache([])
