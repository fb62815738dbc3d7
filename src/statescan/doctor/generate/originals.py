# SPDX-License-Identifier: Apache-2.0
"""How the originals are built: their install commands, what these need, compiler and jobs.

Which releases is ``pairs``'s decision; where they are built (image, conda) is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statescan.doctor import catalog, releases
from statescan.doctor.generate import pairs
from statescan.doctor.generate.choice import Choice, number
from statescan.doctor.generate.target import Target
from statescan.doctor.model import Command

GB_PER_JOB = 6
"""nvcc compiles four architectures of a file at once (--threads 4), 1.5 GB or so for each."""
RUNNER_JOBS = 2
"""For 16 GB and four cores: a hosted runner, or a machine of which nothing is known."""
OLD_TORCH = (2, 3)
"""Before it torch was compiled against NumPy 1 and read names that setuptools and others lost."""


@dataclass(frozen=True)
class Source:
    """One of the originals, built from its source distribution.

    Attributes:
        package: Name as pip knows it.
        version: Release.
        command: The install command with its variables.
    """

    package: str
    version: str
    command: Command


@dataclass(frozen=True)
class Build:
    """All that a build of the originals consists of; nothing of it for statescan.

    Attributes:
        sources: In the order of their installs.
        tools: Requirements of their setup.py.
        extras: Requirements of their modules at run time, beside torch.
        gcc: Major version of the host compiler.
        jobs: Compilers at once.
        rows: The decisions.
    """

    sources: tuple[Source, ...]
    tools: tuple[str, ...]
    extras: tuple[str, ...]
    gcc: str
    jobs: int
    rows: tuple[Choice, ...]


def build(package: str, target: Target, on_runner: bool) -> Build:
    """The build of a package for a target without open fields.

    Args:
        package: mamba-ssm or causal-conv1d.
        target: One that ``matrix.fit`` found.
        on_runner: The build runs on a hosted runner and not on the target's machine.
    """
    chosen = pairs.choose(package, target.torch, target.python, target.cuda, target.gpus)
    jobs, jobs_row = _jobs(target, on_runner)
    gcc, gcc_row = _gcc(target)
    tools, extras, requirement_rows = _requirements(package, target)
    rows = [Choice(one.package, one.version, one.why) for one in chosen]
    rows += _added_codes(chosen, target)
    return Build(
        sources=tuple(
            Source(one.package, one.version, _install(one, target, jobs)) for one in chosen
        ),
        tools=tools,
        extras=extras,
        gcc=gcc,
        jobs=jobs,
        rows=(*rows, *requirement_rows, jobs_row, gcc_row),
    )


def _install(one: pairs.Chosen, target: Target, jobs: int) -> Command:
    """pip's command for one original, against the torch that is already there."""
    env = {"MAX_JOBS": str(jobs), one.release.force_variable: "TRUE"}
    keep = releases.variables(one.package).get("keep")
    if keep:
        # Newer trees leave selective_scan_cuda out without it.
        env[keep] = "TRUE"
    flags = [
        f"-gencode arch=compute_{code},code=sm_{code}"
        for code in pairs.missing_codes(one.release, target.cuda, target.gpus)
    ]
    if flags:
        env["NVCC_APPEND_FLAGS"] = " ".join(flags)
    options = ("--no-build-isolation", "--no-deps", "--no-cache-dir")
    return Command(("pip", "install", *options, f"{one.package}=={one.version}"), env=env)


def _added_codes(chosen: tuple[pairs.Chosen, ...], target: Target) -> list[Choice]:
    codes = {
        code
        for one in chosen
        for code in pairs.missing_codes(one.release, target.cuda, target.gpus)
    }
    why = "the release has no code for this GPU, and TORCH_CUDA_ARCH_LIST is ignored by its setup"
    return [Choice("NVCC_APPEND_FLAGS", f"sm_{code}", why) for code in sorted(codes)]


def _requirements(
    package: str, target: Target
) -> tuple[tuple[str, ...], tuple[str, ...], list[Choice]]:
    pins = catalog.load("pins")
    old = pins["before_torch_2.3"] if number(target.torch) < OLD_TORCH else {}
    tools = _pinned(pins["build"], old)
    run = pins["run"] if package == "mamba-ssm" else {}
    numpy = {"numpy": old["numpy"]} if old else {}
    extras = _pinned({**run, **numpy}, old)
    rows = [
        Choice(
            "build tools",
            " ".join(tools),
            "their setup.py imports these, and nothing else brings them without isolation; later "
            "setuptools has no pkg_resources",
        )
    ]
    if package == "mamba-ssm":
        why = (
            "imported by mamba-ssm, and left out of its install by --no-deps, which keeps torch as "
            "it is; transformers 5 lost names that mamba-ssm before 2.3 imports"
        )
        rows.append(Choice("run-time packages", " ".join(extras), why))
    return tools, extras, rows


def _pinned(pins: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}=={old.get(name, version)}" for name, version in pins.items())


def _jobs(target: Target, on_runner: bool) -> tuple[int, Choice]:
    if on_runner or not target.memory_gb:
        why = f"for 16 GB of memory; one more for each {GB_PER_JOB} GB beyond"
        return RUNNER_JOBS, Choice("MAX_JOBS", str(RUNNER_JOBS), why)
    by_memory = max(1, int(target.memory_gb // GB_PER_JOB))
    jobs = min(by_memory, target.cores or by_memory)
    why = f"{GB_PER_JOB} GB of memory for each, of {target.memory_gb:.0f} GB"
    if target.cores:
        why += f", and {target.cores} cores"
    return jobs, Choice("MAX_JOBS", str(jobs), why)


def _gcc(target: Target) -> tuple[str, Choice]:
    low, high = releases.gcc_bounds(target.cuda)
    systems = catalog.load("images")["systems"]
    usual = min((str(system["gcc"]) for system in systems.values()), key=number)
    gcc = usual if number(usual) <= number(str(high)) else str(high)
    return gcc, Choice("gcc", gcc, f"nvcc {target.cuda} accepts {low} to {high}")
