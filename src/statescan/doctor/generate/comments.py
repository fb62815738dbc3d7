# SPDX-License-Identifier: Apache-2.0
"""Comment lines of the written files: the head, the reasons of the choices, the steps to type.

Every format that is written has ``#`` comments; nothing here knows which format it is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from statescan.doctor import shells
from statescan.doctor.generate import steps
from statescan.doctor.generate.choices import Choices
from statescan.doctor.model import Command

WIDTH = 88


def comment(text: str, indent: str = "") -> list[str]:
    """A wrapped comment; words such as URLs and versions are never broken."""
    return _wrapped(text, f"{indent}# ", f"{indent}# ")


def head(kind: str, choices: Choices, purpose: str, file: str) -> list[str]:
    """What the file is for, how it is used, what it was made from, and why it says what it says."""
    lines = comment(purpose)
    use = steps.use(kind, choices, file)
    if use:
        lines += ["#", "# Use:", *typed(use)]
    lines += ["#", *_origin(kind, choices), "#", "# Choices:"]
    for row in choices.rows:
        lines += _wrapped(f"{row.name} {row.value}: {row.why}.", "#   ", "#     ")
    for note in choices.notes:
        lines += ["#", *comment(f"Note: {note}")]
    return lines


def typed(commands: Iterable[Command]) -> list[str]:
    """Commands to type, as comment lines that are never wrapped."""
    return [f"#   {line}" for command in commands for line in shells.lines(command, "bash")]


def _origin(kind: str, choices: Choices) -> list[str]:
    if choices.asked.origin == "facts":
        said = choices.asked.text() or "nothing known"
        return comment(f"Made by statescan write {kind} from a machine's facts: {said}")
    command = ("statescan", "write", kind, "--for", choices.package)
    return ["# Made by:", *typed([Command((*command, "--target", choices.asked.text()))])]


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
