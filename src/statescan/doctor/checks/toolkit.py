# SPDX-License-Identifier: Apache-2.0
"""Checks of the CUDA toolkit that a build of the originals would take, by torch's rules.

Its host compiler is a matter of ``compiler``; what its code is for, of ``gpu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from statescan.doctor import catalog
from statescan.doctor.checks import known
from statescan.doctor.checks.base import Question, check, fact_line, finding
from statescan.doctor.model import Command, Facts, Finding, Fix

_NO_PLACE = ("no-cuda-machine", "macos-unsupported", "system-without-torch", "cuda-torch-on-amd")
_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_HEADERS = ("cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h")
"""The sources include them, directly or by torch's headers.

Those of cuBLAS, cuSPARSE and cuSOLVER were needed by releases whose sources are not on PyPI.
"""


@check(
    *("toolkit", "cuda-home-wrong"),
    about="CUDA_HOME, where it is set, is the folder of a toolkit",
    unless=_NO_PLACE,
    needs=("toolkit.build",),
    of_build=True,
)
def cuda_home(question: Question) -> Iterable[Finding]:
    """It is taken without a look at PATH, whatever it says."""
    facts = question.facts
    build = _build(question)
    if build.get("via") not in _VARIABLES or build.get("nvcc"):
        return
    name, path = build["via"], str(build.get("path", ""))
    summary = f"{name} is {path}: {_why_wrong(path, build, facts)}."
    others = _others(facts, path)
    evidence = [f"{name}={path}", *(f"a toolkit: {home['path']}" for home in others)]
    slug = "cuda-home-wrong"
    fix = _use_another(question, slug, path)
    yield finding(question, slug, summary, evidence, packages=question.built, fix=fix)


def _why_wrong(path: str, build: Mapping[str, Any], facts: Facts) -> str:
    windows = facts.get("system.os") == "windows"
    if (";" if windows else ":") in path:
        return "a list of folders, and it must be one"
    if path.rstrip("/\\").endswith("bin"):
        return "it must be the folder above bin"
    if not build.get("exists"):
        return "there is no such folder"
    return "there is no bin/nvcc in it"


@check(
    *("toolkit", "nvcc-missing"),
    about="there is an nvcc, which setup.py of the originals asks for",
    unless=(*_NO_PLACE, "cuda-home-wrong"),
    needs=("toolkit.build",),
    of_build=True,
)
def nvcc_present(question: Question) -> Iterable[Finding]:
    """Without it their setup.py ends in an error, whether or not a wheel is published."""
    facts = question.facts
    build = _build(question)
    if build.get("nvcc") or facts.get("torch.hip"):
        return
    others = _others(facts, "")
    if others:
        home = others[0]["path"]
        summary = f"nvcc is not on PATH and CUDA_HOME is not set; there is a toolkit in {home}."
    else:
        summary = "There is no nvcc: not in CUDA_HOME, not on PATH, not in /usr/local/cuda."
    evidence = [f"no nvcc in {build['path']}"] if build.get("path") else []
    for package in question.built:
        wheel = known.published_wheel(facts, package)
        if wheel:
            evidence.append(f"published for this machine, and needs no nvcc as a file: {wheel}")
    slug = "nvcc-missing"
    fix = _use_another(question, slug, "")
    yield finding(question, slug, summary, evidence, packages=question.built, fix=fix)


@check(
    *("toolkit", "nvcc-too-old"),
    about=f"nvcc is at least {known.LEAST_NVCC}",
    unless=(*_NO_PLACE, "cuda-home-wrong", "nvcc-missing"),
    needs=("toolkit.build",),
    of_build=True,
)
def nvcc_age(question: Question) -> Iterable[Finding]:
    """The one in use, by CUDA_HOME or as the first on PATH."""
    facts = question.facts
    build = _build(question)
    version = str(build.get("version") or "")
    if not version or not known.older(version, known.LEAST_NVCC):
        return
    summary = (
        f"A build takes nvcc {version} of {build['path']}, and the originals need "
        f"{known.LEAST_NVCC} or newer."
    )
    slug, packages = "nvcc-too-old", question.built
    evidence = [_found_by(build), *_every_nvcc(facts)]
    fix = _use_another(question, slug, str(build["path"]))
    yield finding(question, slug, summary, evidence, packages=packages, fix=fix)


@check(
    *("toolkit", "nvcc-torch-cuda-mismatch"),
    about="nvcc and torch are of the same CUDA major version",
    unless=(*_NO_PLACE, "cuda-home-wrong", "nvcc-missing", "nvcc-too-old", "torch-is-cpu-only"),
    needs=("toolkit.build",),
    of_build=True,
)
def nvcc_major(question: Question) -> Iterable[Finding]:
    """torch refuses to build with another major version; another minor one is fine."""
    facts = question.facts
    build, cuda = _build(question), str(facts.get("torch.cuda", ""))
    version = str(build.get("version") or "")
    if not question.compiled or not version or not cuda:
        return
    if known.major(version) == known.major(cuda):
        return
    torch = facts.get("torch.version", "")
    summary = (
        f"A build takes nvcc {version} of {build['path']}, and torch {torch} is built for "
        f"CUDA {cuda}."
    )
    slug, packages = "nvcc-torch-cuda-mismatch", question.compiled
    evidence = [_found_by(build), *_every_nvcc(facts)]
    fix = _use_another(question, slug, str(build["path"]))
    yield finding(question, slug, summary, evidence, packages=packages, fix=fix)


@check(
    *("toolkit", "cuda-headers-missing"),
    about="the toolkit has the headers that the sources and torch include",
    unless=(*_NO_PLACE, "cuda-home-wrong", "nvcc-missing", "nvcc-too-old"),
    needs=("toolkit.build",),
    of_build=True,
)
def cuda_headers(question: Question) -> Iterable[Finding]:
    """cuda-nvcc of conda is a compiler without them."""
    home = _home(question)
    headers = home.get("headers") or {}
    missing = [name for name in _HEADERS if headers.get(name) is False]
    if question.compiled and missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        summary = f"The toolkit in {home['path']} has no {shown}."
        slug = "cuda-headers-missing"
        evidence = [f"missing: {', '.join(missing)}"]
        fix = _use_another(question, slug, home["path"])
        yield finding(question, slug, summary, evidence, packages=question.compiled, fix=fix)


@check(
    *("toolkit", "cuda-lib-link-missing"),
    about="the toolkit has the libraries to link with",
    unless=(
        *(*_NO_PLACE, "cuda-home-wrong", "nvcc-missing", "nvcc-too-old", "cuda-headers-missing"),
        "nvcc-torch-cuda-mismatch",
    ),
    needs=("toolkit.build",),
    of_build=True,
)
def cuda_libraries(question: Question) -> Iterable[Finding]:
    """-lcudart is looked for in the toolkit."""
    home = _home(question)
    libraries = home.get("libraries") or {}
    if question.compiled and "cudart" in libraries and not libraries["cudart"]:
        summary = f"The toolkit in {home['path']} has no libcudart to link with."
        slug = "cuda-lib-link-missing"
        fix = _use_another(question, slug, home["path"])
        yield finding(question, slug, summary, packages=question.compiled, fix=fix)


def _build(question: Question) -> Mapping[str, Any]:
    """The toolkit of a build; empty where there is none, and for ROCm."""
    if question.facts.get("torch.hip"):
        return {}
    build: Mapping[str, Any] = question.facts.get("toolkit.build") or {}
    return build


def _home(question: Question) -> Mapping[str, Any]:
    """What is known of the folder of that toolkit."""
    path = _build(question).get("path")
    homes = question.facts.get("toolkit.homes", [])
    return next((home for home in homes if home.get("path") == path), {}) if path else {}


def _others(facts: Facts, path: str) -> list[Mapping[str, Any]]:
    """Whole toolkits beside that one, those of torch's CUDA major version first."""
    homes = [
        home
        for home in facts.get("toolkit.homes", [])
        if home.get("nvcc") and home.get("path") != path and is_whole(home)
    ]
    major = known.major(str(facts.get("torch.cuda", "")))
    return sorted(homes, key=lambda home: known.major(str(home.get("version") or "")) != major)


def is_whole(home: Mapping[str, Any]) -> bool:
    """Whether nothing of a toolkit is known to be missing that a build includes or links."""
    headers = home.get("headers") or {}
    libraries = home.get("libraries") or {"cudart": True}
    return all(headers.get(name) is not False for name in _HEADERS) and bool(libraries["cudart"])


def _use_another(question: Question, slug: str, path: str) -> Fix | None:
    """The fix where a toolkit that would do is on this machine already; None where none is."""
    facts = question.facts
    cuda = str(facts.get("torch.cuda", ""))
    fitting = [
        home
        for home in _others(facts, path)
        if not cuda or known.major(str(home.get("version") or "")) == known.major(cuda)
    ]
    if not fitting:
        return None
    home = str(fitting[0]["path"])
    fix = catalog.problem(slug).fix
    return Fix(
        f"Let CUDA_HOME name {home}, the CUDA {fitting[0].get('version')} toolkit that is there.",
        (
            Command(set={"CUDA_HOME": home}, prepend={"PATH": "$CUDA_HOME/bin"}),
            Command(("nvcc", "-V"), note=f"must print release {fitting[0].get('version')}"),
            # The last step of all these fixes is the install itself.
            fix.commands[-1],
        ),
        safe=True,
        safety="The variables hold in this shell only, and only this package is installed.",
    )


def _found_by(build: Mapping[str, Any]) -> str:
    return f"{build.get('nvcc')}, taken by {build.get('via')}"


def _every_nvcc(facts: Facts) -> list[str]:
    """Every nvcc on PATH with its version, where there is more than one."""
    rows = facts.get("toolkit.nvcc_on_path", [])
    if len(rows) < 2:
        return []
    listed = ", ".join(f"{row['path']} ({row.get('version')})" for row in rows)
    return [fact_line(facts, "toolkit.nvcc_on_path", f"on PATH in this order: {listed}")]
