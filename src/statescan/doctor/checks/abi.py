# SPDX-License-Identifier: Apache-2.0
"""Checks of the originals' compiled modules: there, for this Python, this torch, these libraries.

What a binary needs is judged by ``symbols.judge``; here its answers become one finding a cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statescan.doctor import catalog
from statescan.doctor.checks import known
from statescan.doctor.checks.base import (
    EXTENSIONS,
    MAMBA,
    ORIGINALS,
    PACKAGES,
    Question,
    check,
    finding,
    merged,
)
from statescan.doctor.checks.import_errors import failed_import
from statescan.doctor.model import Facts, Finding, Severity
from statescan.doctor.symbols import judge

_NO_TORCH = (
    *("torch-missing", "package-half-removed:error", "torch-import-fails", "macos-unsupported"),
    "no-cuda-machine",
)
_WRONG_FILE = ("wheel-tag-mismatch", "wheel-wrong-cpu-arch")
_FOUND_BY_JUDGE = (
    *("binary-damaged", *_WRONG_FILE, "glibc-too-old", "libstdcxx-too-old", "cudart-missing"),
    *("library-missing", "cxx11-abi-mismatch", "torch-abi-mismatch", "symbol-missing"),
)


@check(
    *("abi", *_FOUND_BY_JUDGE),
    about="the compiled modules fit this torch, Python, CPU and system",
    unless=(*_NO_TORCH, "torch-is-cpu-only", "import-shadowed"),
    needs=("extensions.modules",),
    packages=PACKAGES,
    of_use=True,
)
def compiled_modules(question: Question) -> Iterable[Finding]:
    """Read, not loaded: the first thing that is wrong with each module."""
    rows = []
    for name, module in question.facts.get("extensions.modules", {}).items():
        if _is_judged(question, name):
            rows += _first_wrong(module.get("files", []), question.facts)
    return merged([row for row in rows if row.problem.slug in _FOUND_BY_JUDGE])


def _is_judged(question: Question, module: str) -> bool:
    package = _package(module)
    return question.judges(package) if package else question.asked is None


def _package(module: str) -> str:
    """The package that a module belongs to; empty for other projects' modules."""
    known_modules: Mapping[str, Mapping[str, str]] = catalog.load("symbols")["modules"]
    return known_modules.get(module, {}).get("package", "")


def _first_wrong(files: Sequence[Mapping[str, Any]], facts: Facts) -> list[Finding]:
    """The cause in the file that Python would load; where it finds none, why not the first."""
    judged = [(_reports(row), row) for row in files]
    answers = [judge.judge(report, facts) for report, _ in judged if report]
    loaded = [row for row in answers if not row or row[0].problem.slug not in _WRONG_FILE]
    for answer in loaded or answers[:1]:
        return answer[:1]
    return []


def _reports(row: Mapping[str, Any]) -> Mapping[str, Any]:
    report: Mapping[str, Any] = row.get("binary") or {}
    return report if "format" in report else {}


@check(
    *("abi", "gpu-arch-not-in-binary"),
    about="the compiled modules have code for the GPU",
    unless=(*_NO_TORCH, *_FOUND_BY_JUDGE, "torch-is-cpu-only", "gpu-arch-not-in-torch"),
    needs=("extensions.modules",),
    packages=PACKAGES,
    of_use=True,
)
def gpu_code_in_modules(question: Question) -> Iterable[Finding]:
    """By the machine code and PTX in the files."""
    rows = []
    for name, module in question.facts.get("extensions.modules", {}).items():
        if not _is_judged(question, name):
            continue
        for file in module.get("files", []):
            report = _reports(file)
            answers = judge.judge(report, question.facts) if report else []
            rows += [row for row in answers if row.problem.slug == "gpu-arch-not-in-binary"]
    yield from merged(rows)


@check(
    *("abi", "ext-not-built"),
    about="each package has its compiled module",
    unless=("macos-unsupported", "no-cuda-machine", "torch-is-cpu-only", "import-shadowed"),
    needs=("extensions.modules",),
    of_use=True,
)
def module_present(question: Question) -> Iterable[Finding]:
    """The package is installed and its module is nowhere."""
    facts = question.facts
    for package in question.used:
        module = EXTENSIONS[package]
        row = facts.get("extensions.modules", {}).get(module) or {}
        if row.get("files") or package not in facts.get("packages.installed", {}):
            continue
        version = question.version(package)
        # A release that leaves it out on purpose still has what Triton runs.
        left_out = package == MAMBA and not known.builds_module(package, version)
        summary = f"{package} {version} is installed without its CUDA module {module}."
        evidence = ["this release builds it only with MAMBA_KEEP_CUDA_BUILD=TRUE"]
        yield finding(
            *(question, "ext-not-built", summary, evidence if left_out else ()),
            packages=[package],
            severity=Severity.WARNING if left_out else None,
        )


@check(
    *("abi", "extension-import-fails"),
    about="the compiled modules can be imported",
    unless=(
        *(*_NO_TORCH, *_FOUND_BY_JUDGE, "torch-is-cpu-only", "import-shadowed"),
        *("driver-too-old", "gpu-missing", "wsl-driver-missing"),
    ),
    needs=("extensions.modules",),
    packages=PACKAGES,
    of_use=True,
)
def modules_import(question: Question) -> Iterable[Finding]:
    """The import failed in the child process, and nothing else told why."""
    for name, module in question.facts.get("extensions.modules", {}).items():
        if not module.get("files") or module.get("importable") is not False:
            continue
        if _is_judged(question, name):
            package = _package(name)
            packages = [package] if package in ORIGINALS else []
            error = str(module.get("error", ""))
            yield failed_import(question, "extension-import-fails", name, error, packages)
