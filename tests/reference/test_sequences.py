# SPDX-License-Identifier: Apache-2.0
"""How seq_idx and cu_seqlens become lists of sequences."""

import torch

from statescan.reference.sequences import Sequence, count_states, find_sequences


def spans(ids):
    """(start, end, first, last) of the sequences of one row of ids."""
    found = find_sequences(1, len(ids), torch.tensor([ids]))
    assert all(seq.rows == slice(0, 1) for seq in found)
    return [(s.start, s.end, s.initial is not None, s.final is not None) for s in found]


def test_without_packing_all_rows_are_one_entry():
    rows = slice(0, 3)
    assert find_sequences(3, 7) == [Sequence(rows, 0, 7, rows, rows)]


def test_a_run_of_equal_ids_is_a_sequence():
    assert spans([4, 4, 2]) == [(0, 2, True, False), (2, 3, False, True)]


def test_an_id_that_comes_back_starts_anew():
    assert [seq[:2] for seq in spans([0, 0, 1, 0])] == [(0, 2), (2, 3), (3, 4)]


def test_a_pad_ends_a_sequence_and_belongs_to_none():
    assert spans([-1, 5, -2, -1, 5, -1]) == [(1, 2, True, False), (4, 5, False, True)]


def test_a_row_of_padding_or_without_tokens_is_one_empty_sequence():
    assert spans([-1, -1]) == [(0, 0, True, True)]
    assert spans([]) == [(0, 0, True, True)]


def test_rows_are_listed_one_after_the_other():
    found = find_sequences(2, 2, torch.tensor([[0, 1], [0, 0]]))
    assert [(seq.rows.start, seq.start, seq.end) for seq in found] == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 0, 2),
    ]


def test_bounds_list_empty_sequences_too():
    found = find_sequences(1, 5, cu_seqlens=torch.tensor([0, 0, 3, 5]))
    assert [(seq.start, seq.end, seq.initial.start) for seq in found] == [
        (0, 0, 0),
        (0, 3, 1),
        (3, 5, 2),
    ]
    assert all(seq.initial == seq.final for seq in found)


def test_number_of_states():
    assert count_states(4, None) == 4
    assert count_states(1, torch.tensor([0, 0, 3])) == 2
    assert count_states(1, torch.tensor([0])) == 0
