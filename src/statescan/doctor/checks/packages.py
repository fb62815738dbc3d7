# SPDX-License-Identifier: Apache-2.0
"""Checks of torch and of the packages beside it: there, whole, and not hidden by others.

Whether they fit each other is for ``abi`` and ``api``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statescan.doctor import catalog
from statescan.doctor.checks import known
from statescan.doctor.checks.base import (
    EXTENSIONS,
    MAMBA,
    MODULES,
    ORIGINALS,
    PACKAGES,
    STATESCAN,
    Question,
    check,
    fact_line,
    finding,
)
from statescan.doctor.model import Command, Facts, Finding, Fix, Severity

_NO_PLACE = ("macos-unsupported", "system-without-torch", "python-version-unsupported")
_BUILD_TOOLS = ("setuptools", "wheel", "packaging")


@check(
    *("packages", "torch-missing"),
    packages=PACKAGES,
    about="torch is installed",
    unless=(*_NO_PLACE, "no-cuda-machine"),
    needs=("torch.version", "packages.installed"),
)
def torch_present(question: Question) -> Iterable[Finding]:
    """No torch in this environment."""
    facts = question.facts
    rests = facts.get("torch.location") or "torch" in facts.get("packages.installed", {})
    if facts.get("torch.version") or rests:
        return
    summary = f"torch is not installed in {_environment(facts)}."
    yield finding(question, "torch-missing", summary, packages=question.judged)


@check(
    *("packages", "package-half-removed"),
    packages=PACKAGES,
    about="no package was removed by half",
    unless=("torch-missing",),
    needs=("packages.invalid",),
)
def half_removed(question: Question) -> Iterable[Finding]:
    """pip renames a package's folder to ~ame while it removes it, and back when it cannot."""
    facts = question.facts
    wanted = {"torch": "torch"} | {package: MODULES[package] for package in question.used}
    left = [
        (name, package)
        for name in facts.get("packages.invalid", [])
        for package, module in wanted.items()
        if _is_rest(str(name), package) or _is_rest(str(name), module)
    ]
    if not left:
        return
    broken = (facts.get("torch.import") or {}).get("ok") is False
    packages = list(dict.fromkeys(package for _, package in left))
    summary = f"An install of {' and '.join(packages)} was interrupted and left files behind."
    evidence = [f"left over in site-packages: {name}" for name, _ in left]
    if broken:
        evidence.append(f"import torch: {_last_line(facts.get('torch.import')['error'])}")
    yield finding(
        *(question, "package-half-removed", summary, evidence),
        packages=question.judged,
        severity=Severity.ERROR if broken else Severity.WARNING,
    )


def _is_rest(name: str, package: str) -> bool:
    """Whether "~orch" or "~orch-2.6.0.dist-info" is left of "torch"."""
    stem = name.removeprefix("~").lower().replace("-", "_")
    rest = package.lower().replace("-", "_")[1:]
    return name.startswith("~") and (stem == rest or stem.startswith(f"{rest}_"))


@check(
    *("packages", "torch-import-fails"),
    packages=PACKAGES,
    about="torch can be imported",
    unless=(*_NO_PLACE, "torch-missing", "package-half-removed:error"),
    values=("torch.import",),
)
def torch_imports(question: Question) -> Iterable[Finding]:
    """torch is there, and its import ends in an error."""
    facts = question.facts
    row = facts.get("torch.import") or {}
    if row.get("ok") is not False:
        return
    error = _last_line(row.get("error", ""))
    summary = f"torch {facts.get('torch.version', '')} is installed, and `import torch` fails."
    yield finding(
        *(question, "torch-import-fails", summary, [error] if error else []),
        packages=question.judged,
    )


@check(
    *("packages", "torch-too-old"),
    packages=(STATESCAN,),
    about=f"torch is at least {known.LEAST_TORCH}",
    unless=("torch-missing", "package-half-removed:error"),
    needs=("torch.version",),
)
def torch_age(question: Question) -> Iterable[Finding]:
    """Older than statescan's least."""
    facts = question.facts
    version = str(facts.get("torch.version", ""))
    if version and known.older(version, known.LEAST_TORCH):
        summary = f"torch {version} is installed, and statescan needs {known.LEAST_TORCH} or newer."
        evidence = [fact_line(facts, "torch.version", f"torch {version}")]
        yield finding(question, "torch-too-old", summary, evidence, packages=[STATESCAN])


@check(
    *("packages", "cuda-torch-on-amd"),
    packages=PACKAGES,
    about="torch is built for the make of GPU that is there",
    unless=("torch-missing", "package-half-removed:error", "torch-import-fails"),
    needs=("driver.amd",),
)
def torch_for_amd(question: Question) -> Iterable[Finding]:
    """An AMD GPU and no ROCm build of torch."""
    facts = question.facts
    amd = facts.get("driver.amd") or {}
    version = facts.get("torch.version")
    if not amd.get("gpus") or not version or facts.get("torch.hip") or known.gpus(facts):
        return
    if facts.get("system.os") != "linux":
        return
    gpus = ", ".join(amd["gpus"])
    summary = f"The GPU is an AMD {gpus}, and torch {version} is not built for ROCm."
    originals = [package for package in question.judged if package in ORIGINALS]
    yield finding(
        *(question, "cuda-torch-on-amd", summary),
        packages=question.judged,
        severity=Severity.ERROR if originals else Severity.WARNING,
        values={"found": str(amd.get("rocm") or "")},
    )


@check(
    *("packages", "torch-is-cpu-only"),
    packages=PACKAGES,
    about="torch is built for the NVIDIA GPU that is there",
    unless=(
        *("torch-missing", "package-half-removed:error", "macos-unsupported", "cuda-torch-on-amd"),
        "no-cuda-machine",
    ),
    needs=("torch.version",),
)
def torch_has_cuda(question: Question) -> Iterable[Finding]:
    """The originals cannot do with a CPU build; statescan leaves a GPU idle with it."""
    facts = question.facts
    version = facts.get("torch.version")
    if not version or facts.get("torch.cuda") or facts.get("torch.hip"):
        return
    if not question.knows("torch.cuda"):
        return
    originals = [package for package in question.judged if package in ORIGINALS]
    devices = known.gpus(facts)
    if not originals and not devices:
        return
    gpu = f"the {devices[0][0]} is not used" if devices else "no NVIDIA GPU is visible either"
    summary = f"torch {version} is a build without CUDA, and {gpu}."
    yield finding(
        *(question, "torch-is-cpu-only", summary),
        evidence=[fact_line(facts, "torch.cuda", "CUDA of this torch: none")],
        packages=originals or [STATESCAN],
        severity=Severity.ERROR if originals else Severity.WARNING,
        fix=None if originals else _FOR_STATESCAN,
        values={"cuda": _cuda_to_install(facts)},
    )


_FOR_STATESCAN = Fix(
    "Install a CUDA build of torch if the GPU is to be used; until then statescan runs on the CPU.",
    (
        Command(
            (
                *("python", "-m", "pip", "install", "--force-reinstall", "torch=={torch}"),
                *("--index-url", "https://download.pytorch.org/whl/{torch_tag}"),
            )
        ),
    ),
    safe=False,
    safety="Compiled modules of other packages that were built for the present torch may break.",
)


def _cuda_to_install(facts: Facts) -> str:
    """A CUDA that this torch was published for: the toolkit's or the driver's, else the newest."""
    row = catalog.load("pins")["torch"].get(known.minor(str(facts.get("torch.version", ""))), {})
    driver = str(facts.get("driver.cuda", ""))
    served = [cuda for cuda in row.get("cuda", []) if not driver or not known.newer(cuda, driver)]
    toolkit = str((facts.get("toolkit.build") or {}).get("version") or "")
    near = [cuda for cuda in served if known.major(cuda) == known.major(toolkit)]
    exact = [cuda for cuda in near if cuda == toolkit]
    return next(iter([*exact, *near[::-1], *served[::-1]]), "")


@check(
    *("packages", "import-shadowed"),
    packages=PACKAGES,
    about="no folder hides an installed package",
    unless=("macos-unsupported",),
    needs=("extensions.shadows",),
)
def shadows(question: Question) -> Iterable[Finding]:
    """A clone or a file in the current folder comes before site-packages."""
    modules = question.facts.get("extensions.modules", {})
    rows = [(row["module"], row["path"]) for row in question.facts.get("extensions.shadows", [])]
    rows += [
        (name, row["files"][0]["path"])
        for name, row in modules.items()
        if _is_hidden(row.get("files", []))
    ]
    owners = {**_OWNERS, "torch": question.judged}
    for module, path in rows:
        packages = [one for one in owners.get(module, ()) if question.judges(one)]
        if packages:
            summary = f"`import {module}` takes {path}, not the installed package."
            fix = _RENAME if module in ("torch", "triton") else None
            slug = "import-shadowed"
            yield finding(question, slug, summary, [path], packages=packages, fix=fix)
            return


_OWNERS: Mapping[str, tuple[str, ...]] = {
    **{MODULES[package]: (package,) for package in ORIGINALS},
    **{EXTENSIONS[package]: (package,) for package in ORIGINALS},
    "triton": (MAMBA,),
}
_RENAME = Fix(
    "Run from another folder, or give that file or folder another name.",
    (Command(("cd", "/"), note="or any folder without a file or folder of that name"),),
    safe=True,
    safety="Nothing is changed by running from another folder.",
)


def _is_hidden(files: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the first file found is of the current folder and an installed one comes later."""
    placed = [bool(file.get("in_site_packages")) for file in files]
    return bool(placed) and not placed[0] and any(placed)


@check(
    *("packages", "build-deps-missing"),
    about="what setup.py imports is installed, and ninja for a quick build",
    unless=(*_NO_PLACE, "torch-missing", "installer-missing", "no-cuda-machine"),
    needs=("packages.installed",),
    of_build=True,
)
def build_tools(question: Question) -> Iterable[Finding]:
    """Builds go without isolation, so these must be in the environment itself."""
    facts = question.facts
    installed = facts.get("packages.installed", {})
    missing = [name for name in _BUILD_TOOLS if name not in installed]
    slow = bool(question.compiled) and not (facts.get("compiler.ninja") or "ninja" in installed)
    if not (missing or slow):
        return
    if missing:
        names = ", ".join([*missing, *(["ninja"] if slow else [])])
        summary = f"A build without isolation lacks {names} in {_environment(facts)}."
    else:
        summary = "ninja is not installed, and without it a build compiles one file at a time."
    yield finding(
        *(question, "build-deps-missing", summary),
        packages=question.built,
        severity=Severity.ERROR if missing else Severity.WARNING,
    )


def _environment(facts: Facts) -> str:
    row = facts.get("python.environment") or {}
    return str(row.get("prefix") or facts.get("python.executable") or "this Python")


def _last_line(error: object) -> str:
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""
