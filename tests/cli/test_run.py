# SPDX-License-Identifier: Apache-2.0
"""``statescan run``: a script sees the served names, its own arguments and its own exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
SCRIPT = """
import sys
from causal_conv1d import causal_conv1d_fn
import neighbour
print(causal_conv1d_fn.__module__, __name__, sys.argv[1:], neighbour.value)
sys.exit(7 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "script.py").write_text(SCRIPT)
    (tmp_path / "pkg" / "neighbour.py").write_text("value = 'beside'")
    (tmp_path / "neighbour.py").write_text("value = 'in the working folder'")

    def call(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "statescan", "run", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )

    return call


def test_a_script_runs_with_its_arguments_and_its_folder(run):
    done = run("pkg/script.py", "--epochs", "3", "-v")
    assert done.returncode == 0, done.stderr
    expected = "statescan.compat.causal_conv1d __main__ ['--epochs', '3', '-v'] beside\n"
    assert done.stdout == expected
    assert done.stderr.startswith("statescan serves mamba_ssm, causal_conv1d")


def test_a_module_runs_from_the_working_folder(run):
    done = run("--quiet", "-m", "pkg.script", "x")
    assert done.stdout.endswith("__main__ ['x'] in the working folder\n")
    assert done.stderr == ""


def test_the_scripts_exit_status_is_the_commands(run):
    assert run("-q", "pkg/script.py", "fail").returncode == 7


def test_a_missing_script_is_a_mistake_on_the_command_line(run):
    done = run("nothing.py")
    assert done.returncode == 2
    assert "run: 'nothing.py' does not exist" in done.stderr
