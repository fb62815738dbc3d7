# SPDX-License-Identifier: Apache-2.0
"""Checks of the originals against each other and against the Python packages that they import.

Compiled code is the matter of ``abi``.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor import catalog
from statescan.doctor.checks import known
from statescan.doctor.checks.base import CONV, MAMBA, MODULES, Question, check, finding
from statescan.doctor.checks.fixes import convolution_for
from statescan.doctor.checks.import_errors import failed_import
from statescan.doctor.model import Finding, Severity

_BROKEN = (
    "no-cuda-machine",
    *("torch-missing", "package-half-removed:error", "torch-import-fails", "macos-unsupported"),
    *("torch-is-cpu-only", "import-shadowed", "ext-not-built", "extension-import-fails"),
    *("binary-damaged", "wheel-tag-mismatch", "wheel-wrong-cpu-arch", "glibc-too-old"),
    *("libstdcxx-too-old", "cudart-missing", "library-missing", "cxx11-abi-mismatch"),
    *("torch-abi-mismatch", "symbol-missing"),
)
"""After these an import fails for a reason that is told already."""
_WITHOUT_OLD_NAMES = "2.3.0"
"""The first mamba-ssm that does without the names that transformers 5 removed."""


@check(
    *("api", "cc1d-too-old-for-mamba", "cc1d-api-mismatch"),
    packages=(MAMBA,),
    about="mamba-ssm calls causal-conv1d as the installed one wants to be called",
    needs=("packages.installed",),
    of_use=True,
)
def generations(question: Question) -> Iterable[Finding]:
    """By the number of arguments of causal_conv1d_fwd."""
    versions = {package: question.version(package) for package in (MAMBA, CONV)}
    rows = {package: known.release(package, version) for package, version in versions.items()}
    mamba, conv = rows[MAMBA], rows[CONV]
    if mamba is None or conv is None or mamba.conv_generation == conv.conv_generation:
        return
    evidence = [
        f"mamba-ssm {versions[MAMBA]} passes {mamba.conv_generation} arguments",
        f"causal-conv1d {versions[CONV]} takes {conv.conv_generation}",
    ]
    pair = f"causal-conv1d {versions[CONV]} and mamba-ssm {versions[MAMBA]}"
    if mamba.conv_generation == 8:
        slug = "cc1d-too-old-for-mamba"
        summary = f"{pair} do not fit: mamba-ssm silently goes without the convolution's kernel."
    else:
        slug = "cc1d-api-mismatch"
        summary = f"{pair} do not fit: the call of the convolution's kernel fails."
    fix = convolution_for(mamba, catalog.problem(slug).fix)
    yield finding(question, slug, summary, evidence, packages=[MAMBA, CONV], fix=fix)


@check(
    *("api", "cc1d-missing"),
    packages=(MAMBA,),
    about="causal-conv1d is there for mamba-ssm",
    needs=("packages.installed",),
    unless=("macos-unsupported", "no-cuda-machine", "torch-is-cpu-only", "torch-missing"),
    of_use=True,
)
def convolution(question: Question) -> Iterable[Finding]:
    """Mamba-1 goes without it, slowly; Mamba-2 does not."""
    if MAMBA not in question.used or question.installed(CONV):
        return
    summary = (
        f"mamba-ssm {question.version(MAMBA)} is installed without causal-conv1d: "
        "Mamba-1 runs more slowly, Mamba-2 fails at its first call."
    )
    yield finding(*(question, "cc1d-missing", summary), packages=[MAMBA], severity=Severity.WARNING)


@check(
    *("api", "transformers-api-removed"),
    packages=(MAMBA,),
    about="transformers still has the names that mamba-ssm imports",
    needs=("packages.installed",),
    of_use=True,
)
def transformers_names(question: Question) -> Iterable[Finding]:
    """transformers 5 removed what releases before 2.3.0 import."""
    mamba = question.version(MAMBA)
    transformers = question.version("transformers")
    if not mamba or not transformers or not known.older(mamba, _WITHOUT_OLD_NAMES):
        return
    if not known.older(transformers, "5"):
        summary = f"mamba-ssm {mamba} imports names that transformers {transformers} removed."
        yield finding(question, "transformers-api-removed", summary, packages=[MAMBA])


@check(
    *("api", "mamba3-deps"),
    packages=(MAMBA,),
    about="the packages that Mamba-3 needs fit each other",
    needs=("packages.installed",),
    of_use=True,
)
def mamba3_packages(question: Question) -> Iterable[Finding]:
    """tilelang 0.1.8 does not work with a later tvm-ffi than it was made with."""
    mamba = question.version(MAMBA)
    tilelang, ffi = question.version("tilelang"), question.version("apache-tvm-ffi")
    if not mamba or known.older(mamba, "2.3.1") or not tilelang or not ffi:
        return
    if not known.newer(tilelang, "0.1.8") and not known.older(ffi, "0.1.10"):
        summary = f"tilelang {tilelang} does not work with apache-tvm-ffi {ffi}."
        yield finding(question, "mamba3-deps", summary, packages=[MAMBA])


@check(
    *("api", "package-import-fails"),
    about="mamba_ssm and causal_conv1d can be imported",
    unless=(*_BROKEN, "transformers-api-removed", "mamba3-deps", "triton-missing"),
    values=("extensions.python",),
    of_use=True,
)
def packages_import(question: Question) -> Iterable[Finding]:
    """The import failed in the child process, and nothing else told why."""
    for package in question.used:
        row = question.facts.get("extensions.python", {}).get(MODULES[package]) or {}
        if row.get("importable") is False:
            error = str(row.get("error", ""))
            slug = "package-import-fails"
            yield failed_import(question, slug, MODULES[package], error, [package])


@check(
    *("api", "package-not-usable"),
    about="mamba-ssm and causal-conv1d compute",
    unless=(
        *(*_BROKEN, "package-import-fails", "cc1d-too-old-for-mamba", "cc1d-api-mismatch"),
        *("cc1d-missing", "transformers-api-removed", "mamba3-deps", "gpu-missing"),
        *("wsl-driver-missing", "gpu-not-usable", "driver-too-old", "gpu-arch-not-in-torch"),
        *("gpu-arch-not-in-binary", "triton-missing", "triton-version", "triton-host-compiler"),
        *("triton-libcuda-missing", "python-headers-missing"),
    ),
    values=("extensions.python",),
    of_use=True,
)
def packages_compute(question: Question) -> Iterable[Finding]:
    """Their test computations failed on a GPU that torch uses."""
    if not question.facts.get("torch.cuda_available"):
        return
    for package in question.used:
        row = question.facts.get("extensions.python", {}).get(MODULES[package]) or {}
        wrong = {name: why for name, why in (row.get("usable") or {}).items() if why != "ok"}
        if row.get("importable") and wrong:
            summary = f"{package} can be imported, and {', '.join(wrong)} does not compute."
            evidence = [f"{name}: {why}" for name, why in wrong.items()]
            yield finding(question, "package-not-usable", summary, evidence, packages=[package])
