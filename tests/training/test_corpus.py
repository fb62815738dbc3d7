# SPDX-License-Identifier: Apache-2.0
import hashlib
from pathlib import Path

import pytest
import torch

from statescan.errors import ArgumentError
from statescan.training.corpus import CarriedWindows, RandomWindows, load_corpus

DATA = torch.arange(200, dtype=torch.uint8)


def test_the_end_is_held_out_and_the_file_hashed(tmp_path: Path) -> None:
    path = tmp_path / "text"
    data = bytes(range(250))
    path.write_bytes(data)
    corpus = load_corpus(path, held_out=0.2, seqlen=8)
    assert bytes(corpus.train.tolist()) == data[:200]
    assert bytes(corpus.held_out.tolist()) == data[200:]
    assert corpus.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(("size", "held_out"), [(0, 0.1), (40, 0.1), (40, 0.9)])
def test_a_text_too_short_to_split_is_refused(tmp_path: Path, size: int, held_out: float) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * size)
    with pytest.raises(ArgumentError, match=f"{size} bytes"):
        load_corpus(path, held_out, seqlen=8)


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ArgumentError, match=str(path)):
            load_corpus(path, 0.1, 8)


def test_random_windows_cover_the_text_once_a_pass() -> None:
    windows = RandomWindows(DATA, batch=3, seqlen=9, seed=0)
    per_pass = (200 - 1 - 9) // 9
    first_tokens: list[int] = []
    for step in range(2 * per_pass):
        inputs, targets = windows.batch_at(step)
        assert inputs.shape == targets.shape == (3, 9)
        assert inputs.dtype == torch.int64
        # The text counts upwards, so each target is one more than its input.
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(9))
        first_tokens += inputs[:, 0].tolist()
    for number in range(6):
        one_pass = sorted(first_tokens[number * per_pass : (number + 1) * per_pass])
        assert one_pass == list(range(one_pass[0], one_pass[0] + 9 * per_pass, 9))
    assert first_tokens[:per_pass] != sorted(first_tokens[:per_pass])
    assert len({min(first_tokens[i * per_pass : (i + 1) * per_pass]) for i in range(6)}) > 1


def test_random_windows_depend_on_seed_and_step_alone() -> None:
    windows = RandomWindows(DATA, 3, 9, seed=1)
    steps = [windows.batch_at(step)[0] for step in range(30)]
    for step in (29, 3, 17):
        assert torch.equal(RandomWindows(DATA, 3, 9, seed=1).batch_at(step)[0], steps[step])
    assert not torch.equal(RandomWindows(DATA, 3, 9, seed=2).batch_at(0)[0], steps[0])
    assert windows.fresh_rows(5)


def test_random_windows_of_a_text_of_one_window() -> None:
    windows = RandomWindows(DATA[:10], 2, 9, seed=0)
    assert torch.equal(windows.batch_at(4)[0], torch.arange(9).expand(2, 9))


def test_carried_windows_continue_and_begin_anew() -> None:
    windows = CarriedWindows(DATA, batch=2, seqlen=30)
    # Lanes of 99 tokens give three windows each.
    assert [windows.fresh_rows(step) for step in range(7)] == [i % 3 == 0 for i in range(7)]
    for step in range(7):
        inputs, targets = windows.batch_at(step)
        start = step % 3 * 30
        assert torch.equal(inputs[0], torch.arange(start, start + 30))
        assert torch.equal(inputs[1], torch.arange(99 + start, 129 + start))
        assert torch.equal(targets, inputs + 1)


def test_carried_windows_need_room() -> None:
    with pytest.raises(ArgumentError, match="--windows random"):
        CarriedWindows(DATA, batch=20, seqlen=10)
