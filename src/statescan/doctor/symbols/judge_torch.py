# SPDX-License-Identifier: Apache-2.0
"""Judges what a binary needs of torch and of the CUDA runtime: which build, strings and version.

Symbols were looked up before; where they were not, their names alone must tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statescan.doctor.model import Facts, Finding, Severity
from statescan.doctor.symbols import generation, names
from statescan.doctor.symbols.findings import SHOWN, file_name, finding, status

_STRINGS = {True: "new (cxx11abiTRUE)", False: "old (cxx11abiFALSE)"}


def is_cpu_torch(facts: Facts) -> bool:
    """Whether the installed torch is a build without a GPU."""
    return bool(facts.get("torch.version")) and not (
        facts.get("torch.cuda") or facts.get("torch.hip")
    )


def cuda_build(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    """The binary needs a CUDA build of torch, and there is one for the CPU."""
    symbols = [name for name in report["undefined_torch"] if generation.is_cuda_only(name)]
    libraries = [name for name in report["needed"] if generation.is_cuda_library(name)]
    if not (symbols or libraries) or not is_cpu_torch(facts):
        return None
    summary = (
        f"{file_name(report)} needs a CUDA build of torch, "
        f"and the installed torch {facts.get('torch.version')} is built without CUDA."
    )
    readable = {row["symbol"]: row["readable"] for row in _missing(report)}
    evidence = [f"needs {name}" for name in libraries]
    evidence += [f"in CUDA builds only: {readable.get(name, name)}" for name in symbols[:2]]
    return finding("torch-is-cpu-only", report, summary, evidence)


def _missing(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Symbols that torch's libraries were searched for and lack."""
    missing = report.get("missing") or {}
    if not missing.get("searched_torch"):
        return []
    return [row for row in missing.get("torch", ()) if not row["defined_in"]]


def cudart(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    """The CUDA runtime that the binary needs is not that of torch, or is not found."""
    major, torch_cuda = report.get("cudart"), facts.get("torch.cuda")
    no_torch = "torch.version" in facts and not facts.get("torch.version")
    if major is None or (no_torch and report["links_torch"]):
        return None
    asked = next((name for name in report["needed"] if names.cudart_major(name)), f"cudart {major}")
    looked = report.get("libraries") is not None
    missing = any(row["name"] == asked for row in status(report, "missing"))
    if torch_cuda and torch_cuda.split(".")[0] != major:
        # Without a look at that machine's libraries, those that a probe saw there must do.
        seen = [row.get("soname") for row in facts.get("libraries.cudart", ())]
        there = not missing if looked else asked in seen
        summary = (
            f"{file_name(report)} needs the CUDA runtime {major} ({asked}), "
            f"and the installed torch {facts.get('torch.version', '')} is for CUDA {torch_cuda}."
        )
        evidence = [f"needs {asked}", f"torch is built for CUDA {torch_cuda}"]
        if there:
            evidence.append(f"{asked} is found: two CUDA runtimes would be in one process")
        severity = Severity.WARNING if there else Severity.ERROR
    elif missing:
        summary = f"{file_name(report)} needs {asked}, and the loader does not find it here."
        evidence, severity = [f"not found: {asked}", *_built_for(facts)], Severity.ERROR
    else:
        return None
    values = {
        "needed": major,
        "found": torch_cuda or "none",
        "cuda": torch_cuda or "",
        "cuda_major": (torch_cuda or major).split(".")[0],
    }
    return finding("cudart-missing", report, summary, evidence, severity, values=values)


def _built_for(facts: Facts) -> list[str]:
    version, cuda = facts.get("torch.version"), facts.get("torch.cuda")
    if not version:
        return []
    return [f"torch {version} is built for {f'CUDA {cuda}' if cuda else 'the CPU'}"]


def _other_strings(report: Mapping[str, Any], facts: Facts) -> bool:
    built, installed = report["cxx11_abi"], facts.get("torch.cxx11_abi")
    return bool(report["links_torch"]) and None not in (built, installed) and built != installed


def string_abi(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    """The binary and torch have different C++ strings."""
    if not facts.get("torch.version") or not _other_strings(report, facts):
        return None
    built, installed = report["cxx11_abi"], facts.get("torch.cxx11_abi")
    summary = (
        f"{file_name(report)} uses the {_STRINGS[built]} C++ strings, "
        f"and torch {facts.get('torch.version')} the {_STRINGS[installed]} ones."
    )
    seen = [row["readable"] for row in _missing(report) if row["cxx11_abi"] == built]
    asked = [name for name in report["undefined_torch"] if generation.string_abi(name) == built]
    evidence = [f"asks torch for: {name}" for name in (seen or asked)[:2]]
    values = {"needed": str(built).upper(), "found": str(installed).upper()}
    return finding("cxx11-abi-mismatch", report, summary, evidence, values=values)


def version(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    """The binary was built for another version of torch."""
    installed, built_for = facts.get("torch.version"), report.get("torch_generation")
    if not installed or not report["links_torch"]:
        return None
    rows = [row for row in _missing(report) if not _explained(row, report, facts)]
    # What the catalogue can explain convinces more than a bare name.
    rows.sort(key=lambda row: not row["meaning"])
    outside = built_for is not None and not generation.in_range(built_for, installed)
    # A look at torch's libraries outweighs what the names suggest.
    looked = bool((report.get("missing") or {}).get("searched_torch"))
    lost = _lost_libraries(report, facts) if looked else []
    if not (rows or lost if looked else outside):
        return None
    made = generation.range_text(built_for) if outside and built_for else "another torch"
    summary = f"{file_name(report)} was built for {made}, and torch {installed} is installed."
    evidence = [f"not in the installed torch: {name}" for name in lost]
    evidence += [_missing_line(row) for row in rows[:SHOWN]]
    if len(rows) > SHOWN:
        evidence.append(f"and {len(rows) - SHOWN} more symbols that torch {installed} lacks")
    if built_for is not None and outside and not rows:
        evidence += [f"{row['symbol']}: {row['meaning']}" for row in built_for["because"]]
    values = {"torch": installed.split("+")[0], "found": installed}
    return finding("torch-abi-mismatch", report, summary, evidence, values=values)


def _explained(row: Mapping[str, Any], report: Mapping[str, Any], facts: Facts) -> bool:
    """Whether the kind of build or of strings already says why a symbol is missing."""
    if row["cuda_only"] and is_cpu_torch(facts):
        return True
    return row["cxx11_abi"] is not None and _other_strings(report, facts)


def _lost_libraries(report: Mapping[str, Any], facts: Facts) -> list[str]:
    """Libraries of torch that the installed one does not have, for another reason than CUDA."""
    missing = [row["name"] for row in status(report, "missing")]
    return [
        name
        for name in dict.fromkeys(missing)
        if generation.is_torch_library(name)
        and not (generation.is_cuda_library(name) and is_cpu_torch(facts))
    ]


def _missing_line(row: Mapping[str, Any]) -> str:
    meaning = f" ({row['meaning']})" if row["meaning"] else ""
    return f"not in the installed torch: {row['readable']}{meaning}"
