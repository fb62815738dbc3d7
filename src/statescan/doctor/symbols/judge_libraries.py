# SPDX-License-Identifier: Apache-2.0
"""Judges what a binary needs of the system: the C and C++ libraries, and every other one.

What it needs of torch and CUDA is in ``judge_torch``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from statescan.doctor.model import Facts, Finding
from statescan.doctor.symbols import generation, names
from statescan.doctor.symbols.findings import SHOWN, file_name, finding, numbers, status


def glibc(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    """The C library is too old, or another one."""
    needed, libc = _highest(report, "GLIBC_"), facts.get("system.libc")
    if needed is None or not isinstance(libc, Mapping):
        return None
    version, library = needed
    found = str(libc.get("version") or "")
    if libc.get("kind") == "musl":
        summary = f"{file_name(report)} needs glibc, and this system has musl instead."
    elif found and numbers(version) > numbers(found):
        summary = f"{file_name(report)} needs glibc {version}, and this system has {found}."
    else:
        return None
    evidence = [f"version need: GLIBC_{version} of {library}"]
    return finding(
        "glibc-too-old", report, summary, evidence, values={"needed": version, "found": found}
    )


def libstdcxx(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    """The first libstdc++ that is found lacks versions of symbols."""
    for prefix, key in (("GLIBCXX_", "glibcxx"), ("CXXABI_", "cxxabi")):
        if report.get("versions_missing") is None:
            lacking = _lacking_by_facts(report, facts, prefix, key)
        else:
            lacking = _lacking(report, prefix)
        if lacking is None:
            continue
        version, found, path = lacking
        summary = (
            f"{file_name(report)} needs {prefix}{version} of libstdc++, "
            f"and the libstdc++ found first ends at {prefix}{found}."
        )
        evidence = [f"found first: {path}", f"version need: {prefix}{version}"]
        values = {"needed": f"{prefix}{version}", "found": f"{prefix}{found}", "path": path}
        return finding("libstdcxx-too-old", report, summary, evidence, values=values)
    return None


def _highest(report: Mapping[str, Any], prefix: str) -> tuple[str, str] | None:
    """The highest version with that prefix that the binary needs, and of which library."""
    rows = [
        (version.removeprefix(prefix), library)
        for library, versions in report.get("version_needs", {}).items()
        for version in versions
        if re.fullmatch(re.escape(prefix) + r"[\d.]+", version)
    ]
    return max(rows, key=lambda row: numbers(row[0]), default=None)


def _lacking(report: Mapping[str, Any], prefix: str) -> tuple[str, str, str] | None:
    """The highest version that the library found on the machine lacks, its own, and its path."""
    rows = [
        (version.removeprefix(prefix), row)
        for row in report["versions_missing"]
        for version in row["versions"]
        if version.startswith(prefix)
    ]
    if not rows:
        return None
    version, row = max(rows, key=lambda pair: numbers(pair[0]))
    have = [name for name in row["has"] if re.fullmatch(re.escape(prefix) + r"[\d.]+", name)]
    return version, max(have, key=numbers, default="none").removeprefix(prefix), str(row["path"])


def _lacking_by_facts(
    report: Mapping[str, Any], facts: Facts, prefix: str, key: str
) -> tuple[str, str, str] | None:
    needed = _highest(report, prefix)
    first: Mapping[str, Any] = next(iter(facts.get("libraries.libstdcxx", ())), {})
    found = str(first.get(key) or "")
    if needed is None or not found or numbers(needed[0]) <= numbers(found):
        return None
    return needed[0], found, str(first.get("path", ""))


def libraries(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    """A library is missing that no other finding is about."""
    no_torch = "torch.version" in facts and not facts.get("torch.version")
    if no_torch and report["links_torch"]:
        return _torch_absent(report)
    rows = [row for row in status(report, "missing") if not _explained(row["name"], report, facts)]
    if not rows:
        return None
    missing = list(dict.fromkeys(row["name"] for row in rows))
    summary = f"{file_name(report)} needs {', '.join(missing[:3])}, which the loader does not find."
    evidence = [
        f"not found: {row['name']}"
        + (f", needed by {row['needed_by']}" if row["needed_by"] else "")
        for row in rows[:SHOWN]
    ]
    return finding(
        "library-missing", report, summary, evidence, values={"needed": ", ".join(missing)}
    )


def _torch_absent(report: Mapping[str, Any]) -> Finding:
    needed = [name for name in report["needed"] if generation.is_torch_library(name)]
    summary = f"{file_name(report)} needs torch, and no torch is installed here."
    evidence = [f"needs {name}" for name in needed[:SHOWN]]
    named = ", ".join(needed) or "torch"
    return finding("library-missing", report, summary, evidence, values={"needed": named})


def _explained(name: str, report: Mapping[str, Any], facts: Facts) -> bool:
    """Whether a finding about torch or CUDA says why that library is missing."""
    if names.cudart_major(name):
        return True
    searched = (report.get("missing") or {}).get("searched_torch")
    return bool(searched and facts.get("torch.version") and generation.is_torch_library(name))


def other_symbols(report: Mapping[str, Any]) -> Finding | None:
    """A symbol that is defined nowhere, or only where the binary does not look."""
    missing = report.get("missing") or {}
    hidden = [row for row in missing.get("torch", ()) if row["defined_in"]]
    rows = [*hidden, *(missing.get("other", ()) if missing.get("complete") else ())]
    if not rows:
        return None
    first = rows[0]
    if first["defined_in"]:
        summary = (
            f"{file_name(report)} needs {first['readable']} of {first['defined_in']}, "
            "and was not linked to that library."
        )
    else:
        summary = (
            f"{file_name(report)} needs {first['readable']}, which none of its libraries defines."
        )
    evidence = [_line(row) for row in rows[:SHOWN]]
    if len(rows) > SHOWN:
        evidence.append(f"and {len(rows) - SHOWN} more")
    return finding("symbol-missing", report, summary, evidence, values={"needed": first["symbol"]})


def _line(row: Mapping[str, Any]) -> str:
    if row["defined_in"]:
        return f"only in {row['defined_in']}, which it does not name: {row['readable']}"
    return f"defined nowhere: {row['readable']}"
