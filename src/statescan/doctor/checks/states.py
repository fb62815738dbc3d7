# SPDX-License-Identifier: Apache-2.0
"""How far each package gets: installed, importable, loaded, usable are four different words.

Only put together from facts; whether something is wrong is said by the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statescan.doctor.checks.base import EXTENSIONS, MODULES, ORIGINALS, STATESCAN, Question

UNKNOWN = "not tried"


def rows(question: Question) -> list[dict[str, str]]:
    """A row for statescan, each installed original, and each other project's CUDA module.

    Returns:
        Rows with ``name``, ``installed`` (a version or "no"), and ``importable``, ``loaded``
        (its compiled module, in a process) and ``usable`` (a test computation passed): each
        "yes", "no", "in part" or "not tried".
    """
    found = [_own(question)] if question.judges(STATESCAN) else []
    found += [_original(question, one) for one in ORIGINALS if question.judges(one)]
    modules = question.facts.get("extensions.modules", {})
    return found + [_module(name, modules[name]) for name in question.others]


def _own(question: Question) -> dict[str, str]:
    facts = question.facts
    native = facts.get("statescan.native")
    imported = facts.get("statescan.backends")
    smoke = facts.get("statescan.smoke") or {}
    return {
        "name": STATESCAN,
        "installed": str(facts.get("statescan.version", "yes")),
        "importable": "yes" if imported else _word((facts.get("torch.import") or {}).get("ok")),
        "loaded": UNKNOWN if native is None else _word("error" not in native),
        "usable": _word(smoke.get("ok")),
    }


def _original(question: Question, package: str) -> dict[str, str]:
    facts = question.facts
    if not question.installed(package):
        return {
            "name": package,
            "installed": "no",
            "importable": "no",
            "loaded": "no",
            "usable": "no",
        }
    python = facts.get("extensions.python", {}).get(MODULES[package]) or {}
    module = facts.get("extensions.modules", {}).get(EXTENSIONS[package]) or {}
    importable = python.get("importable")
    loaded = module.get("importable") if module.get("files") else False
    return {
        "name": package,
        "installed": question.version(package) or "yes",
        "importable": _word(importable),
        "loaded": _word(loaded),
        "usable": "no" if importable is False else _usable(python.get("usable") or {}),
    }


def _module(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    loaded = _word(row.get("importable"))
    usable = "no" if row.get("importable") is False else UNKNOWN
    return {
        "name": name,
        "installed": "yes",
        "importable": loaded,
        "loaded": loaded,
        "usable": usable,
    }


def _usable(outcomes: Mapping[str, str]) -> str:
    """Of the test computations, by name."""
    if not outcomes:
        return UNKNOWN
    passed = sum(outcome == "ok" for outcome in outcomes.values())
    if passed == len(outcomes):
        return "yes"
    return "in part" if passed else "no"


def _word(value: bool | None) -> str:
    return UNKNOWN if value is None else "yes" if value else "no"
