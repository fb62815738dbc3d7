# SPDX-License-Identifier: Apache-2.0
"""Where probes look: the variables, the files and the programs of a machine.

A test gives another root, other variables and other programs; probes use nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SYSTEMS = {"linux": "linux", "win32": "windows", "cygwin": "windows", "darwin": "macos"}
_MOST_TEXT = 1 << 20


@dataclass(frozen=True)
class Ran:
    """What became of a program.

    Attributes:
        code: Its exit status, negative for a signal; None when it did not end or did not start.
        out: Its standard output.
        err: Its standard error.
        problem: Why there is no exit status.
    """

    code: int | None
    out: str = ""
    err: str = ""
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == 0


@dataclass(eq=False)
class Machine:
    """One machine, as one Python on it sees it.

    Attributes:
        os: "linux", "windows" or "macos".
        environ: The variables.
        cwd: The current folder.
        executable: The interpreter.
        prefix: Of its environment.
        base_prefix: Of the Python below that environment.
        site: Where it installs packages.
        search_path: Folders of ``sys.path`` in order, without the current one that Python itself
            puts in front.
        sees_cwd: Whether modules of the current folder come first, as with ``python -m``.
        root: What "/" stands for; None for the machine itself.
    """

    os: str
    environ: Mapping[str, str]
    cwd: Path
    executable: Path
    prefix: Path
    base_prefix: Path
    site: Path
    search_path: tuple[Path, ...]
    sees_cwd: bool = False
    root: Path | None = None
    _ran: dict[tuple[str, ...], Ran] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def here(cls) -> Machine:
        """This machine and this Python."""
        cwd = Path.cwd()
        # Named in PYTHONPATH as well, the current folder keeps its place.
        sees_cwd = bool(sys.path) and sys.path[0] in ("", str(cwd))
        folders = [Path(entry).absolute() for entry in sys.path[sees_cwd:] if entry]
        return cls(
            os=SYSTEMS.get(sys.platform, sys.platform),
            environ=dict(os.environ),
            cwd=cwd,
            executable=Path(sys.executable or "python"),
            prefix=Path(sys.prefix),
            base_prefix=Path(sys.base_prefix),
            site=Path(sysconfig.get_path("purelib")),
            search_path=tuple(dict.fromkeys(folders)),
            sees_cwd=sees_cwd,
        )

    def path(self, absolute: str | Path) -> Path:
        """A path of the machine, below its root."""
        if self.root is None:
            return Path(absolute)
        return self.root / str(absolute).lstrip("/")

    def variable(self, name: str) -> str:
        """The value of a variable; empty where it is not set."""
        return self.value(name) or ""

    def value(self, name: str) -> str | None:
        """The value of a variable; None where it is not set."""
        # Windows does not tell the case of names apart, and Python writes them in upper case.
        return self.environ.get(
            name, self.environ.get(name.upper()) if self.os == "windows" else None
        )

    def home(self) -> Path | None:
        """The home folder, if the variables tell it."""
        value = self.variable("USERPROFILE" if self.os == "windows" else "HOME")
        return Path(value) if value else None

    def cache_home(self) -> Path | None:
        """Where programs of this user keep files that they can make again."""
        home = self.home()
        if self.os == "windows":
            value = self.variable("LOCALAPPDATA")
            return Path(value) if value else home
        if self.os == "macos":
            return home / "Library/Caches" if home else None
        value = self.variable("XDG_CACHE_HOME")
        return Path(value) if value else (home / ".cache" if home else None)

    def folders(self, variable: str) -> list[Path]:
        """The folders of a variable such as PATH, in order, without empty ones."""
        separator = ";" if self.os == "windows" else ":"
        return [Path(word) for word in self.variable(variable).split(separator) if word]

    def which(self, command: str) -> Path | None:
        """The program that a shell would start."""
        found = shutil.which(command, path=self.variable("PATH"))
        return Path(found) if found else None

    def which_all(self, command: str) -> list[Path]:
        """Every program of that name on PATH, in order, each file once."""
        found: dict[Path, Path] = {}
        for folder in self.folders("PATH"):
            program = shutil.which(command, path=str(folder))
            if program:
                found.setdefault(folder.resolve() / Path(program).name, Path(program))
        return list(found.values())

    def read(self, path: Path) -> str:
        """The text of a file, cut after a megabyte; empty where it cannot be read."""
        try:
            with path.open("rb") as file:
                return file.read(_MOST_TEXT).decode("utf-8", "replace")
        except OSError:
            return ""

    def list(self, folder: Path) -> list[Path]:
        """What is in a folder, by name; empty where it cannot be read."""
        try:
            return sorted(folder.iterdir())
        except OSError:
            return []

    def run(
        self, command: Sequence[str | Path], timeout: float = 8.0, without: Iterable[str] = ()
    ) -> Ran:
        """Start a program without a shell, in English, and wait; the same one is started once.

        Args:
            command: The program and its arguments.
            timeout: Seconds until it is ended.
            without: Variables that it does not get.
        """
        words = tuple(map(str, command))
        with self._lock:
            known = self._ran.get(words)
        if known is None:
            known = self._start(words, timeout, frozenset(without))
            with self._lock:
                self._ran[words] = known
        return known

    def _start(self, words: tuple[str, ...], timeout: float, without: frozenset[str]) -> Ran:
        variables = {key: value for key, value in self.environ.items() if key not in without}
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                env={**variables, "LC_ALL": "C"},
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            problem = f"no answer within {timeout:g} s"
            return Ran(None, _text(late.stdout), _text(late.stderr), problem)
        except (OSError, ValueError) as error:
            return Ran(None, problem=f"{words[0]} does not start: {error}")
        return Ran(done.returncode, _text(done.stdout), _text(done.stderr))


def _text(output: bytes | str | None) -> str:
    if isinstance(output, bytes):
        return output.decode("utf-8", "replace")
    return output or ""
