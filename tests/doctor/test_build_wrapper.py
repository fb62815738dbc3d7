# SPDX-License-Identifier: Apache-2.0
"""The generated nvcc: which arguments reach the real one, what is written down, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from statescan.doctor.builder import wrapper
from statescan.doctor.builder.nvcc_filter import filtered, source_of

PAIR_90 = ["-gencode", "arch=compute_90,code=sm_90"]
TARGET_90 = ["arch=compute_90,code=sm_90"]


@pytest.fixture
def compiler(tmp_path):
    """A program that records its arguments and ends as the file ``code`` says."""
    path = tmp_path / "real nvcc"
    path.write_text(
        f"#!{sys.executable} -SE\n"
        "import json, os, sys, time\n"
        "from pathlib import Path\n"
        "here = Path(__file__).parent\n"
        "(here / 'seen.json').write_text(json.dumps(sys.argv[1:]))\n"
        "plan = (here / 'code').read_text() if (here / 'code').exists() else '0'\n"
        "if plan == 'kill': os.kill(os.getpid(), 9)\n"
        "if plan == 'wait': time.sleep(60)\n"
        "sys.exit(int(plan))\n"
    )
    path.chmod(0o755)
    return path


def seen(compiler):
    return json.loads((compiler.parent / "seen.json").read_text())


def call(made, *words):
    return subprocess.run([made.program, *words], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    "written",
    [
        ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90"],
        ["-gencode=arch=compute_75,code=sm_75"],
        ["--generate-code", "arch=compute_75,code=[sm_75,compute_75]"],
        ["--generate-code=arch=compute_100,code=sm_100"],
    ],
)
def test_every_spelling_of_a_target_is_replaced(written):
    found = filtered(["-O3", *written, "-c", "a.cu", "-o", "a.o"], TARGET_90, None)
    assert found == ["-O3", "-c", "a.cu", "-o", "a.o", *PAIR_90]


def test_calls_without_targets_are_left_alone():
    for words in (["-V"], ["--version"], ["-c", "a.cu", "-o", "a.o"]):
        assert filtered(words, TARGET_90, None) == words


def test_without_targets_of_its_own_it_changes_nothing():
    words = ["-gencode", "arch=compute_80,code=sm_80", "--threads", "4"]
    assert filtered(words, [], None) == words


@pytest.mark.parametrize("written", [["--threads", "4"], ["--threads=4"], ["-t", "4"], ["-t=4"]])
def test_threads_are_replaced_when_asked(written):
    assert filtered([*written, "-c", "a.cu"], [], 1) == ["--threads", "1", "-c", "a.cu"]


def test_the_source_of_a_compilation():
    assert source_of(["-c", "/x/csrc/scan fwd.cu", "-o", "fwd.o"]) == "scan fwd.cu"
    assert source_of(["-dlink", "a.o"]) == ""
    assert source_of(["-V"]) == ""


def test_the_real_compiler_gets_the_targets_and_its_end_is_kept(tmp_path, compiler):
    made = wrapper.generate(tmp_path, [str(compiler)], TARGET_90)
    words = ["-gencode", "arch=compute_80,code=sm_80", "-DNAME=a b", "-c", "x y.cu", "-o", "x.o"]
    assert call(made, *words).returncode == 0
    assert seen(compiler) == ["-DNAME=a b", "-c", "x y.cu", "-o", "x.o", *PAIR_90]
    (tmp_path / "code").write_text("3")
    assert call(made, *words).returncode == 3
    first, second = made.compilations()
    assert (first.source, first.code, second.code) == ("x y.cu", 0, 3)
    assert 0 < first.seconds < 30
    assert first.memory_mb > 0


def test_other_calls_are_not_in_the_journal(tmp_path, compiler):
    made = wrapper.generate(tmp_path, [str(compiler)], TARGET_90)
    call(made, "--version")
    assert seen(compiler) == ["--version"]
    assert made.compilations() == []


def test_a_killed_compiler_is_told_in_words_and_by_the_code(tmp_path, compiler):
    """ninja says only that a command failed."""
    (tmp_path / "code").write_text("kill")
    made = wrapper.generate(tmp_path, [str(compiler)], TARGET_90)
    done = call(made, "-c", "x.cu")
    assert done.returncode == 137
    assert "died due to signal 9 (SIGKILL)" in done.stderr


def test_a_missing_compiler_is_told(tmp_path):
    made = wrapper.generate(tmp_path, ["/nowhere/bin/nvcc"], TARGET_90)
    done = call(made, "-c", "x.cu")
    assert done.returncode == 127
    assert "/nowhere/bin/nvcc: cannot be run: No such file" in done.stderr


def test_ending_the_wrapper_ends_the_compiler(tmp_path, compiler):
    (tmp_path / "code").write_text("wait")
    made = wrapper.generate(tmp_path, [str(compiler)], TARGET_90)
    process = subprocess.Popen([made.program, "-c", "x.cu"], stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 20
    while not (tmp_path / "seen.json").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    assert [row.seconds for row in made.compilations()] == [None]
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert made.compilations()[0].code == -signal.SIGTERM


def test_words_before_the_compiler_are_kept(tmp_path, compiler):
    """PYTORCH_NVCC of the user, such as ccache with nvcc behind it."""
    made = wrapper.generate(tmp_path, ["/usr/bin/env", str(compiler)], TARGET_90)
    call(made, "-gencode=arch=compute_80,code=sm_80", "-c", "x.cu")
    assert seen(compiler) == ["-c", "x.cu", *PAIR_90]


def test_ninja_runs_it_from_a_folder_with_any_name(tmp_path, compiler):
    folder = tmp_path / "it's $HOME now"
    folder.mkdir()
    made = wrapper.generate(folder, [str(compiler)], TARGET_90)
    (tmp_path / "build.ninja").write_text(
        f"nvcc = {made.variable}\nrule cuda\n command = $nvcc -gencode arch=a -c $in\n"
        "build out: cuda x.cu\n"
    )
    (tmp_path / "x.cu").touch()
    ninja = os.path.join(os.path.dirname(sys.executable), "ninja")  # noqa: PTH118, PTH120
    done = subprocess.run([ninja, "-v"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert seen(compiler) == ["-c", "x.cu", *PAIR_90]


def test_a_journal_line_that_is_being_written_is_not_read(tmp_path, compiler):
    made = wrapper.generate(tmp_path, [str(compiler)], TARGET_90)
    call(made, "-c", "x.cu")
    with made.journal.open("a") as journal:
        journal.write('{"event": "sta')
    assert [row.source for row in made.compilations()] == ["x.cu"]
