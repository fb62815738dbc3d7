# SPDX-License-Identifier: Apache-2.0
"""The report of ``statescan doctor`` in lines of text: areas, findings, and a summary.

Returns lines and prints nothing; what is judged, and how, is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statescan.doctor import catalog, shells
from statescan.doctor.checks import AREAS, ORIGINALS, PACKAGES, Check, Report, all_checks
from statescan.doctor.model import Facts, Finding, Severity
from statescan.doctor.render import machine
from statescan.doctor.render.text import finding_lines, mark, paragraph

_MARK = 10
_LABEL = 13
_SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)
_COMPONENTS = {"python": "Python", "torch": "torch", "cuda": "CUDA", "gcc": "GCC"}
_PLURALS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "remark"}


def lines(report: Report, width: int, coloured: bool) -> list[str]:
    """The machine, a line an area, and what was left out."""
    facts = report.question.facts
    shown = paragraph(machine.system(facts), width)
    shown += paragraph(f"Judged: {_listed(report.question.judged)}.", width) + [""]
    left_out = []
    for area in AREAS:
        results = [row for row in report.results if row.check.area == area]
        if all(row.status == "skipped" for row in results):
            left_out += [area] if results else []
            continue
        codes = {slug for row in results for slug in row.check.slugs}
        found = [row for row in report.findings if row.problem.slug in codes]
        shown += _area(area, facts, found, width, coloured)
    if left_out:
        shown += paragraph(f"Not needed for this question: {', '.join(left_out)}.", width)
    return shown


def _area(
    area: str, facts: Facts, found: Sequence[Finding], width: int, coloured: bool
) -> list[str]:
    worst = next((one for one in _SEVERITIES if any(row.severity is one for row in found)), None)
    kind: Severity | str = worst or "ok"
    codes = ", ".join(dict.fromkeys(row.problem.code for row in found))
    seen = machine.area(area, facts)
    text = f"{codes}: see below. {seen}" if codes else seen or AREAS[area]
    plain = mark(kind, False)
    rows = paragraph(text, width, "", f"{plain.ljust(_MARK)}{area.ljust(_LABEL)}")
    return [mark(kind, coloured) + rows[0][len(plain) :], *rows[1:]]


def finding_blocks(report: Report, width: int, coloured: bool) -> list[str]:
    """Every finding in full, each after an empty line."""
    facts = report.question.facts
    shell = shells.shell_of(str(facts.get("system.os", "")), facts.get("system.shell"))
    blocks: list[str] = []
    for row in report.findings:
        blocks += ["", *finding_lines(row, shell, width, coloured)]
    return blocks


def unknown_lines(facts: Facts, width: int) -> list[str]:
    """What could not be found out, and why."""
    rows = [fact for fact in facts if fact.problem]
    if not rows:
        return []
    shown = ["", "Could not be found out:"]
    for fact in rows:
        shown += paragraph(fact.problem, width, "  ", f"{fact.name}: ")
    return shown


def summary(report: Report) -> str:
    """How many findings of each severity, in one sentence."""
    names = _listed(report.question.judged)
    if not report.findings:
        partly = len(report.results) < len(all_checks())
        return f"Nothing wrong for {names}{', as far as these checks go' if partly else ''}."
    counts = {one: sum(row.severity is one for row in report.findings) for one in _SEVERITIES}
    parts = [
        f"{count} {_PLURALS[one]}{'s' if count > 1 else ''}"
        for one, count in counts.items()
        if count
    ]
    return f"{', '.join(parts)} for {names}."


CHECK_TITLES = ("code", "id", "for", "finds")


def check_rows(checks: Iterable[Check]) -> list[tuple[str, str, str, str]]:
    """Cells of the list of checks."""
    rows = []
    for row in checks:
        for slug in row.slugs:
            problem = catalog.problem(slug)
            rows.append((problem.code, slug, _whom(row), problem.title))
    return list(dict.fromkeys(rows))


def _whom(row: Check) -> str:
    whole = {PACKAGES: "all", ORIGINALS: "originals"}
    return whole.get(row.packages, ", ".join(row.packages))


RELEASE_TITLES = ("release", "Python", "torch", "CUDA", "GCC", "conv", "")


def package_cells(matrix: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells of the first table of ``--matrix``."""
    cells, above = [], ""
    for row in matrix["packages"]:
        name = "" if row["package"] == above else row["package"]
        above = row["package"]
        versions = [row[key] or "-" for key in ("least", "best", "here")]
        cells.append((name, _COMPONENTS[row["component"]], *versions, row["stands"]))
    return cells


def release_cells(matrix: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Cells of the tables of releases, by package."""
    tables: dict[str, list[list[str]]] = {}
    for row in matrix["releases"]:
        ranges = [f"{row[key]['least']}-{row[key]['best']}" for key in _COMPONENTS]
        remark = "" if row["from_pypi"] else "git"
        if not row["for_this_python"]:
            remark = "not here"
        cells = [*ranges, str(row["conv"]), remark]
        rows = tables.setdefault(row["package"], [])
        if rows and rows[-1][1:] == cells:
            # Newest first: the older one of neighbours that want the same joins the row.
            rows[-1][0] = f"{rows[-1][0].split(' ')[0]} to {row['version']}"
        else:
            rows.append([row["version"], *cells])
    return tables


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
