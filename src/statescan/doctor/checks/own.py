# SPDX-License-Identifier: Apache-2.0
"""Checks of statescan itself: its C library, its backends, and a small computation.

Facts about them come from a child process; nothing of statescan is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor.checks.base import STATESCAN, Question, check, finding
from statescan.doctor.model import Finding

_NO_TORCH = (
    *("torch-missing", "torch-too-old", "torch-import-fails", "package-half-removed:error"),
    *("python-version-unsupported", "system-without-torch"),
)
_CHOSEN = ("STATESCAN_PURE", "not built with this install")
"""In the reason for a missing C library where it is not an accident."""


@check(
    *("own", "native-library-broken"),
    packages=(STATESCAN,),
    about="statescan's C library loads, where this install has one",
    unless=_NO_TORCH,
    values=("statescan.native",),
)
def native_library(question: Question) -> Iterable[Finding]:
    """It is there and does not load; an install without one works, by the torch backend."""
    row = question.facts.get("statescan.native") or {}
    error = str(row.get("error") or "")
    if error and not any(text in error for text in _CHOSEN):
        summary = "statescan's C library does not load, so the slower torch backend runs instead."
        yield finding(question, "native-library-broken", summary, [error], packages=[STATESCAN])


@check(
    *("own", "backend-forced-unusable"),
    packages=(STATESCAN,),
    about="STATESCAN_BACKEND names a backend that runs here",
    unless=_NO_TORCH,
    values=("statescan.backends",),
)
def forced_backend(question: Question) -> Iterable[Finding]:
    """Every op raises while the variable forces what cannot run."""
    variables = question.facts.get("environment.variables", {})
    forced = str(variables.get("STATESCAN_BACKEND", "")).strip().lower()
    rows = {row["name"]: row for row in question.facts.get("statescan.backends", [])}
    if not rows or forced in ("", "auto") or rows.get(forced, {}).get("usable"):
        return
    reason = rows[forced].get("reason", "") if forced in rows else "there is no such backend"
    summary = f"STATESCAN_BACKEND is {forced}, which cannot run here: {reason}."
    evidence = [f"usable: {', '.join(name for name, row in rows.items() if row.get('usable'))}"]
    slug = "backend-forced-unusable"
    yield finding(question, slug, summary, evidence, packages=[STATESCAN])


@check(
    *("own", "smoke-test-failed"),
    packages=(STATESCAN,),
    about="a small scan gives the same numbers as its reference",
    unless=(*_NO_TORCH, "backend-forced-unusable"),
    values=("statescan.smoke",),
)
def smoke_test(question: Question) -> Iterable[Finding]:
    """One op against its reference, in a child process."""
    row = question.facts.get("statescan.smoke") or {}
    if row.get("ok") is False:
        lines = [line for line in str(row.get("error") or "").splitlines() if line.strip()]
        summary = "statescan's test computation failed."
        slug = "smoke-test-failed"
        yield finding(question, slug, summary, lines[-3:], packages=[STATESCAN])
