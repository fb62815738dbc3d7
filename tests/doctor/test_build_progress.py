# SPDX-License-Identifier: Apache-2.0
"""How far a compilation is, by ninja's lines and by the wrapper's journal."""

from __future__ import annotations

import json

import pytest

from statescan.doctor.builder.progress import Progress, clock
from statescan.doctor.builder.wrapper import Wrapper


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def wrapper(tmp_path):
    return Wrapper(tmp_path / "nvcc", tmp_path / "nvcc.json", tmp_path / "journal")


def event(wrapper, kind, source, at, **rest):
    with wrapper.journal.open("a") as journal:
        journal.write(json.dumps({"event": kind, "source": source, "time": at, **rest}) + "\n")


def end(wrapper, source, at, seconds, code=0):
    event(wrapper, "end", source, at, seconds=seconds, code=code, memory_mb=900)


def plan(tmp_path, *sources):
    folder = tmp_path / "build" / "temp.linux-x86_64-cpython-311"
    folder.mkdir(parents=True)
    rules = [f"build {name}.o: cuda_compile /x/csrc/{name}" for name in sources]
    (folder / "build.ninja").write_text("\n".join(["rule cuda_compile", *rules, ""]))


def test_from_nothing_to_the_end(tmp_path, wrapper):
    clock = Clock()
    progress = Progress(wrapper, tmp_path, 1, clock)
    state = progress.state()
    assert (state.done, state.total, state.running, state.left) == (0, None, (), None)
    plan(tmp_path, "a.cu", "b.cu", "c.cu", "d.cu")
    event(wrapper, "start", "a.cu", 1000)
    clock.now = 1060
    assert (progress.state().running, progress.state().total) == (("a.cu",), 4)
    assert progress.state().elapsed == 60
    end(wrapper, "a.cu", 1100, 100)
    assert progress.line(b"  [1/4] /usr/local/cuda/bin/nvcc -c a.cu\n")
    clock.now = 1100
    state = progress.state()
    assert (state.done, state.total, state.running, state.left) == (1, 4, (), 300)
    event(wrapper, "start", "b.cu", 1100)
    clock.now = 1130
    assert progress.state().left == pytest.approx(270)
    assert progress.line(b"[4/4] c++ -shared\n")
    assert "left" not in progress.state().text()


def test_two_jobs_halve_the_estimate(tmp_path, wrapper):
    plan(tmp_path, "a.cu", "b.cu", "c.cu", "d.cu", "e.cu")
    progress = Progress(wrapper, tmp_path, 2, Clock())
    event(wrapper, "start", "a.cu", 900)
    end(wrapper, "a.cu", 1000, 100)
    assert progress.state().left == 200


def test_the_longest_file_decides_and_the_usual_ratios_count(tmp_path, wrapper):
    """The backward kernel of causal-conv1d takes ten times as long as the forward one."""
    clock = Clock()
    plan(tmp_path, "causal_conv1d.cpp", "causal_conv1d_bwd.cu", "causal_conv1d_fwd.cu")
    progress = Progress(wrapper, tmp_path, 2, clock)
    event(wrapper, "start", "causal_conv1d_bwd.cu", 1000)
    event(wrapper, "start", "causal_conv1d_fwd.cu", 1000)
    # Twice as slow as where it was measured.
    end(wrapper, "causal_conv1d_fwd.cu", 1090, 90)
    clock.now = 1090
    assert progress.state().left == pytest.approx(2 * 519 - 90)
    clock.now = 2500
    assert progress.state().left == 0
    assert "longer than expected" in progress.state().text()


def test_the_plan_of_ninja_tells_the_number_of_files_before_its_first_line(tmp_path, wrapper):
    folder = tmp_path / "build" / "temp.linux-x86_64-cpython-311"
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text(
        "rule cuda_compile\n  command = x\nbuild a.o: compile a.cpp\n"
        "build b.o: cuda_compile b.cu\nbuild c$ c.o: cuda_compile c.cu\nbuild all: phony a.o\n"
    )
    assert Progress(wrapper, tmp_path, 1, Clock()).state().total == 3


def test_a_file_that_failed_is_not_compiled(tmp_path, wrapper):
    progress = Progress(wrapper, tmp_path, 1, Clock())
    event(wrapper, "start", "a.cu", 1000)
    end(wrapper, "a.cu", 1000, 5, code=1)
    assert progress.state().done == 0


def test_an_earlier_attempt_does_not_count(tmp_path, wrapper):
    event(wrapper, "start", "a.cu", 900)
    end(wrapper, "a.cu", 950, 50)
    state = Progress(wrapper, tmp_path, 1, Clock()).state()
    assert (state.done, state.left) == (0, None)


@pytest.mark.parametrize(
    "line",
    [b"[notice] a new pip", b"  [12 lines of output]", b"x [1/2] y", b"[1/2]", b"[99999999/1] x"],
)
def test_other_brackets_are_no_progress(tmp_path, wrapper, line):
    assert not Progress(wrapper, tmp_path, 1, Clock()).line(line)


def test_one_line_for_people(tmp_path, wrapper):
    clock_ = Clock()
    progress = Progress(wrapper, tmp_path, 1, clock_)
    event(wrapper, "start", "a.cu", 1000)
    end(wrapper, "a.cu", 1185, 185)
    event(wrapper, "start", "b.cu", 1185)
    plan(tmp_path, "a.cu", "b.cu", "c.cu")
    progress.line(b"[1/3] nvcc\n")
    clock_.now = 1185
    assert progress.state().text() == (
        "1 of 3 files compiled; now b.cu; 3 min 05 s so far; about 6 min 10 s left"
    )


def test_times_as_people_say_them():
    assert [clock(s) for s in (0.4, 59.9, 60, 3599, 3600, 7500)] == [
        *("0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 05 min")
    ]
