# SPDX-License-Identifier: Apache-2.0
"""Makes findings about binaries: the catalogue's problem with the fix filled for their package.

What fires a finding is in ``judge`` and its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from statescan.doctor import catalog
from statescan.doctor.model import Finding, Fix, Severity
from statescan.doctor.symbols.binary import printable

SHOWN = 5
"""Missing symbols and libraries named in one finding; the report has all."""


_FIXES_OF_PACKAGES = frozenset(
    (
        *("binary-damaged", "symbol-missing", "torch-abi-mismatch", "cxx11-abi-mismatch"),
        *("cudart-missing", "glibc-too-old", "gpu-arch-not-in-binary", "wheel-tag-mismatch"),
        *("wheel-wrong-cpu-arch", "torch-is-cpu-only", "python-version-unsupported"),
    )
)
"""Problems whose fix in the catalogue installs or builds mamba-ssm and causal-conv1d again."""


def finding(
    slug: str,
    report: Mapping[str, Any],
    summary: str,
    evidence: Sequence[str],
    severity: Severity | None = None,
    values: Mapping[str, str] | None = None,
) -> Finding:
    """A finding about one binary, with the catalogue's fix filled for its package.

    Args:
        slug: The problem's.
        report: Of the binary or wheel.
        summary: One line with the values seen.
        evidence: What was seen, a line each.
        severity: When it is not the problem's own.
        values: More placeholders of the fix.
    """
    problem = catalog.problem(slug)
    known = catalog.load("symbols")["modules"].get(report.get("module", ""), {})
    package = known.get("package") or str(report.get("distribution", "")).replace("_", "-").lower()
    filled = {
        "package": package or "PACKAGE",
        "force": known.get("force", "FORCE_BUILD"),
        "file": str(report["path"]),
        "path": str(report["path"]),
        **(values or {}),
    }
    fix = catalog.fill(problem.fix, {key: printable(value) for key, value in filled.items()})
    return Finding(
        problem,
        severity or problem.severity,
        printable(summary),
        tuple(map(printable, evidence)),
        fix if package in _packages() or slug not in _FIXES_OF_PACKAGES else _general_fix(),
        (package,) if package else (),
    )


def _packages() -> set[str]:
    return {row["package"] for row in catalog.load("symbols")["modules"].values()}


def _general_fix() -> Fix:
    """For packages of others, whose way of building is not known."""
    return Fix(catalog.load("symbols")["other_packages_fix"])


def file_name(report: Mapping[str, Any]) -> str:
    """The file's name; the path may be one of another system."""
    return re.split(r"[\\/]", str(report["path"]))[-1]


def numbers(version: str) -> tuple[int, ...]:
    """The parts of a version as numbers, to compare."""
    return tuple(int(part) for part in re.findall(r"\d{1,6}", version)[:4])


def status(report: Mapping[str, Any], wanted: str) -> list[Mapping[str, Any]]:
    """The rows of the report's libraries with that status; none where nobody looked."""
    return [row for row in report.get("libraries") or () if row["status"] == wanted]
