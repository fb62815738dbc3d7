# SPDX-License-Identifier: Apache-2.0
"""What a plan consists of: ways in their order, the steps of each, and ways that are closed.

Data and their JSON form; which ways there are is decided in ``planner``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statescan.doctor.model import Command


@dataclass(frozen=True)
class Step:
    """Commands that belong together.

    Attributes:
        title: What is done, on one line.
        commands: What to type.
        safe: Whether it can be undone and touches nothing but the packages concerned.
        safety: Why it is safe, or what it may break.
    """

    title: str
    commands: tuple[Command, ...]
    safe: bool
    safety: str

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "title": self.title,
            "safe": self.safe,
            "safety": self.safety,
            "commands": [command.to_json() for command in self.commands],
        }


@dataclass(frozen=True)
class Way:
    """One way to a working package.

    Attributes:
        name: "statescan", "wheel", "source", "container" or "wsl2".
        title: On one line.
        why: Why it stands where it stands.
        steps: In their order; none for a way that is closed.
        closed: Why it does not lead there on this machine; empty for one that does.
    """

    name: str
    title: str
    why: str = ""
    steps: tuple[Step, ...] = ()
    closed: str = ""

    @property
    def safe(self) -> bool:
        """Whether every step is."""
        return all(step.safe for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "name": self.name,
            "title": self.title,
            "why": self.why,
            "safe": self.safe,
            "steps": [step.to_json() for step in self.steps],
            "closed": self.closed,
        }


@dataclass(frozen=True)
class Plan:
    """The ways to a package, the best first, and those that are closed.

    Attributes:
        package: What is wanted.
        version: The release that is planned for; empty for statescan.
        summary: One sentence.
        ways: That lead there.
        closed: That do not, with their reasons.
    """

    package: str
    version: str
    summary: str
    ways: tuple[Way, ...]
    closed: tuple[Way, ...]

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "package": self.package,
            "version": self.version or None,
            "summary": self.summary,
            "ways": [way.to_json() for way in self.ways],
            "closed": [{"name": way.name, "why": way.closed} for way in self.closed],
        }
