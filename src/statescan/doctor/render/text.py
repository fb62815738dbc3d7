# SPDX-License-Identifier: Apache-2.0
"""Blocks of text that the doctor's commands share: marks, wrapped paragraphs, commands to type.

Returns lines and prints nothing; colours only repeat what the words say.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from statescan.doctor import shells
from statescan.doctor.model import Command, Finding, Fix, Severity

MARKS = {
    "ok": "[ok]",
    Severity.INFO: "[info]",
    Severity.WARNING: "[warning]",
    Severity.ERROR: "[error]",
}
_COLOURS = {"[ok]": "32", "[info]": "36", "[warning]": "33", "[error]": "31"}


def mark(kind: Severity | str, coloured: bool) -> str:
    """``[ok]``, ``[info]``, ``[warning]`` or ``[error]``."""
    text = MARKS[kind]
    return f"\033[{_COLOURS[text]}m{text}\033[0m" if coloured else text


def paragraph(text: str, width: int, indent: str = "", label: str = "") -> list[str]:
    """Wrapped text; ``label`` stands in front of its first line, the rest is indented as deep."""
    first = f"{indent}{label}"
    return textwrap.wrap(
        text,
        max(width, len(first) + 20),
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def commands(steps: Iterable[Command], shell: str, indent: str) -> list[str]:
    """Lines to copy, never wrapped: a broken command line is worse than a long one."""
    return [indent + line for step in steps for line in shells.lines(step, shell)]


def fix_lines(fix: Fix, shell: str, width: int, indent: str) -> list[str]:
    """The fix in one line, what to type, and what it may break."""
    lines = paragraph(fix.text, width, indent, "fix: ")
    lines += commands(fix.commands, shell, indent + "     ")
    if not fix.safe:
        lines += paragraph(fix.safety, width, indent, "care: ")
    return lines


def finding_lines(finding: Finding, shell: str, width: int, coloured: bool) -> Sequence[str]:
    """A finding: mark and code, what was seen, and what to do."""
    head = f"{mark(finding.severity, coloured)} {finding.problem.code} {finding.problem.slug}"
    lines = [head, *paragraph(finding.summary, width, "  ")]
    for seen in finding.evidence:
        lines += paragraph(seen, width, "  ", "- ")
    return [*lines, *fix_lines(finding.fix, shell, width, "  ")]
