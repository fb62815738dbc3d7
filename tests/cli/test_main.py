# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import statescan
from statescan.cli import backends
from statescan.cli.main import COMMANDS, build_parser, main
from statescan.errors import ArgumentError, BackendUnavailableError, ShapeError

NAMES = [module.__name__.rsplit(".", 1)[1] for module in COMMANDS]


def test_there_is_a_module_for_each_command():
    (subparsers,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert list(subparsers.choices) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(run, name):
    outcome = run(name, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: statescan {name}")
    assert outcome.err == ""


def test_version(run):
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"statescan {statescan.__version__}\n")


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], *[[name, "--help"] for name in NAMES]],
    ids=" ".join,
)
def test_help_imports_no_torch(args):
    code = (
        "import sys\nfrom statescan.cli.main import main\ncode = main(sys.argv[1:])\n"
        "sys.exit(code or any(n.split('.')[0] in ('torch', 'numpy', 'rich') for n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_command_prints_help_and_is_a_usage_error(run):
    outcome = run()
    assert outcome.code == 2
    assert outcome.out == ""
    assert "usage: statescan" in outcome.err


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["backends", "--nothing"],
        ["explain"],
        ["explain", "nothing"],
        ["explain", "selective_scan", "--dtype", "int8"],
        ["bench", "--seqlen", "0"],
        ["bench", "--seqlen", "many"],
        ["bench", "nothing"],
        ["train", "--text", "x"],
        ["train", "--out", "x", "--d", "4"],
        ["generate", "--prompt", "a", "--file", "b"],
        ["generate", "--prompt", ""],
        ["generate", "--file", "does-not-exist"],
        ["quickstart", "--file", "does-not-exist"],
        ["quickstart", "--prompt", ""],
    ],
    ids=" ".join,
)
def test_usage_errors(run, args):
    outcome = run(*args)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "error: " in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ArgumentError("temperature is -1"), 2),
        (ShapeError("x has no axes"), 1),
        (BackendUnavailableError("no driver"), 1),
        (ImportError("libtorch.so: no such file"), 1),
        (ImportError("no module", name="statescan.ops"), 1),
        (PermissionError(13, "Permission denied", "out"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_become_messages(run, monkeypatch, error, code):
    def fail(args):
        print("data before the error")
        raise error

    monkeypatch.setattr(backends, "execute", fail)
    outcome = run("backends")
    assert outcome.code == code
    assert outcome.out == "data before the error\n"
    assert outcome.err.startswith("error: ")
    assert str(error).rsplit(": ", 1)[-1] in outcome.err
    assert ("--force-reinstall" in outcome.err) == (getattr(error, "name", None) == "statescan.ops")
    assert "Traceback" not in outcome.err
    for args in (("--verbose", "backends"), ("backends", "-v")):
        outcome = run(*args)
        assert outcome.code == code
        assert "Traceback" in outcome.err


def test_a_bug_is_not_hidden(run, monkeypatch):
    def fail(args):
        raise KeyError("a mistake in statescan")

    monkeypatch.setattr(backends, "execute", fail)
    with pytest.raises(KeyError):
        main(["backends"])


def test_an_interrupt_ends_with_a_line(run, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(backends, "execute", interrupted)
    outcome = run("backends")
    assert outcome.code == 130
    assert outcome.err.strip() == "interrupted"


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_ctrl_c_of_a_real_process():
    process = subprocess.Popen(
        [sys.executable, "-m", "statescan", "bench", "selective_scan", "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The first line comes from inside the command, after the imports.
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.strip() == "interrupted"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows reports closed pipes otherwise")
@pytest.mark.parametrize("args", [["backends"], ["backends", "--json"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(args):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "statescan", *args],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""


def test_runs_where_the_terminal_knows_only_ascii(spawn):
    outcome = spawn("explain", "selective_scan", "--backend", "tör", PYTHONIOENCODING="ascii")
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_unknown_backend_in_the_environment(spawn):
    outcome = spawn("explain", "selective_scan", STATESCAN_BACKEND="nothing")
    assert outcome.code == 2
    assert outcome.out == ""
    assert "'nothing'" in outcome.err
    assert "torch" in outcome.err
    # The list of backends, which that message names, still comes; the fault stands below it.
    outcome = spawn("backends", "--json", STATESCAN_BACKEND="nothing")
    assert outcome.code == 1
    assert "STATESCAN_BACKEND" in json.loads(outcome.out)["error"]
    outcome = spawn("quickstart", STATESCAN_BACKEND="nothing")
    assert outcome.code == 2
    assert "STATESCAN_BACKEND" in outcome.err


def test_verbose_tells_which_backend_runs(run, monkeypatch):
    outcome = run("backends", "--verbose")
    assert outcome.code == 0
