# SPDX-License-Identifier: Apache-2.0
"""Commands written for each shell: what bash really does with them, and the forms of the others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from statescan.doctor import shells
from statescan.doctor.model import Command

WORDS = (
    *("plain", "mamba-ssm>=2.2,<3", "two words", "it's", 'say "x"', "a&b;c|d", "*?[x]", "~/x"),
    *("`id`", "back\\slash", "100%", "(1)", "#no comment", ""),
)
SHOW = "import json,os,sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def run_bash(command: Command):
    text = "\n".join(shells.lines(command, "bash"))
    bash = shutil.which("bash")
    assert bash, "these tests need bash"
    done = subprocess.run([bash, "-euc", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def show(*words, **parts):
    return Command((sys.executable, "-c", SHOW, *words), **parts)


@pytest.mark.skipif(sys.platform == "win32", reason="bash is looked for on POSIX systems")
class TestBash:
    def test_every_word_arrives_as_it_is(self):
        arguments, _ = run_bash(show(*WORDS))
        assert arguments == list(WORDS)

    def test_variables_of_the_shell_are_replaced_and_nothing_else_is(self):
        command = show("$HERE/bin", "a $HERE b", "`$HERE`", set={"HERE": "/opt/my cuda"})
        arguments, _ = run_bash(command)
        assert arguments == ["/opt/my cuda/bin", "a /opt/my cuda b", "`/opt/my cuda`"]

    def test_variables_are_set_prepended_and_taken_away(self):
        command = show(
            env={"ONLY": "here it's"}, set={"HOME_OF": "/x y"}, prepend={"PATH": "$HOME_OF/bin"},
            unset=("LANG",),
        )  # fmt: skip
        _, environment = run_bash(command)
        assert environment["ONLY"] == "here it's"
        assert environment["HOME_OF"] == "/x y"
        assert environment["PATH"].startswith("/x y/bin:")
        assert "LANG" not in environment

    def test_prepending_to_an_unset_variable_leaves_no_empty_entry(self):
        _, environment = run_bash(show(unset=("LIBRARY_PATH",), prepend={"LIBRARY_PATH": "/a"}))
        assert environment["LIBRARY_PATH"] == "/a"


def test_powershell_puts_values_in_quotes_and_takes_the_variables_of_one_command_back():
    command = Command(
        ("pip", "install", "mamba-ssm>=2.2", "it's"),
        env={"MAMBA_FORCE_BUILD": "TRUE"},
        set={"CUDA_HOME": "C:\\CUDA 12"},
        prepend={"PATH": "$CUDA_HOME\\bin"},
        unset=("TORCH_CUDA_ARCH_LIST",),
        note="why",
    )
    assert shells.lines(command, "powershell") == [
        "# why",
        "Remove-Item Env:TORCH_CUDA_ARCH_LIST -ErrorAction SilentlyContinue",
        "$env:CUDA_HOME = 'C:\\CUDA 12'",
        "$env:MAMBA_FORCE_BUILD = 'TRUE'",
        '$env:PATH = "$env:CUDA_HOME\\bin" + ";" + $env:PATH',
        "pip install 'mamba-ssm>=2.2' 'it''s'",
        "Remove-Item Env:MAMBA_FORCE_BUILD",
    ]


def test_cmd_sets_line_by_line():
    command = Command(
        ("pip", "install", "mamba-ssm>=2.2"),
        env={"MAMBA_FORCE_BUILD": "TRUE"},
        set={"CUDA_HOME": "C:\\CUDA 12"},
        prepend={"PATH": "$CUDA_HOME\\bin"},
        note="why",
    )
    assert shells.lines(command, "cmd") == [
        "rem why",
        'set "CUDA_HOME=C:\\CUDA 12"',
        'set "MAMBA_FORCE_BUILD=TRUE"',
        'set "PATH=%CUDA_HOME%\\bin;%PATH%"',
        'pip install "mamba-ssm>=2.2"',
        "set MAMBA_FORCE_BUILD=",
    ]


def test_the_shell_is_the_one_in_use_or_the_systems_usual():
    assert shells.shell_of("windows", None) == "powershell"
    assert shells.shell_of("windows", "cmd") == "cmd"
    assert shells.shell_of("linux", None) == "bash"
    assert shells.shell_of("linux", "powershell") == "powershell"
