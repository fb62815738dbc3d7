# SPDX-License-Identifier: Apache-2.0
"""Checks of the interpreter, and of what installs packages for it.

Its headers are a matter of the compiler area.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor import catalog, releases
from statescan.doctor.checks import known
from statescan.doctor.checks.base import PACKAGES, STATESCAN, Question, check, fact_line, finding
from statescan.doctor.model import Finding
from statescan.doctor.symbols.findings import numbers


@check(
    *("python", "python-version-unsupported"),
    packages=PACKAGES,
    about="what is judged exists for this Python",
    unless=("macos-unsupported",),
    needs=("python.version",),
)
def python_version(question: Question) -> Iterable[Finding]:
    """Too old for the package, or without a torch."""
    facts = question.facts
    version = str(facts.get("python.version", ""))
    evidence = [fact_line(facts, "python.version", f"Python {version}")]
    old = [
        (package, least)
        for package, least in _least_pythons(question)
        if known.older(version, least)
    ]
    if old:
        package, least = old[0]
        summary = f"Python {version} is in use, and {package} needs {least} or newer."
        yield finding(
            *(question, "python-version-unsupported", summary, evidence),
            packages=[package for package, _ in old],
            values={"python": max(least for _, least in old)},
        )
        return
    pythons = releases.torch_pythons(_newest_torch())
    if not facts.get("torch.version") and known.newer(version, pythons[-1]):
        summary = f"Python {version} is in use, and torch is published up to Python {pythons[-1]}."
        yield finding(
            *(question, "python-version-unsupported", summary, evidence),
            packages=question.judged,
            values={"python": pythons[-1]},
        )


def _least_pythons(question: Question) -> list[tuple[str, str]]:
    """What each package that is judged needs; an installed release has shown that it runs."""
    rows = [(STATESCAN, known.LEAST_PYTHON)] if question.judges(STATESCAN) else []
    return rows + [(package, _oldest_python(package)) for package in question.built]


def _oldest_python(package: str) -> str:
    """Of the releases whose sources are complete: pip takes the newest one that fits."""
    every = [row for row in releases.releases(package) if row.sdist_has_sources]
    return min((row.python_min for row in every), key=numbers)


def _newest_torch() -> str:
    versions: list[str] = list(catalog.load("pins")["torch"])
    return max(versions, key=numbers)


@check(
    *("python", "installer-missing"),
    about="there is a pip or uv for this interpreter",
    unless=("macos-unsupported", "system-without-torch", "no-cuda-machine"),
    needs=("python.pip", "python.uv"),
    of_build=True,
)
def installer(question: Question) -> Iterable[Finding]:
    """Nothing could install the package."""
    facts = question.facts
    known_both = question.knows("python.pip", "python.uv")
    if known_both and not facts.get("python.pip") and not facts.get("python.uv"):
        executable = str(facts.get("python.executable", "this Python"))
        summary = f"Neither pip nor uv is there to install packages for {executable}."
        yield finding(question, "installer-missing", summary, packages=question.built)


@check(
    *("python", "externally-managed"),
    about="pip may install into this environment",
    unless=(
        *("macos-unsupported", "system-without-torch", "installer-missing"),
        "no-cuda-machine",
    ),
    needs=("python.externally_managed",),
    of_build=True,
)
def externally_managed(question: Question) -> Iterable[Finding]:
    """PEP 668: the system's Python is closed for pip, unless that was switched off."""
    facts = question.facts
    allowed = facts.get("environment.variables", {}).get("PIP_BREAK_SYSTEM_PACKAGES", "")
    if facts.get("python.externally_managed") and allowed in ("", "0"):
        executable = str(facts.get("python.executable", "This Python"))
        summary = f"{executable} belongs to the system, and pip refuses to install into it."
        evidence = [fact_line(facts, "python.externally_managed", "marked as externally managed")]
        yield finding(question, "externally-managed", summary, evidence, packages=question.built)
