# SPDX-License-Identifier: Apache-2.0
"""Text of a plan: numbered ways with their steps, and why the others are closed."""

from __future__ import annotations

from statescan.doctor.plan.model import Plan, Step, Way
from statescan.doctor.render import text

NOTHING_DONE = "Nothing was changed: these are commands to read, and to type if you agree."


def lines(plan: Plan, shell: str, width: int) -> list[str]:
    """The plan for people."""
    written = [*text.paragraph(plan.summary, width), ""]
    for number, way in enumerate(plan.ways, 1):
        written += _way(number, way, shell, width)
        written.append("")
    if plan.closed:
        written.append("Ways that are closed here:")
        for way in plan.closed:
            written += text.paragraph(f"{way.title}: {way.closed}.", width, "  ", "- ")
        written.append("")
    return [*written, *text.paragraph(NOTHING_DONE, width)]


def _way(number: int, way: Way, shell: str, width: int) -> list[str]:
    mark = "safe" if way.safe else "has unsafe steps"
    written = [f"{number}. {way.title}  [{mark}]"]
    written += text.paragraph(f"{way.why[:1].upper()}{way.why[1:]}.", width, "   ")
    for letter, step in zip("abcdefghijklmnopqrstuvwxyz", way.steps):
        written += _step(letter, step, shell, width)
    return written


def _step(letter: str, step: Step, shell: str, width: int) -> list[str]:
    mark = "[safe]" if step.safe else "[unsafe]"
    written = text.paragraph(step.title.rstrip("."), width, "   ", f"{letter}) {mark} ")
    written += text.commands(step.commands, shell, "        ")
    if not step.safe:
        written += text.paragraph(step.safety, width, "      ", "care: ")
    return written
