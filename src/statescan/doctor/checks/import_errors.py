# SPDX-License-Identifier: Apache-2.0
"""Reads the error of an import in a child process as ``statescan log`` reads a log.

Only where no other check has told the cause; which imports failed is for the checks to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from statescan.doctor.checks.base import Question, finding
from statescan.doctor.logs.analyse import analyse_text
from statescan.doctor.model import Finding, Problem

_NO_ANSWERS = ("success", "log-truncated")


def failed_import(
    question: Question, slug: str, name: str, error: str, packages: Sequence[str]
) -> Finding:
    """A finding about ``import name`` with the last lines of its error.

    Args:
        question: What is asked.
        slug: Of the problem.
        name: The module.
        error: What the child process printed.
        packages: Whose.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    evidence, cause = lines[-2:], _cause(error)
    if cause is not None:
        evidence.append(f"reads like {cause.code} {cause.slug}: {cause.title}")
    return finding(
        *(question, slug, f"`import {name}` fails.", evidence),
        packages=packages,
        fix=cause.fix if cause is not None else None,
    )


def _cause(error: str) -> Problem | None:
    """The problem that the error tells; None where it tells none."""
    if not error.strip():
        return None
    diagnosis = analyse_text(error)
    return None if diagnosis.root_cause in _NO_ANSWERS else diagnosis.problem
