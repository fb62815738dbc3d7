# SPDX-License-Identifier: Apache-2.0
"""Writes the answer of ``statescan symbols`` for people, in lines of plain text.

Nothing is read or judged here; colours only repeat what the words say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statescan.doctor.model import Finding
from statescan.doctor.render.text import finding_lines, paragraph
from statescan.doctor.symbols import generation
from statescan.doctor.symbols.binary import printable
from statescan.doctor.symbols.findings import file_name, numbers

_LABEL = 14
_FORMATS = {"elf": "Linux", "pe": "Windows", "macho": "macOS"}
_STATUS = {"missing": "NOT FOUND", "after-torch": "with torch", "found": "found"}
_STATE = 12
_SHOWN = 6
"""Missing symbols written out; `--json` has all."""


def binary_lines(report: Mapping[str, Any], width: int) -> list[str]:
    """What one binary is and needs."""
    lines = [printable(str(report["path"]))]
    if report["problem"]:
        return lines
    for label, value in _properties(report):
        lines += paragraph(printable(value), width, "  ", label.ljust(_LABEL))
    lines += _library_lines(report, width)
    return lines + _symbol_lines(report, width)


def _properties(report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    bits = f"{report['bits']}-bit" + (" big-endian" if report["byte_order"] == "big" else "")
    yield "for", f"{_FORMATS[report['format']]} on {report['machine']} ({bits} {report['kind']})"
    if report["python_tag"]:
        yield "Python", report["python_tag"]
    if report["links_torch"]:
        yield "torch", _torch(report)
    archs = report["cuda_archs"]
    gpu = [f"machine code for {', '.join(archs['cubin'])}"] if archs["cubin"] else []
    gpu += [f"PTX for {', '.join(archs['ptx'])}"] if archs["ptx"] else []
    gpu += [f"AMD code for {', '.join(report['amd_archs'])}"] if report["amd_archs"] else []
    runtime = [f"runtime {report['cudart']}"] if report["cudart"] else []
    if gpu or runtime:
        yield "GPU", "; ".join([*runtime, *(gpu or ["no GPU code inside"])])
    versions = _version_needs(report)
    if versions:
        yield "needs", ", ".join(versions)
    for label in ("rpath", "runpath"):
        if report[label]:
            yield label.upper(), ":".join(report[label])


def _torch(report: Mapping[str, Any]) -> str:
    built = report["torch_generation"]
    parts = [f"built for {generation.range_text(built)}" if built else "version not told by names"]
    if report["cxx11_abi"] is not None:
        new = report["cxx11_abi"]
        parts.append(f"{'new' if new else 'old'} C++ strings (cxx11abi{str(new).upper()})")
    return ", ".join(parts)


def _version_needs(report: Mapping[str, Any]) -> list[str]:
    """The highest version of each kind."""
    every = [name for versions in report["version_needs"].values() for name in versions]
    highest = []
    for prefix in ("GLIBC_", "GLIBCXX_", "CXXABI_"):
        rows = [name for name in every if re.fullmatch(prefix + r"[\d.]+", name)]
        highest += [max(rows, key=numbers)] if rows else []
    return highest


def _library_lines(report: Mapping[str, Any], width: int) -> list[str]:
    """Libraries of the same folder share a line, the missing ones first."""
    rows = report["libraries"]
    if rows is None:
        named = printable(", ".join(report["needed"])) or "none"
        lines = paragraph(named, width, "  ", "libraries".ljust(_LABEL))
        return [*lines, "  (where they are was not looked for)"]
    groups: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: list(_STATUS).index(row["status"])):
        folder = re.split(r"[\\/][^\\/]*$", row["path"])[0] if row["path"] else ""
        where = f"in {folder} ({row['via']})" if folder else ""
        where += f"needed by {row['needed_by']}" if row["needed_by"] else ""
        groups.setdefault((_STATUS[row["status"]], where), []).append(row["name"])
    lines = ["  libraries" if groups else "  libraries     none"]
    for (state, where), names in groups.items():
        text = printable(f"{', '.join(names)} {where}".strip())
        lines += paragraph(text, width, "    ", state.ljust(_STATE))
    return lines


def _symbol_lines(report: Mapping[str, Any], width: int) -> list[str]:
    missing = report["missing"] or {}
    lines = []
    kinds = [("torch", "symbols that torch lacks")] if missing.get("searched_torch") else []
    kinds += [("other", "symbols that no library has")] if missing.get("complete") else []
    for key, title in kinds:
        rows = missing.get(key, ())
        if not rows:
            continue
        lines.append(f"  {title}: {len(rows)}")
        for row in rows[:_SHOWN]:
            lines += paragraph(printable(row["readable"]), width, "    ")
        if len(rows) > _SHOWN:
            lines.append(f"    ... and {len(rows) - _SHOWN} more (all with --json)")
    return lines


def wheel_lines(wheel: Mapping[str, Any], width: int) -> list[str]:
    """What a wheel is, and each binary in it."""
    fields = [wheel["toolkit"], f"torch {wheel['torch']}" if wheel["torch"] else ""]
    if wheel["cxx11_abi"] is not None:
        fields.append(f"cxx11abi{str(wheel['cxx11_abi']).upper()}")
    rows = [
        ("wheel", f"{wheel['distribution']} {wheel['version']}"),
        ("built for", ", ".join(field for field in fields if field)),
        ("tags", ", ".join(wheel["tags"][:6])),
        ("Python", wheel["requires_python"] or "any"),
        ("requires", ", ".join(wheel["requires"][:12]) or "nothing"),
    ]
    lines = [printable(file_name(wheel))]
    for label, value in rows:
        if value:
            lines += paragraph(printable(value), width, "  ", label.ljust(_LABEL))
    plain = [row for row in wheel["binaries"] if not _is_telling(row)]
    if plain or not wheel["binaries"]:
        names = ", ".join(file_name(row) for row in plain) or "none"
        label = "carries" if plain else "binaries"
        lines += paragraph(printable(names), width, "  ", label.ljust(_LABEL))
    for report in wheel["binaries"]:
        lines += ["", *binary_lines(report, width)] if _is_telling(report) else []
    return lines


def _is_telling(report: Mapping[str, Any]) -> bool:
    """Whether a binary of a wheel is more than a library that it brings along."""
    missing = any(row["status"] == "missing" for row in report["libraries"] or ())
    is_module = report["path"].endswith((".so", ".pyd")) and ".libs/" not in report["path"]
    return bool(is_module or report["links_torch"] or report["problem"] or missing)


def answer_lines(
    findings: Sequence[Finding], verdict: str, shell: str, width: int, coloured: bool
) -> list[str]:
    """The findings, and the answer as the last line."""
    lines: list[str] = []
    for row in findings:
        lines += ["", *finding_lines(row, shell, width, coloured)]
    return [*lines, "", *paragraph(printable(verdict), width, "", "verdict: ")]
