# SPDX-License-Identifier: Apache-2.0
"""Runs the program in this process (``run``) or as a user would (``spawn``)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from statescan.cli.main import main


class Input(io.TextIOWrapper):
    """Standard input with given bytes, which may claim to be a terminal."""

    def __init__(self, content: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No settings of the developer's own."""
    for name in ("STATESCAN_BACKEND", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys, monkeypatch) -> Callable[..., Outcome]:
    def runner(*args: str, stdin: bytes = b"", terminal: bool = False) -> Outcome:
        monkeypatch.setattr(sys, "stdin", Input(stdin, terminal))
        code = main(list(args))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return runner


@pytest.fixture
def spawn() -> Callable[..., Outcome]:
    def runner(*args: str, **env: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "statescan", *args],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return runner
