# SPDX-License-Identifier: Apache-2.0
"""What a build consists of and what became of it, as data with its JSON form.

How it is carried out is in ``pipeline``; how it looks, in ``render``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statescan.doctor.builder.target import Targets
from statescan.doctor.logs.diagnosis import Diagnosis
from statescan.doctor.model import Command, Finding
from statescan.doctor.releases import Release

PLANNED, DONE, FAILED, SKIPPED = "planned", "done", "failed", "skipped"


@dataclass(frozen=True)
class Environment:
    """Variables of a build.

    Attributes:
        set: What this build sets, with values.
        kept: What the user set and the build leaves as it is.
        notes: Why, a line for each that needs one.
        threads: Parallel steps of one nvcc; None for what the package's setup asks for.
    """

    set: Mapping[str, str]
    kept: Mapping[str, str]
    notes: tuple[str, ...] = ()
    threads: int | None = None


@dataclass(frozen=True)
class Setup:
    """Everything that is decided before a build starts.

    Attributes:
        release: What is built.
        targets: GPU code to make.
        environment: Variables.
        toolkit: Folder of the CUDA toolkit, empty where there is none.
        folder: Where sources, wheel and log are.
        findings: Why it must not start; nothing for a build that may.
        warnings: What is worth knowing before.
    """

    release: Release
    targets: Targets
    environment: Environment
    toolkit: str
    folder: Path
    findings: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()

    @property
    def log(self) -> Path:
        """The whole output."""
        return self.folder / "build.log"


@dataclass(frozen=True)
class Stage:
    """One step of a build.

    Attributes:
        name: "tools", "source", "compile", "install", "import" or "smoke".
        title: On one line.
        commands: What is run; a person could type it.
        status: PLANNED, DONE, FAILED or SKIPPED.
        seconds: How long it took.
        note: What came of it, or why it was skipped.
    """

    name: str
    title: str
    commands: tuple[Command, ...] = ()
    status: str = PLANNED
    seconds: float = 0.0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "name": self.name,
            "title": self.title,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "note": self.note,
            "commands": [command.to_json() for command in self.commands],
        }


@dataclass(frozen=True)
class Outcome:
    """What became of a build.

    Attributes:
        status: "built", "failed", "refused", "planned" or "interrupted".
        setup: What was decided before.
        stages: In their order.
        wheel: The file that was built.
        diagnosis: Of the failure.
        retried: What the second attempt changed; empty where there was one attempt.
        kernels: Seconds and memory of each source file, as they were compiled.
        tail: The last lines of the log of a build that failed.
    """

    status: str
    setup: Setup
    stages: tuple[Stage, ...]
    wheel: Path | None = None
    diagnosis: Diagnosis | None = None
    retried: str = ""
    kernels: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    tail: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The content of the document that ``statescan build --json`` prints."""
        setup = self.setup
        started = self.status not in ("planned", "refused")
        return {
            "status": self.status,
            "package": setup.release.package,
            "version": setup.release.version,
            "targets": {"names": list(setup.targets.names), "why": setup.targets.why},
            "toolkit": setup.toolkit or None,
            "environment": {
                "set": dict(setup.environment.set),
                "kept": dict(setup.environment.kept),
                "notes": list(setup.environment.notes),
            },
            "folder": str(setup.folder),
            "log": str(setup.log) if started else None,
            "findings": [row.to_json() for row in setup.findings],
            "warnings": [row.to_json() for row in setup.warnings],
            "stages": [row.to_json() for row in self.stages],
            "wheel": str(self.wheel) if self.wheel else None,
            "kernels": [dict(row) for row in self.kernels],
            "retried": self.retried,
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
        }
