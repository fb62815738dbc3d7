# SPDX-License-Identifier: Apache-2.0
"""The way of a source build: its environment, its steps, and why there may be none.

Which releases are built is ``planner``'s choice; a build that is run by this program is in
``doctor/builder``.
"""

from __future__ import annotations

from collections.abc import Sequence

from statescan.doctor import catalog, releases
from statescan.doctor.builder import environment
from statescan.doctor.checks import known
from statescan.doctor.generate import pairs
from statescan.doctor.model import Command, Facts, Finding, Severity
from statescan.doctor.plan.model import Step, Way

PIP = ("python", "-m", "pip", "install")
KEPT = ("--no-build-isolation", "--no-deps", "--no-cache-dir")
"""Options that keep pip from replacing torch and from taking a wheel built for another one."""

JOB_GB = 5.0
"""Memory that one nvcc of these builds takes: 20 GB and more were seen with four threads each."""

_NAMES = {"mamba-ssm": "mamba_ssm", "causal-conv1d": "causal_conv1d"}
_BEFORE_A_BUILD = (
    *("build-environment", "toolkit", "toolkit-version", "host-compiler", "headers"),
    *("resources", "link"),
)
_OF_THE_TOOLKIT = (
    "nvcc-missing",
    "nvcc-too-old",
    "nvcc-torch-cuda-mismatch",
    "cuda-headers-missing",
)
"""Findings that setting CUDA_HOME mends where a toolkit that fits is on this machine."""

FIRST_FOR_TRANSFORMERS_5 = "2.3.0"
"""Older releases of mamba-ssm import names that transformers 5 has no more."""

LARGEST_GB = 15.0
"""Below it the largest source, compiled for four GPUs at a time, may not fit into memory."""


def build_cuda(facts: Facts) -> str:
    """The CUDA version to plan for: of the toolkit that a build takes, else torch's own."""
    torch = str(facts.get("torch.cuda", ""))
    toolkit = str((facts.get("toolkit.build") or {}).get("version") or "")
    same = toolkit.partition(".")[0] == torch.partition(".")[0]
    return toolkit if toolkit and same else torch


def gpu_codes(facts: Facts) -> tuple[str, ...]:
    """Compute capabilities of the GPUs as codes, "86"."""
    found = facts.get("driver.gpus") or facts.get("torch.devices") or ()
    return tuple(str(gpu["capability"]).replace(".", "") for gpu in found)


def by_source(
    package: str, chosen: Sequence[pairs.Chosen], facts: Facts, findings: Sequence[Finding]
) -> Way:
    """A source build in the environment that it needs."""
    title = "Build from source"
    closed = _no_build(facts)
    if not closed and not chosen:
        closed = (
            f"no release of {package} on PyPI can be built for torch "
            f"{facts.get('torch.version', '(none)')} with these GPUs"
        )
    if closed:
        return Way("source", title, closed=closed)
    better = environment.with_toolkit(facts) is not facts
    facts = environment.with_toolkit(facts)
    before = [
        Step(row.summary, _without_installs(row.fix.commands), row.fix.safe, row.fix.safety)
        for row in findings
        if row.severity is Severity.ERROR
        and row.problem.layer in _BEFORE_A_BUILD
        and not (better and row.problem.slug in _OF_THE_TOOLKIT)
    ]
    steps = [*before, _environment_step(facts), _tools_step(facts)]
    for row in chosen:
        steps.append(_build_step(row, facts))
    steps += imports_steps([row.release for row in chosen])
    modules = ", ".join(_NAMES[row.package] for row in chosen)
    steps.append(
        Step(
            "Look whether it imports",
            (Command(("python", "-c", f"import torch, {modules}")),),
            True,
            "reads only",
        )
    )
    why = "works without a published wheel; 15 minutes to an hour and a half of compiling, by the "
    why += f"number of cores; `statescan build {package}` does it for you, for these GPUs alone"
    return Way("source", title, why, tuple(steps))


def jobs(facts: Facts) -> int:
    """How many compilers may run at a time without running out of memory."""
    cores = int(facts.get("system.cores", 1))
    return max(1, min(cores, int(free_memory(facts) / JOB_GB)))


def free_memory(facts: Facts) -> float:
    """Gigabytes that a build may take; those of one compiler where it is not known."""
    memory = facts.get("system.memory") or {}
    free = float(memory.get("free_gb") or memory.get("total_gb") or JOB_GB)
    limit = memory.get("limit_gb")
    return min(free, float(limit)) if limit else free


def imports_steps(rows: Sequence[releases.Release]) -> list[Step]:
    """What mamba-ssm imports and --no-deps leaves out; Triton comes with torch."""
    mamba = [row for row in rows if row.package == "mamba-ssm"]
    if not mamba:
        return []
    others = [name for name in mamba[0].requires if not name.startswith("triton")]
    old = known.older(mamba[0].version, FIRST_FOR_TRANSFORMERS_5)
    return [
        Step(
            "Install what mamba-ssm imports",
            (Command((*PIP, "einops", "transformers<5" if old else "transformers", *others)),),
            not others,
            "their own requirements may change other packages, but not torch"
            if not others
            else f"{', '.join(others)} bring large packages with pins of their own",
        )
    ]


def _no_build(facts: Facts) -> str:
    """Why no source build is possible; empty where one is, after the findings' fixes."""
    system = facts.get("system.os")
    if system == "macos":
        return "macOS has no CUDA"
    if system == "windows":
        return "the sources are written for GCC on Linux; under WSL2 they build"
    if facts.get("torch.hip"):
        return "this torch is a ROCm build, for which the CUDA steps below do not hold"
    if not facts.get("torch.version"):
        return "there is no torch here; install one with CUDA first"
    if not facts.get("torch.cuda"):
        return f"torch {facts.get('torch.version')} is a build without CUDA, and nvcc needs one"
    return ""


def _without_installs(commands: Sequence[Command]) -> tuple[Command, ...]:
    """A fix's commands but for the install itself, which is a step of its own."""
    return tuple(
        command
        for command in commands
        if not ("install" in command.run and set(command.run) & set(releases.PACKAGES))
    )


def _environment_step(facts: Facts) -> Step:
    toolkit = facts.get("toolkit.build") or {}
    home = (
        str(toolkit.get("path") or "/usr/local/cuda") if toolkit.get("nvcc") else "/usr/local/cuda"
    )
    command = Command(
        set={"CUDA_HOME": home, "MAX_JOBS": str(jobs(facts))},
        prepend={"PATH": "$CUDA_HOME/bin"},
        unset=("TORCH_CUDA_ARCH_LIST",) if _has(facts, "TORCH_CUDA_ARCH_LIST") else (),
        note=f"MAX_JOBS by the free memory, {JOB_GB:.0f} GB for each compiler",
    )
    return Step("Set the environment of the build", (command,), True, "holds in this shell only")


def _tools_step(facts: Facts) -> Step:
    pins = catalog.load("pins")
    tools = ["setuptools", "wheel", "packaging", "ninja"]
    if known.older(str(facts.get("torch.version", "")), "2.3"):
        # Its build reads pkg_resources, which later setuptools has no more.
        tools[0] = f"setuptools=={pins['before_torch_2.3']['setuptools']}"
    return Step(
        "Install the build tools, which isolation would have brought",
        (Command((*PIP, *tools)),),
        True,
        "four small packages; none of them changes torch",
    )


def _build_step(row: pairs.Chosen, facts: Facts) -> Step:
    known_names = releases.variables(row.package)
    variables = {known_names["force"]: "TRUE"}
    if "keep" in known_names:
        variables[known_names["keep"]] = "TRUE"
    missing = pairs.missing_codes(row.release, build_cuda(facts), gpu_codes(facts))
    flags = [f"-gencode arch=compute_{code},code=sm_{code}" for code in missing]
    notes = [f"adds sm_{', sm_'.join(missing)}, which the release does not build"][: len(flags)]
    if free_memory(facts) < LARGEST_GB:
        flags.append("--threads 1")
        notes.append("one GPU at a time, because memory is short")
    if flags:
        variables["NVCC_APPEND_FLAGS"] = " ".join(flags)
    return Step(
        f"Build {row.package} {row.version}: {row.why}",
        (
            Command(
                (*PIP, *KEPT, f"{row.package}=={row.version}"), variables, note="; ".join(notes)
            ),
        ),
        True,
        "only this package is installed; torch is not touched",
    )


def _has(facts: Facts, variable: str) -> bool:
    return bool((facts.get("environment.variables") or {}).get(variable))
