# SPDX-License-Identifier: Apache-2.0
"""Checks of what Triton needs when a program of mamba-ssm runs: itself, a C compiler, libcuda.

statescan's backends do without Triton, so none of this concerns it.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor import catalog
from statescan.doctor.checks import known
from statescan.doctor.checks.base import MAMBA, Question, check, finding
from statescan.doctor.model import Facts, Finding, Severity

_NO_GPU = (
    "no-cuda-machine",
    *("macos-unsupported", "torch-missing", "package-half-removed:error", "torch-import-fails"),
    *("torch-is-cpu-only", "system-without-torch", "cuda-torch-on-amd"),
)
_NAMES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
_LEAST_GCC = "5"
"""What Triton writes is C99, which GCC takes without being told from 5 on."""
_LINKS_BY_FILE = "3.3"
"""From this Triton on libcuda.so.1 is linked by its own name."""


@check(
    *("triton", "triton-missing"),
    packages=(MAMBA,),
    about="Triton is installed for mamba-ssm",
    unless=_NO_GPU,
    needs=("packages.installed",),
    of_use=True,
)
def triton_present(question: Question) -> Iterable[Finding]:
    """mamba_ssm imports it; an install with --no-deps on Windows comes without."""
    if MAMBA in question.used and not _version(question.facts):
        version = question.version(MAMBA)
        summary = f"mamba-ssm {version} imports Triton, which is not installed."
        yield finding(question, "triton-missing", summary, packages=[MAMBA])


@check(
    *("triton", "triton-version"),
    packages=(MAMBA,),
    about="Triton fits torch and mamba-ssm",
    unless=(*_NO_GPU, "triton-missing"),
    needs=("packages.installed",),
    of_use=True,
)
def triton_version(question: Question) -> Iterable[Finding]:
    """Older than the release needs, or another one than torch brings."""
    facts = question.facts
    triton, torch = _version(facts), str(facts.get("torch.version", ""))
    if not triton or MAMBA not in question.used:
        return
    mamba = question.version(MAMBA)
    release = known.release(MAMBA, mamba)
    least = known.triton_min(release) if release else ""
    expected = catalog.load("pins")["torch"].get(known.minor(torch), {}).get("triton", "")
    if least and known.older(triton, least):
        summary = f"Triton {triton} is installed, and mamba-ssm {mamba} needs {least} or newer."
        yield finding(question, "triton-version", summary, packages=[MAMBA])
    elif _is_release(torch) and expected and known.minor(triton) != expected:
        summary = f"Triton {triton} is installed, and torch {torch} comes with {expected}."
        yield finding(
            *(question, "triton-version", summary), packages=[MAMBA], severity=Severity.WARNING
        )


@check(
    *("triton", "triton-host-compiler"),
    packages=(MAMBA,),
    about="a C compiler is there when Triton runs",
    unless=(*_NO_GPU, "host-compiler-missing", "gcc-too-old", "msvc-missing"),
    needs=("compiler.c",),
)
def triton_compiler(question: Question) -> Iterable[Finding]:
    """None, or one of the time before C99 was usual."""
    facts = question.facts
    if facts.get("system.os") == "windows":
        return
    row = facts.get("compiler.c") or {}
    if not row.get("path"):
        wanted = row.get("command") or "gcc"
        summary = f"Triton compiles a C file when a program runs, and there is no {wanted}."
        yield finding(question, "triton-host-compiler", summary, packages=[MAMBA])
    elif row.get("family") == "gcc" and known.older(str(row.get("version", "")), _LEAST_GCC):
        summary = f"Triton writes C99, which {row['command']} {row['version']} refuses."
        yield finding(question, "triton-host-compiler", summary, [row["path"]], packages=[MAMBA])


@check(
    *("triton", "triton-libcuda-missing"),
    packages=(MAMBA,),
    about="the linker finds libcuda for Triton",
    unless=(*_NO_GPU, "wsl-driver-missing", "gpu-missing", "triton-missing", "triton-version"),
    needs=("driver.link_name",),
)
def triton_libcuda(question: Question) -> Iterable[Finding]:
    """Old releases link with -lcuda, for which there must be a libcuda.so."""
    facts = question.facts
    fact = facts.fact("driver.link_name")
    triton, library = _version(facts), facts.get("driver.library")
    if fact is None or fact.value is not False or not triton or not library:
        return
    if known.older(triton, _LINKS_BY_FILE) and facts.get("system.os") == "linux":
        summary = f"Triton {triton} links with -lcuda, and there is no libcuda.so beside {library}."
        yield finding(question, "triton-libcuda-missing", summary, packages=[MAMBA])


def _version(facts: Facts) -> str:
    installed = facts.get("packages.installed", {})
    rows = [installed[name] for name in _NAMES if name in installed]
    return str(rows[0].get("version") or "") if rows else ""


def _is_release(torch: str) -> bool:
    """Builds between releases and of NVIDIA's containers bring a Triton of their own."""
    return torch.partition("+")[0].replace(".", "").isdigit()
