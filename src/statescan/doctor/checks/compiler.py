# SPDX-License-Identifier: Apache-2.0
"""Checks of the host compiler and the headers that a build of the originals needs.

The CUDA compiler is a matter of ``toolkit``, a compiler for Triton of ``triton``.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor import releases
from statescan.doctor.checks import known
from statescan.doctor.checks.base import MAMBA, Question, check, fact_line, finding
from statescan.doctor.model import Facts, Finding

_NO_PLACE = ("no-cuda-machine", "macos-unsupported", "system-without-torch", "cuda-torch-on-amd")
_NO_TOOLKIT = ("cuda-home-wrong", "nvcc-missing", "nvcc-too-old")


@check(
    *("compiler", "host-compiler-missing"),
    about="there is a C++ compiler",
    unless=_NO_PLACE,
    needs=("compiler.cxx",),
    of_build=True,
)
def cxx_present(question: Question) -> Iterable[Finding]:
    """What CXX names, else c++ or g++."""
    facts = question.facts
    if not question.compiled or facts.get("system.os") == "windows":
        return
    row = facts.get("compiler.cxx") or {}
    if not row.get("path"):
        command = row.get("command") or "g++"
        summary = f"There is no C++ compiler: {command} is not found."
        evidence = [fact_line(facts, "compiler.cxx", f"{command}: not found")]
        slug = "host-compiler-missing"
        yield finding(question, slug, summary, evidence, packages=question.compiled)


@check(
    *("compiler", "gcc-too-old"),
    about="GCC is new enough for torch's headers and nvcc",
    unless=(*_NO_PLACE, "host-compiler-missing"),
    needs=("compiler.cxx",),
    of_build=True,
)
def gcc_age(question: Question) -> Iterable[Finding]:
    """torch needs C++17 of it."""
    facts = question.facts
    row = known.compiler_of(facts, "compiler.cxx")
    if not question.compiled or row.get("family") != "gcc":
        return
    torch = str(facts.get("torch.version", ""))
    least = releases.torch_min_gcc(torch) if torch else ""
    version = str(row.get("version", ""))
    if least and version and known.older(version, least):
        summary = f"{row['command']} is GCC {version}, and torch {torch} needs {least} or newer."
        evidence = [str(row["path"]), *_newer(facts, least)]
        yield finding(*(question, "gcc-too-old", summary, evidence), packages=question.compiled)


def _newer(facts: Facts, least: str) -> list[str]:
    """Compilers on PATH that would do."""
    return [
        f"on PATH as well: {row['command']} ({row['version']})"
        for row in facts.get("compiler.available", [])
        if row.get("family") == "gcc"
        and "++" in str(row.get("command"))
        and not known.older(str(row.get("version", "")), least)
    ]


@check(
    *("compiler", "gcc-too-new-for-nvcc"),
    about="nvcc accepts the GCC that it would call",
    unless=(*_NO_PLACE, *_NO_TOOLKIT, "host-compiler-missing", "nvcc-torch-cuda-mismatch"),
    needs=("compiler.cuda_host", "compiler.cxx"),
    of_build=True,
)
def gcc_for_nvcc(question: Question) -> Iterable[Finding]:
    """Each toolkit has a newest GCC."""
    facts = question.facts
    row = known.compiler_of(facts, "compiler.cuda_host") or known.compiler_of(facts, "compiler.cxx")
    nvcc = str((facts.get("toolkit.build") or {}).get("version") or "")
    if not question.compiled or row.get("family") != "gcc" or not nvcc:
        return
    _, newest = releases.gcc_bounds(nvcc)
    version = str(row.get("version", ""))
    if not known.newer(version, newest):
        return
    summary = f"{row['command']} is GCC {version}, and nvcc {nvcc} accepts up to GCC {newest}."
    older = [
        one
        for one in facts.get("compiler.available", [])
        if one.get("family") == "gcc"
        and "++" in str(one.get("command"))
        and not known.newer(str(one.get("version", "")), newest)
    ]
    evidence = [str(row["path"])]
    evidence += [f"on PATH as well: {one['command']} ({one['version']})" for one in older]
    yield finding(
        *(question, "gcc-too-new-for-nvcc", summary, evidence), packages=question.compiled
    )


@check(
    *("compiler", "python-headers-missing"),
    about="Python.h of this interpreter is there",
    unless=(*_NO_PLACE, "torch-missing", "torch-is-cpu-only"),
    needs=("python.headers",),
)
def python_headers(question: Question) -> Iterable[Finding]:
    """Builds need it, and so does Triton when a program runs."""
    facts = question.facts
    row = facts.get("python.headers") or {}
    runs_triton = MAMBA in question.used and facts.get("system.os") == "linux"
    packages = question.compiled or ((MAMBA,) if runs_triton else ())
    if row.get("present") is not False or not packages:
        return
    version = str(facts.get("python.version", ""))
    why = "" if question.compiled else ", which Triton compiles with when a program runs"
    summary = f"Python.h of Python {version} is not in {row.get('folder')}{why}."
    yield finding(
        *(question, "python-headers-missing", summary),
        evidence=[fact_line(facts, "python.headers", f"{row.get('folder')}/Python.h: not found")],
        packages=packages,
    )


@check(
    *("compiler", "msvc-missing"),
    about="Visual C++ is installed, on Windows",
    unless=_NO_PLACE,
    needs=("compiler.msvc",),
    of_build=True,
)
def msvc_present(question: Question) -> Iterable[Finding]:
    """No release was ever published for Windows, so every install compiles."""
    facts = question.facts
    if question.compiled and facts.get("system.os") == "windows" and not facts.get("compiler.msvc"):
        summary = "There is no Visual C++ compiler, and no wheel for Windows was ever published."
        yield finding(question, "msvc-missing", summary, packages=question.compiled)


@check(
    *("compiler", "msvc-too-new-for-nvcc"),
    about="nvcc accepts the Visual C++, on Windows",
    unless=(*_NO_PLACE, *_NO_TOOLKIT, "msvc-missing", "nvcc-torch-cuda-mismatch"),
    needs=("compiler.msvc",),
    of_build=True,
)
def msvc_for_nvcc(question: Question) -> Iterable[Finding]:
    """Each toolkit has a newest Visual C++."""
    facts = question.facts
    row = facts.get("compiler.msvc") or {}
    version = str(row.get("version") or "")
    nvcc = str((facts.get("toolkit.build") or {}).get("version") or "")
    if not question.compiled or not version or not nvcc:
        return
    _, newest = releases.msvc_bounds(nvcc)
    if known.newer(version, newest):
        summary = f"Visual C++ {version} is in use, and nvcc {nvcc} accepts up to {newest}."
        evidence = [str(row.get("path", ""))]
        yield finding(
            *(question, "msvc-too-new-for-nvcc", summary, evidence), packages=question.compiled
        )


@check(
    *("compiler", "msvc-code-portability"),
    packages=(MAMBA,),
    about="the sources compile with this compiler",
    unless=(*_NO_PLACE, "msvc-missing", "msvc-too-new-for-nvcc"),
    needs=("system.os",),
    of_build=True,
)
def sources_for_msvc(question: Question) -> Iterable[Finding]:
    """mamba-ssm's do not with Visual C++."""
    if question.facts.get("system.os") == "windows" and MAMBA in question.compiled:
        summary = "mamba-ssm's CUDA sources do not compile with Visual C++ as they are."
        yield finding(question, "msvc-code-portability", summary, packages=[MAMBA])


@check(
    *("compiler", "rocm-hip-compile"),
    about="ROCm is new enough for the sources",
    unless=_NO_PLACE,
    needs=("torch.hip",),
    of_build=True,
)
def hip_age(question: Question) -> Iterable[Finding]:
    """Their setup.py refuses ROCm before 6.0."""
    version = str(question.facts.get("torch.hip", ""))
    if question.compiled and version and known.older(version, "6.0"):
        summary = f"torch is built for ROCm {version}, and the originals need 6.0 or newer."
        yield finding(question, "rocm-hip-compile", summary, packages=question.compiled)
