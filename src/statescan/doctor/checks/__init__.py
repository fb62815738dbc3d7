# SPDX-License-Identifier: Apache-2.0
"""The checks of the doctor: facts in, findings out. ``run`` answers, ``examine`` tells how.

A rule stands in the module of its area; here they are only ordered, chosen and run.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache

from statescan.doctor import catalog
from statescan.doctor.checks import (
    abi,
    api,
    compiler,
    environment,
    gpu,
    own,
    packages,
    python,
    resources,
    toolkit,
    triton,
)
from statescan.doctor.checks.base import AREAS, ORIGINALS, PACKAGES, REGISTRY, Check, Question
from statescan.doctor.checks.fixes import for_installer
from statescan.doctor.model import Facts, Finding, Severity
from statescan.errors import ArgumentError

__all__ = [
    "AREAS",
    "ORIGINALS",
    "PACKAGES",
    "Check",
    "Report",
    "Result",
    "all_checks",
    "examine",
    "names",
    "run",
    "select",
]

_RULES = (
    *(environment, python, packages, own, abi, api, gpu),
    *(triton, toolkit, compiler, resources),
)
_SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)


@dataclass(frozen=True)
class Result:
    """What became of one check: "ok", "found" or "skipped" with a reason."""

    check: Check
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was asked, done and found.

    Attributes:
        question: With the facts.
        findings: By severity, then by the layer of an install.
        results: A row for each check that was chosen.
    """

    question: Question
    findings: tuple[Finding, ...]
    results: tuple[Result, ...]


def run(facts: Facts, package: str | None = None, only: Collection[str] = ()) -> list[Finding]:
    """The findings on these facts, the gravest first and of these the earliest layer first.

    Args:
        facts: Of this or another machine.
        package: What the machine is wanted for; None for statescan and what is installed.
        only: Codes, slugs or areas; empty for all.
    """
    return list(examine(facts, package, only).findings)


def examine(facts: Facts, package: str | None = None, only: Collection[str] = ()) -> Report:
    """The same with every check's outcome.

    Every check runs whatever was chosen, so that a choice never shows what follows from a cause
    that it leaves out.
    """
    if package is not None and package not in PACKAGES:
        raise ArgumentError(
            f"package: {package!r} is not one that the doctor knows.\n"
            f"It must be one of {', '.join(PACKAGES)}.\nLeave it out to judge what is installed."
        )
    chosen = _chosen(only)
    question = Question(facts, package)
    results = {row: _outcome(row, question) for row in _ordered()}
    kept = [finding for finding in question.found if finding.problem.slug in chosen]
    rows = tuple(result for row, result in results.items() if set(row.slugs) & chosen)
    order = list(REGISTRY)
    return Report(
        question,
        tuple(sorted(kept, key=_rank)),
        tuple(sorted(rows, key=lambda result: order.index(result.check))),
    )


def all_checks() -> tuple[Check, ...]:
    """Every check, area by area."""
    areas = list(AREAS)
    return tuple(sorted(REGISTRY, key=lambda row: areas.index(row.area)))


def select(only: Collection[str]) -> tuple[Check, ...]:
    """The checks that were chosen by code, slug or area; ArgumentError for another name."""
    chosen = _chosen(only)
    return tuple(row for row in all_checks() if set(row.slugs) & chosen)


def names() -> list[str]:
    """Everything that chooses a check: areas, slugs, codes."""
    slugs = [slug for row in all_checks() for slug in row.slugs]
    return [*AREAS, *dict.fromkeys(slugs), *(catalog.problem(slug).code for slug in slugs)]


def _chosen(only: Collection[str]) -> set[str]:
    """Slugs of the problems that were chosen; all of them where nothing was."""
    every = {slug for row in REGISTRY for slug in row.slugs}
    if not only:
        return every
    chosen: set[str] = set()
    for name in only:
        slugs = {slug for row in REGISTRY if row.area == name for slug in row.slugs}
        slugs |= {slug for slug in every if name.upper() == catalog.problem(slug).code}
        slugs |= {name} & every
        if not slugs:
            raise ArgumentError(_unknown(name))
        chosen |= slugs
    return chosen


def _unknown(name: str) -> str:
    known = {one.lower(): one for one in names()}
    near = [known[one] for one in difflib.get_close_matches(name.lower(), list(known), 3, 0.5)]
    hint = f"Near it: {', '.join(near)}." if near else f"Areas: {', '.join(AREAS)}."
    return (
        f"CHECK: {name!r} is no check.\n"
        f"It must be a code, an id or an area of `statescan doctor --list`.\n{hint}"
    )


@cache
def _ordered() -> tuple[Check, ...]:
    """The checks so that each comes after those whose findings make it superfluous."""
    done: dict[str, Check] = {}

    def visit(row: Check, above: tuple[str, ...]) -> None:
        if row.name in done:
            return
        if row.name in above:
            raise AssertionError(f"checks wait for each other: {' -> '.join((*above, row.name))}")
        for other in REGISTRY:
            if other is not row and set(other.slugs) & row.causes:
                visit(other, (*above, row.name))
        done[row.name] = row

    for row in REGISTRY:
        visit(row, ())
    return tuple(done.values())


def _outcome(row: Check, question: Question) -> Result:
    """Run one check, unless the question does not need it or its cause was found."""
    if not set(row.packages) & set(question.judged):
        return Result(row, "skipped", f"not needed for {_listed(question.judged)}")
    cause = row.cause(question.found)
    if cause is not None:
        problem = cause.problem
        return Result(row, "skipped", f"{problem.code} {problem.slug} comes first")
    if row.of_build and not question.built:
        return Result(row, "skipped", "nothing is to be installed")
    if row.of_use and not (question.used or question.others):
        return Result(row, "skipped", "nothing is installed")
    if row.needs and not any(question.knows(name) for name in row.needs):
        return Result(row, "skipped", f"nothing is known of {', '.join(row.needs)}")
    unseen = [name for name in row.values if question.facts.get(name) is None]
    if unseen:
        return Result(row, "skipped", f"nobody looked: {', '.join(unseen)}")
    found = [replace(one, fix=for_installer(one.fix, question)) for one in row.rule(question)]
    question.found.extend(found)
    return Result(row, "found" if found else "ok")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(names)


def _rank(finding: Finding) -> tuple[int, int, str]:
    return (
        _SEVERITIES.index(finding.severity),
        catalog.LAYERS.index(finding.problem.layer),
        finding.problem.code,
    )
