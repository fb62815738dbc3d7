# SPDX-License-Identifier: Apache-2.0
"""Running a program of a build: log, lines, exit codes, and that nothing survives an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import statescan
from statescan.doctor.builder import runner

SOURCE = str(Path(statescan.__file__).parents[1])
TREE = """\
import os, subprocess, sys
from pathlib import Path
# As ninja does it: the compiler is in a group of its own.
inner = subprocess.Popen(["sleep", "300"], process_group=0) if sys.version_info >= (3, 11) else (
    subprocess.Popen(["sleep", "300"], preexec_fn=lambda: os.setpgid(0, 0)))
Path("inner").write_text(str(inner.pid))
IGNORE
inner.wait()
"""
PARENT = """\
import os, sys
from pathlib import Path
from statescan.doctor.builder import runner
runner.GRACE = 1.0
try:
    command = [sys.executable, "tree.py"]
    runner.run(command, Path("."), dict(os.environ), Path("log"), lambda _: None)
except KeyboardInterrupt:
    print("interrupted")
"""


def alive(pid):
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(condition, seconds=15.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


def run(program, tmp_path, watch=lambda _: None, **variables):
    log = tmp_path / "log"
    command = [sys.executable, "-c", textwrap.dedent(program)]
    code = runner.run(command, tmp_path, {**os.environ, **variables}, log, watch)
    return code, log.read_text()


def test_every_line_goes_to_the_log_and_the_watcher(tmp_path):
    seen = []
    program = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); exit(3)"
    code, log = run(program, tmp_path, seen.append)
    assert code == 3
    assert log == "out\nerr\n"
    assert [line for line in seen if line] == [b"out\n", b"err\n"]


def test_the_log_is_added_to(tmp_path):
    (tmp_path / "log").write_text("before\n")
    assert run("print('after')", tmp_path)[1] == "before\nafter\n"


def test_a_last_line_without_an_end_and_bytes_of_no_encoding(tmp_path):
    program = "import os; os.write(1, b'\\xff\\xfe no end')"
    log = tmp_path / "log"
    command = [sys.executable, "-c", program]
    assert runner.run(command, tmp_path, os.environ, log, lambda _: None) == 0
    assert log.read_bytes() == b"\xff\xfe no end"


def test_variables_are_exactly_those(tmp_path):
    code, log = run("import os; print(os.environ['ONE'], os.getcwd())", tmp_path, ONE="1")
    assert (code, log) == (0, f"1 {tmp_path}\n")


def test_a_program_that_is_not_there(tmp_path):
    log = tmp_path / "log"
    code = runner.run(["/nowhere/python"], tmp_path, {}, log, lambda _: None)
    assert code == 127
    assert "/nowhere/python: cannot be run: No such file" in log.read_text()


def test_the_watcher_is_called_while_there_is_no_output(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TICK", 0.05)
    seen = []
    run("import time; time.sleep(0.5)", tmp_path, seen.append)
    assert len(seen) >= 3
    assert set(seen) == {b""}


def test_standard_input_is_empty(tmp_path):
    assert run("import sys; print(repr(sys.stdin.read()))", tmp_path)[1] == "''\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ignoring", [False, True])
def test_an_interrupt_ends_the_whole_tree(tmp_path, number, ignoring):
    """Also a compiler in a group of its own, and a program that ignores to be asked."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" if ignoring else ""
    (tmp_path / "tree.py").write_text(TREE.replace("IGNORE", ignore))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        text=True,
    )
    inner = tmp_path / "inner"
    wait_for(lambda: inner.exists() and inner.read_text())
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=20)
    assert out == "interrupted\n"
    wait_for(lambda: not alive(int(inner.read_text())))


def test_a_watcher_that_fails_leaves_nothing_running(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TICK", 0.05)
    monkeypatch.setattr(runner, "GRACE", 1.0)
    (tmp_path / "tree.py").write_text(TREE.replace("IGNORE", ""))
    inner = tmp_path / "inner"

    def watch(_):
        if inner.exists() and inner.read_text():
            raise RuntimeError("told")

    command = [sys.executable, "tree.py"]
    with pytest.raises(RuntimeError, match="told"):
        runner.run(command, tmp_path, os.environ, tmp_path / "log", watch)
    wait_for(lambda: not alive(int(inner.read_text())))


def test_what_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        program = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); print('on')"
        assert run(program, tmp_path) == (0, "on\n")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run("pass", tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
