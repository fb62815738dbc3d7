# SPDX-License-Identifier: Apache-2.0
"""Checks of driver and GPUs against torch, and against what a build of the originals would hold.

Code in modules that exist already is judged in ``abi``.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor import catalog, releases
from statescan.doctor.checks import known
from statescan.doctor.checks.base import (
    ORIGINALS,
    PACKAGES,
    Question,
    check,
    fact_line,
    finding,
)
from statescan.doctor.model import Facts, Finding, Severity
from statescan.doctor.symbols.findings import numbers

_NO_CUDA = (
    "no-cuda-machine",
    *("torch-missing", "package-half-removed:error", "torch-import-fails", "macos-unsupported"),
    *("torch-is-cpu-only", "cuda-torch-on-amd", "system-without-torch"),
)


@check(
    *("gpu", "driver-too-old"),
    packages=PACKAGES,
    about="the driver serves torch's CUDA",
    unless=_NO_CUDA,
    needs=("driver.version", "driver.cuda"),
)
def driver_age(question: Question) -> Iterable[Finding]:
    """A driver serves every CUDA of its major version, and older ones."""
    facts = question.facts
    cuda, serves = str(facts.get("torch.cuda", "")), str(facts.get("driver.cuda", ""))
    version = str(facts.get("driver.version", ""))
    if not cuda or not (serves or version):
        return
    if serves:
        old = int(known.major(serves)) < int(known.major(cuda))
        why = f"it serves CUDA up to {serves}"
    else:
        least = releases.driver_for_cuda(cuda, str(facts.get("system.os", "linux")))
        old, why = known.older(version, str(least)), f"CUDA {cuda} needs {least}"
    if old:
        torch = facts.get("torch.version", "")
        summary = f"The driver {version} is too old for torch {torch} with CUDA {cuda}: {why}."
        evidence = [fact_line(facts, "driver.version", f"driver {version}")]
        originals = [package for package in question.judged if package in ORIGINALS]
        values = {"cuda": _older_cuda(facts, serves)}
        yield finding(
            *(question, "driver-too-old", summary, evidence),
            packages=question.judged,
            # statescan runs on the CPU until then.
            severity=None if originals else Severity.WARNING,
            values=values,
        )


def _older_cuda(facts: Facts, serves: str) -> str:
    """A CUDA of the driver's major that this torch was published for as well."""
    row = catalog.load("pins")["torch"].get(known.minor(str(facts.get("torch.version", ""))), {})
    fitting = [cuda for cuda in row.get("cuda", []) if known.major(cuda) == known.major(serves)]
    return fitting[-1] if fitting else serves


@check(
    *("gpu", "gpu-arch-not-in-torch"),
    packages=PACKAGES,
    about="torch has code for the GPU",
    unless=(*_NO_CUDA, "driver-too-old"),
    needs=("driver.gpus", "torch.devices"),
)
def torch_code(question: Question) -> Iterable[Finding]:
    """By torch's list of architectures, else by the CUDA that it is built with."""
    facts = question.facts
    if not facts.get("torch.cuda"):
        return
    lost, held = known.torch_lacks(facts)
    if not lost:
        return
    name, number = lost[0]
    capability = known.capability(number)
    summary = (
        f"torch {facts.get('torch.version')} has no code for the {name} "
        f"(compute capability {capability}); it has {held}."
    )
    tag = _cuda_for(number)
    yield finding(
        *(question, "gpu-arch-not-in-torch", summary),
        packages=question.judged,
        severity=None if len(lost) == len(known.gpus(facts)) else Severity.WARNING,
        values={"sm": f"{number[0]}{number[1]}", "cuda": tag, "torch": _torch_for(facts, tag)},
    )


def _cuda_for(gpu: tuple[int, int]) -> str:
    """The CUDA of torch's builds that has code for a GPU, of CUDA 12 where there is one."""
    fitting = [
        cuda
        for cuda, (low, high) in catalog.load("pins")["torch_gpus"].items()
        if numbers(low) <= gpu <= numbers(high)
    ]
    twelve = [cuda for cuda in fitting if cuda.startswith("12.")]
    wanted = [cuda for cuda in ("12.8", "12.6") if cuda in twelve]
    return (wanted or twelve or fitting or [""])[0]


def _torch_for(facts: Facts, cuda: str) -> str:
    """The installed torch where it was published for that CUDA, else the oldest that was."""
    table = catalog.load("pins")["torch"]
    mine = known.minor(str(facts.get("torch.version", "")))
    fitting = [minor for minor, row in table.items() if cuda in row["cuda"]]
    if not fitting:
        return ""
    return str(table[mine if mine in fitting else min(fitting, key=numbers)]["patch"])


@check(
    *("gpu", "gpu-not-usable"),
    packages=PACKAGES,
    about="torch can use the GPU that the driver shows",
    unless=(*_NO_CUDA, "driver-too-old", "gpu-arch-not-in-torch"),
    values=("torch.cuda_available",),
)
def torch_sees_gpu(question: Question) -> Iterable[Finding]:
    """The driver shows a GPU and torch does not, and nobody hid it."""
    facts = question.facts
    devices = facts.get("driver.gpus", [])
    fact = facts.fact("torch.cuda_available")
    if not devices or fact is None or fact.value is not False or not facts.get("torch.cuda"):
        return
    if _hidden(facts):
        return
    summary = (
        f"torch {facts.get('torch.version')} sees no GPU, "
        f"and the driver {facts.get('driver.version', '')} shows {devices[0]['name']}."
    )
    originals = [package for package in question.judged if package in ORIGINALS]
    yield finding(
        *(question, "gpu-not-usable", summary),
        evidence=["torch.cuda.is_available() is False"],
        packages=question.judged,
        severity=None if originals else Severity.WARNING,
    )


@check(
    *("gpu", "no-cuda-machine"),
    about="this is a machine for CUDA at all",
    unless=("macos-unsupported", "system-without-torch"),
    needs=("driver.gpus", "torch.devices"),
)
def cuda_machine(question: Question) -> Iterable[Finding]:
    """No GPU, no driver, no nvcc: then what else a build lacks does not matter."""
    facts = question.facts
    if not question.knows("driver.gpus", "driver.library", "toolkit.build", "toolkit.homes"):
        return
    homes = [home for home in facts.get("toolkit.homes", []) if home.get("nvcc")]
    driver = facts.get("driver.library") or facts.get("driver.version")
    build = facts.get("toolkit.build") or {}
    if known.gpus(facts) or driver or homes or build.get("nvcc"):
        return
    amd = (facts.get("driver.amd") or {}).get("gpus")
    if amd or facts.get("torch.hip") or facts.get("system.wsl"):
        return
    torch, cuda = facts.get("torch.version"), facts.get("torch.cuda")
    # A GPU may be passed into a container; a torch for CUDA says that this is meant.
    if cuda and facts.get("system.container"):
        return
    wanted = [package for package in question.judged if package in ORIGINALS]
    summary = f"No NVIDIA GPU, driver or nvcc is here, and {_need(wanted)} NVIDIA GPUs."
    evidence = [f"torch {torch} is a build without CUDA"] if torch and not cuda else []
    yield finding(*(question, "no-cuda-machine", summary, evidence), packages=wanted)


def _need(packages: list[str]) -> str:
    return f"{' and '.join(packages)} {'needs' if len(packages) == 1 else 'need'}"


@check(
    *("gpu", "gpu-missing"),
    about="an NVIDIA GPU is visible",
    unless=(
        *("no-cuda-machine", "macos-unsupported", "system-without-torch", "cuda-torch-on-amd"),
        *("torch-is-cpu-only", "wsl-driver-missing", "driver-too-old", "gpu-not-usable"),
    ),
    needs=("driver.gpus", "torch.devices"),
)
def gpu_present(question: Question) -> Iterable[Finding]:
    """The originals compute on nothing else; building them is possible without one."""
    facts = question.facts
    if facts.get("torch.hip") or (known.gpus(facts) and not _hidden(facts)):
        return
    wanted = [package for package in question.judged if package in ORIGINALS]
    if _hidden(facts):
        value = facts.get("environment.variables", {}).get("CUDA_VISIBLE_DEVICES", "")
        reason = f"CUDA_VISIBLE_DEVICES={value!r} hides them all"
    elif facts.get("driver.library") or facts.get("driver.version"):
        reason = "there is a driver, and it shows none"
    elif facts.get("system.container"):
        reason = "this container was started without GPUs"
    else:
        reason = "there is no NVIDIA driver"
    verb = "runs" if len(wanted) == 1 else "run"
    summary = (
        f"No NVIDIA GPU is visible ({reason}), and {' and '.join(wanted)} {verb} on nothing else."
    )
    yield finding(*(question, "gpu-missing", summary), packages=wanted, severity=Severity.WARNING)


def _hidden(facts: Facts) -> bool:
    """Whether the user took the GPUs away from programs of this shell."""
    variables = facts.get("environment.variables", {})
    return variables.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "none", "NoDevFiles")


@check(
    *("gpu", "gpu-arch-not-in-binary", "nvcc-arch-unsupported"),
    about="an install of the release that fits would hold code for the GPU",
    unless=(*_NO_CUDA, "gpu-arch-not-in-torch", "nvcc-missing", "cuda-home-wrong", "nvcc-too-old"),
    needs=("toolkit.build",),
    of_build=True,
)
def code_of_an_install(question: Question) -> Iterable[Finding]:
    """The originals name their architectures themselves, without PTX for later GPUs."""
    facts = question.facts
    build = facts.get("toolkit.build") or {}
    devices = known.gpus(facts)
    if question.has_found("gpu-arch-not-in-binary"):
        return
    for package in question.built:
        compiled = package in question.compiled
        cuda = str(facts.get("torch.cuda", ""))
        nvcc = str(build.get("version") or "") if compiled else known.wheel_nvcc(cuda)
        release = known.fitting(facts, package)
        archs = release.cubins(nvcc) if nvcc else []
        lost = known.lacking(archs, devices) if archs else []
        if not lost:
            continue
        name, number = lost[0]
        capability = known.capability(number)
        gpu = f"the {name} (compute capability {capability})"
        evidence = [f"nvcc {nvcc} in {build.get('path')}"] if compiled else []
        asked = facts.get("environment.variables", {}).get("TORCH_CUDA_ARCH_LIST")
        if asked:
            evidence.append(f"TORCH_CUDA_ARCH_LIST={asked} is ignored by these packages")
        if compiled and not known.nvcc_knows(nvcc, number):
            slug, severity = "nvcc-arch-unsupported", Severity.ERROR
            summary = f"nvcc {nvcc} makes no code for {gpu}."
        else:
            older = known.older_with_code(package, nvcc, number)
            slug, severity = "gpu-arch-not-in-binary", Severity.WARNING if older else Severity.ERROR
            kind = "is built" if compiled else "has a wheel"
            summary = f"{package} {release.version} {kind} for {', '.join(archs)}; not for {gpu}."
            evidence += [f"{package} {older} is the last one with code for it"] if older else []
        yield finding(
            *(question, slug, summary, evidence),
            packages=[package],
            severity=severity,
            values={
                "sm": f"{number[0]}{number[1]}",
                "needed": capability,
                "found": ", ".join(archs),
            },
        )
        return
