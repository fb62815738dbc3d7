# SPDX-License-Identifier: Apache-2.0
"""What the stages of the doctor hand to each other: facts, commands, fixes, problems, findings.

Plain frozen data, with their JSON forms. Nothing here probes, judges or prints.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statescan.errors import ArgumentError

FACTS_VERSION = 1
"""Of saved facts; it grows when a fact changes its meaning or goes away."""


class Severity(enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    """What the user wants to install or run cannot work."""
    WARNING = "warning"
    """It works now and will break, or works slowly."""
    INFO = "info"
    """Worth knowing; nothing to do."""


@dataclass(frozen=True)
class Fact:
    """One observed value, or the reason why it could not be observed.

    Attributes:
        name: From ``facts/names.py``.
        value: JSON data; None where there is none.
        source: Where it was read: a file, a command, a variable.
        problem: Why the probe failed; empty when it did not.
    """

    name: str
    value: Any
    source: str
    problem: str = ""


class Facts:
    """Facts by name; a name that was not probed reads as its default."""

    def __init__(self, facts: Mapping[str, Fact] | None = None) -> None:
        self._facts = dict(facts or {})

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default`` where the fact is unknown or None."""
        fact = self._facts.get(name)
        return default if fact is None or fact.value is None else fact.value

    def fact(self, name: str) -> Fact | None:
        """The fact with its source, if it was probed."""
        return self._facts.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._facts

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._facts[name] for name in sorted(self._facts))

    def to_json(self) -> dict[str, Any]:
        """The document that ``--facts FILE`` reads back."""
        rows = {
            fact.name: {
                "value": fact.value,
                "source": fact.source,
                **({"problem": fact.problem} if fact.problem else {}),
            }
            for fact in self
        }
        return {"schema_version": FACTS_VERSION, "kind": "facts", "facts": rows}

    @classmethod
    def from_json(cls, document: Any) -> Facts:
        """Facts of a saved document: of ``to_json``, or a doctor's ``--json`` that holds one."""
        if isinstance(document, Mapping) and isinstance(document.get("facts"), Mapping):
            inner = document["facts"]
            rows = inner["facts"] if isinstance(inner.get("facts"), Mapping) else inner
            version = inner.get("schema_version", document.get("schema_version"))
            if version == FACTS_VERSION and all(_is_row(row) for row in rows.values()):
                return cls(
                    {
                        name: Fact(
                            *(name, row.get("value"), row.get("source", "saved facts")),
                            row.get("problem", ""),
                        )
                        for name, row in rows.items()
                    }
                )
        raise ArgumentError(
            "the facts document is not one that this version reads.\n"
            f"It must be the JSON of `statescan doctor --json`, schema_version {FACTS_VERSION}.\n"
            "Make it again with the statescan that judges it."
        )

    @classmethod
    def read(cls, path: Path) -> Facts:
        """Facts of a file."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"facts: {str(path)!r} cannot be read: {error}.\n"
                "It must be a file that `statescan doctor --json` wrote.\n"
                "Check the path, or save the facts again."
            ) from error
        return cls.from_json(document)


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and "value" in row


@dataclass(frozen=True)
class Command:
    """One step for a shell; ``shells.py`` writes it for bash, PowerShell or cmd.

    Attributes:
        run: The program and its arguments; empty for a step that only sets variables.
        env: Variables of this one program.
        set: Variables of the whole shell from here on.
        prepend: Folders to put in front of a path variable.
        unset: Variables to take away.
        note: Why, on one line.
    """

    run: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    set: Mapping[str, str] = field(default_factory=dict)
    prepend: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Only the parts that are there."""
        parts = {
            "run": list(self.run),
            "env": dict(self.env),
            "set": dict(self.set),
            "prepend": dict(self.prepend),
            "unset": list(self.unset),
            "note": self.note,
        }
        return {name: part for name, part in parts.items() if part}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Command:
        """A command of a catalogue."""
        return cls(
            *(tuple(row.get("run", ())), dict(row.get("env", {})), dict(row.get("set", {}))),
            *(dict(row.get("prepend", {})), tuple(row.get("unset", ())), row.get("note", "")),
        )


@dataclass(frozen=True)
class Fix:
    """What to do about a problem.

    Attributes:
        text: One line.
        commands: What to type.
        safe: Whether it can be undone and touches nothing but the packages concerned.
        safety: Why it is safe, or what it may break.
    """

    text: str
    commands: tuple[Command, ...] = ()
    safe: bool = True
    safety: str = ""

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "text": self.text,
            "safe": self.safe,
            "safety": self.safety,
            "commands": [command.to_json() for command in self.commands],
        }


@dataclass(frozen=True)
class Problem:
    """A kind of trouble, as the catalogue describes it.

    Attributes:
        code: Area and number, such as ABI601.
        slug: The name that logs, checks and pages share, such as ``torch-abi-mismatch``.
        title: One line.
        layer: Which stage of an install it belongs to, one of ``catalog.LAYERS``.
        severity: Of a finding, unless the check says otherwise.
        what: What one sees.
        why: What causes it.
        example: Lines of a log or of a session that show it.
        fix: What to do.
        looks_like: What is taken for the cause of it and is not.
        wrong_advice: What is recommended for it and harms or does nothing.
        references: Reports, as ``owner/name#number`` or short names.
        systems: Where alone it occurs, of "linux", "windows", "macos"; empty for everywhere.
    """

    code: str
    slug: str
    title: str
    layer: str
    severity: Severity
    what: str
    why: str
    example: tuple[str, ...]
    fix: Fix
    looks_like: tuple[str, ...] = ()
    wrong_advice: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A check that fired.

    Attributes:
        problem: Its kind.
        severity: Here and now.
        summary: One line with the values seen.
        evidence: What was seen, a line each, with the source.
        fix: For this machine.
        packages: Whose install it concerns; empty for all.
    """

    problem: Problem
    severity: Severity
    summary: str
    evidence: tuple[str, ...]
    fix: Fix
    packages: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "code": self.problem.code,
            "id": self.problem.slug,
            "severity": self.severity.value,
            "title": self.problem.title,
            "summary": self.summary,
            "evidence": list(self.evidence),
            "fix": self.fix.to_json(),
            "packages": list(self.packages),
        }
