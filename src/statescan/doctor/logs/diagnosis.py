# SPDX-License-Identifier: Apache-2.0
"""The answer about a log, as data with its JSON form.

How it was found is in ``verdict`` and ``analyse``; how it looks, in ``show``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statescan.doctor.model import Fix, Problem


@dataclass(frozen=True)
class Line:
    """A line of the log, with its number in the file; 0 where it is about the log as a whole."""

    number: int
    text: str

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {"line": self.number, "text": self.text}


@dataclass(frozen=True)
class NotCause:
    """What looks like the cause in this log and is not.

    Attributes:
        what: A problem's slug or a few words of the log.
        reason: Why it is not the cause.
        lines: Numbers of its first lines.
        id: The problem's slug; empty where it is none.
    """

    what: str
    reason: str
    lines: tuple[int, ...] = ()
    id: str = ""

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "what": self.what,
            "reason": self.reason,
            "lines": list(self.lines),
            "id": self.id or None,
        }


@dataclass(frozen=True)
class Diagnosis:
    """Why an install, a build or an import failed, by its log.

    Attributes:
        root_cause: Slug of the problem.
        problem: The same, from the catalogue.
        summary: The cause in one sentence.
        evidence: The line that proves it first, others that support it after it.
        fix: For this log, with its values.
        confidence: "high", "medium" or "low".
        reason: Why so sure, or not.
        not_causes: What looks like the cause and is not.
        values: What was found for the fix, by the names of ``catalog.PLACEHOLDERS`` and more.
        shell: "bash", "powershell" or "cmd": for which the fix is written unless another is asked.
        lines: Number of lines of the log.
        encoding: Of the log.
    """

    root_cause: str
    problem: Problem
    summary: str
    evidence: tuple[Line, ...]
    fix: Fix
    confidence: str
    reason: str
    not_causes: tuple[NotCause, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    shell: str = "bash"
    lines: int = 0
    encoding: str = "utf-8"

    def to_json(self) -> dict[str, Any]:
        """The content of the document that ``statescan log --json`` prints."""
        return {
            "root_cause": {
                "id": self.root_cause,
                "code": self.problem.code,
                "title": self.problem.title,
                "layer": self.problem.layer,
            },
            "summary": self.summary,
            "evidence": [line.to_json() for line in self.evidence],
            "fix": self.fix.to_json(),
            "confidence": {"level": self.confidence, "reason": self.reason},
            "not_causes": [row.to_json() for row in self.not_causes],
            "values": dict(self.values),
            "shell": self.shell,
            "log": {"lines": self.lines, "encoding": self.encoding},
        }
