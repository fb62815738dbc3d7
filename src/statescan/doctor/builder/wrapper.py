# SPDX-License-Identifier: Apache-2.0
"""Generates the nvcc that a build is given as PYTORCH_NVCC, and reads what it wrote down.

torch writes PYTORCH_NVCC into its ninja file in front of the arguments. What the generated program
does with them is in ``nvcc_filter``.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statescan.doctor.builder import nvcc_filter


@dataclass(frozen=True)
class Compilation:
    """One call of nvcc for a source file.

    Attributes:
        source: File name.
        started: Seconds since the epoch.
        seconds: How long it took; None while it runs.
        code: Its exit code; None while it runs.
        memory_mb: Of its largest process, where the system tells.
    """

    source: str
    started: float
    seconds: float | None = None
    code: int | None = None
    memory_mb: int | None = None


@dataclass(frozen=True)
class Wrapper:
    """The files of a generated nvcc.

    Attributes:
        program: To run in place of nvcc.
        configuration: What it reads.
        journal: What it writes.
    """

    program: Path
    configuration: Path
    journal: Path

    @property
    def variable(self) -> str:
        """Value of PYTORCH_NVCC: one word for the shell that ninja calls, in ninja's spelling."""
        return shlex.quote(str(self.program)).replace("$", "$$")

    def compilations(self) -> list[Compilation]:
        """Every compilation of this build so far, in the order of their starts."""
        found: list[Compilation] = []
        for line in _lines(self.journal):
            event = json.loads(line)
            name, moment = str(event["source"]), float(event["time"])
            if event["event"] == "start":
                found.append(Compilation(name, moment))
                continue
            running = [n for n, row in enumerate(found) if row.source == name and row.code is None]
            if running:
                seconds, code = float(event["seconds"]), int(event["code"])
                row = Compilation(
                    *(name, found[running[0]].started, seconds, code, event.get("memory_mb"))
                )
                found[running[0]] = row
        return found


def generate(
    folder: Path, nvcc: Sequence[str], targets: Sequence[str], threads: int | None = None
) -> Wrapper:
    """Write a wrapper.

    Args:
        folder: Where; it must exist.
        nvcc: The real compiler: a path, or words such as those of ccache before it.
        targets: Values of ``-gencode`` to compile for; none for those of the build itself.
        threads: Parallel steps of one nvcc; None for what the build itself says.
    """
    wrapper = Wrapper(folder / "nvcc", folder / "nvcc.json", folder / "nvcc.journal")
    configuration = {
        "nvcc": list(nvcc),
        "targets": list(targets),
        "threads": threads,
        "journal": str(wrapper.journal),
    }
    wrapper.configuration.write_text(json.dumps(configuration, indent=1), encoding="utf-8")
    # The shell starts Python, because a path with blanks or a long one cannot follow #!.
    words = [sys.executable, "-S", "-E", str(nvcc_filter.__file__), str(wrapper.configuration)]
    line = " ".join(shlex.quote(word) for word in words)
    wrapper.program.write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
    wrapper.program.chmod(0o755)
    return wrapper


def _lines(journal: Path) -> list[str]:
    """Whole lines; the file does not exist before the first compilation."""
    try:
        text = journal.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return text.split("\n")[:-1]
