# SPDX-License-Identifier: Apache-2.0
"""Pages of the catalogue for a terminal: a problem, a piece of advice, the list of all codes.

Returns lines and prints nothing. The same pages in Markdown are made by ``scripts/docs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statescan.doctor import advice as tips
from statescan.doctor import catalog
from statescan.doctor.advice import Advice
from statescan.doctor.model import Fix, Problem
from statescan.doctor.render import text

AREAS: Mapping[str, str] = {
    "LOG": "Logs as a whole",
    "TK": "CUDA toolkit",
    "CC": "Compilers",
    "ENV": "Environment of the build",
    "WHL": "Wheels and source packages",
    "RES": "Memory, time and disk",
    "ABI": "Binaries and libraries",
    "API": "Python packages",
    "TRI": "Triton",
    "GPU": "GPUs and drivers",
    "PLT": "ROCm and macOS",
    "SST": "statescan itself",
}
"""What the letters of a code stand for, in the order of an install."""

_WINDOWS_VALUES: Mapping[str, str] = {
    "cuda_home": r"C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA\v12.8",
}


def area(code: str) -> str:
    """The letters of a code."""
    return code.rstrip("0123456789")


def by_area() -> dict[str, list[Problem]]:
    """All problems by the letters of their codes, in the order of ``AREAS``."""
    known = catalog.problems().values()
    return {name: [row for row in known if area(row.code) == name] for name in AREAS}


def example_values(shell: str) -> Mapping[str, str]:
    """Values for placeholders where no machine is known; paths are those of the shell's system."""
    return {} if shell == "bash" else _WINDOWS_VALUES


def report_url(reference: str) -> str:
    """The address of a report; empty when its project is not known."""
    project, _, number = reference.partition("#")
    full: str = catalog.load("projects").get(project, project)
    return f"https://github.com/{full}/issues/{number}" if "/" in full else ""


def problem_lines(problem: Problem, shell: str, width: int) -> list[str]:
    """The page of a problem."""
    fix = catalog.fill(problem.fix, example_values(shell))
    lines = [*text.paragraph(f"{problem.code} {problem.slug}: {problem.title}", width), ""]
    lines += _section("what one sees", text.paragraph(problem.what, width, "  "))
    lines += _section("why", text.paragraph(problem.why, width, "  "))
    # Lines of a log are shown as they are: wrapped ones cannot be compared with one's own.
    lines += _section("for example", [f"  | {line}".rstrip() for line in problem.example])
    lines += _section("what to do", _fix(fix, shell, width))
    lines += _section("what is not the cause", _items(problem.looks_like, width))
    lines += _section("what not to follow", _items(problem.wrong_advice, width))
    return [*lines, *_reports(problem.references, width)]


def advice_lines(advice: Advice, shell: str, width: int) -> list[str]:
    """The page of a piece of advice."""
    meaning = tips.VERDICTS[advice.verdict]
    lines = [*text.paragraph(f"{advice.code}: {advice.advice}", width), ""]
    lines += text.paragraph(f"{advice.verdict}: {meaning}", width)
    lines += text.paragraph(advice.since, width, "", "since: ")
    lines += [*text.paragraph(advice.why, width, "", "why: "), ""]
    steps = tips.commands(advice, example_values(shell))
    lines += _section("instead", text.commands(steps, shell, "  "))
    return [*lines, *_reports(advice.references, width)]


def code_lines(width: int) -> list[str]:
    """Every code with its name and title, by area; then the advice."""
    lines: list[str] = []
    for name, known in by_area().items():
        if known:
            slugs = max(len(row.slug) for row in known)
            lines.append(AREAS[name])
            for row in known:
                label = f"{row.code.ljust(6)}  {row.slug.ljust(slugs)}  "
                lines += text.paragraph(row.title, width, "  ", label)
            lines.append("")
    lines.append("Advice found on the web")
    for advice in tips.entries().values():
        label = f"{advice.code}  {advice.verdict.ljust(8)}  "
        lines += text.paragraph(advice.advice, width, "  ", label)
    return lines


def problem_json(problem: Problem, shell: str) -> dict[str, Any]:
    """The JSON form of a problem's page."""
    return {
        "code": problem.code,
        "id": problem.slug,
        "title": problem.title,
        "layer": problem.layer,
        "severity": problem.severity.value,
        "what": problem.what,
        "why": problem.why,
        "example": list(problem.example),
        "fix": catalog.fill(problem.fix, example_values(shell)).to_json(),
        "not_the_cause": list(problem.looks_like),
        "wrong_advice": list(problem.wrong_advice),
        "systems": list(problem.systems),
        "references": [report_url(name) or name for name in problem.references],
    }


def _fix(fix: Fix, shell: str, width: int) -> list[str]:
    lines = [*text.paragraph(fix.text, width, "  ")]
    lines += ["", *text.commands(fix.commands, shell, "    "), ""] if fix.commands else []
    safe = "safe: " if fix.safe else "care: "
    return [*lines, *text.paragraph(fix.safety, width, "  ", safe)]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *lines, ""] if lines else []


def _items(items: Iterable[str], width: int) -> list[str]:
    return [line for item in items for line in text.paragraph(item, width, "  ", "- ")]


def _reports(references: Sequence[str], width: int) -> list[str]:
    lines = [f"  {report_url(name) or name}" for name in references]
    return ["reports", *lines] if lines else []
