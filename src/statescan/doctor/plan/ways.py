# SPDX-License-Identifier: Apache-2.0
"""Ways to a working package: statescan, a wheel, a container, WSL2; ``source`` has the fifth.

Each is open with its steps, or closed with the reason; the order is ``planner``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from statescan.doctor import releases
from statescan.doctor.checks import known
from statescan.doctor.generate import pairs
from statescan.doctor.model import Command, Facts
from statescan.doctor.plan.model import Step, Way
from statescan.doctor.plan.source import PIP, gpu_codes, imports_steps

WHEEL_GLIBC = "2.35"
"""Wheels are built on Ubuntu 22.04."""


def by_statescan(package: str, facts: Facts) -> Way:
    """Install statescan, and let it serve the original's names."""
    title = "Use statescan" if package == "statescan" else f"Use statescan instead of {package}"
    python, torch = str(facts.get("python.version", "")), str(facts.get("torch.version", ""))
    if python and known.older(python, known.LEAST_PYTHON):
        return Way(
            "statescan",
            title,
            closed=f"statescan needs Python {known.LEAST_PYTHON}, and this is {python}",
        )
    if torch and known.older(torch, known.LEAST_TORCH):
        return Way(
            "statescan",
            title,
            closed=f"statescan needs torch {known.LEAST_TORCH}, and {torch} is installed",
        )
    steps = [
        Step(
            "Install it; nothing is compiled and torch stays as it is",
            (Command((*PIP, "statescan")),),
            True,
            "one package, removed by pip uninstall statescan",
        )
    ]
    if package != "statescan":
        steps.append(
            Step(
                "Run your program with the original's names served by it",
                (
                    Command(
                        ("python", "-m", "statescan", "run", "your_script.py"),
                        note="or statescan.compat.install() before the first import of the names",
                    ),
                ),
                True,
                "the program's files stay as they are",
            )
        )
    why = "no compiler, no CUDA toolkit, any torch from 2.4, GPU and CPU"
    return Way("statescan", title, why, tuple(steps))


def by_wheel(package: str, chosen: Sequence[pairs.Chosen], facts: Facts) -> Way:
    """A wheel from the original's release page, if one can fit."""
    title = "Take the published wheel"
    closed = _no_wheel(facts)
    fields = {
        "cuda": str(facts.get("torch.cuda", "")),
        "torch": known.minor(str(facts.get("torch.version", ""))),
        "abi": facts.get("torch.cxx11_abi"),
        "python_tag": str(facts.get("python.tag", "")),
        "platform": f"linux_{facts.get('system.machine', '')}",
    }
    if closed:
        return Way("wheel", title, closed=closed)
    rows = _with_wheels(package, fields, facts)
    if not rows:
        # Of older releases nobody knows; a wheel without code for the GPU is none in any case.
        codes = [
            pairs.missing_codes(row.release, _wheel_cuda(fields), gpu_codes(facts))
            for row in chosen
        ]
        guessed = [(row.package, row.version) for row in chosen]
        answers = [releases.wheel_published(*row, **fields) for row in guessed]
        if not guessed or False in answers or any(codes):
            return Way("wheel", title, closed=_why_no_wheel(package, fields, facts))
        rows = guessed
    steps, unknown = [], False
    for name, version in rows:
        file = releases.wheel_name(name, version, **fields)
        certain = releases.wheel_published(name, version, **fields)
        unknown = unknown or not certain
        address = f"https://github.com/{releases.HOSTS[name]}/releases/download/v{version}/{file}"
        note = "" if certain else "whether it exists is not known; a 404 means that it does not"
        asked = releases.wheel_asked(name, version, **fields)
        if asked != file:
            note = "; ".join(
                filter(None, (note, "pip by itself would take one for another machine"))
            )
        steps.append(
            Step(
                f"Install {name} {version} from its release page",
                (Command((*PIP, "--no-deps", "--no-cache-dir", address), note=note),),
                True,
                "only this package is installed; torch is not touched",
            )
        )
    steps += imports_steps([row for row in map(_release, rows) if row is not None])
    sure = "published for exactly this torch, CUDA, ABI and Python"
    why = sure if not unknown else "named as the original's setup names it for this environment"
    return Way("wheel", title, why, tuple(steps))


def by_container(package: str, facts: Facts) -> Way:
    """A container with the toolkit inside."""
    title = "Build inside a container"
    if facts.get("system.os") == "macos":
        return Way("container", title, closed="containers on macOS have no NVIDIA GPU")
    if facts.get("system.container"):
        return Way("container", title, closed="this is a container already")
    step = Step(
        "Write a Dockerfile for this machine's versions and build it",
        (
            Command(
                ("statescan", "write", "dockerfile", "--for", package, "--output", "Dockerfile")
            ),
            Command(("docker", "build", "-t", package, ".")),
            Command(
                ("docker", "run", "--rm", "--gpus", "all", package),
                note="--gpus needs NVIDIA's container toolkit, on Windows Docker with WSL2",
            ),
        ),
        True,
        "writes one file and one image; the machine's own toolkit and torch stay as they are",
    )
    return Way("container", title, "nothing of the machine is changed but an image", (step,))


def by_wsl2(package: str, facts: Facts) -> Way:
    """Linux on Windows."""
    title = "Install inside WSL2"
    if facts.get("system.os") != "windows":
        return Way("wsl2", title, closed="this is not Windows")
    step = Step(
        "Set up Ubuntu under WSL2, then ask for a plan inside it",
        (
            Command(("wsl", "--install", "-d", "Ubuntu-22.04")),
            Command(("wsl", "-d", "Ubuntu-22.04", "--", "nvidia-smi")),
            Command(("statescan", "plan", package), note="inside Ubuntu"),
        ),
        False,
        "needs administrator rights, a restart and several gigabytes",
    )
    why = "the originals publish no Windows wheel, and their sources are written for Linux"
    return Way("wsl2", title, why, (step,))


def _pair(package: str) -> tuple[str, ...]:
    return ("causal-conv1d", "mamba-ssm") if package == "mamba-ssm" else (package,)


def _release(row: tuple[str, str]) -> releases.Release | None:
    return releases.release(*row)


def _with_wheels(package: str, fields: dict[str, object], facts: Facts) -> list[tuple[str, str]]:
    """The newest releases that go together, have a known wheel, and code for the GPUs."""
    fitting = {
        name: [
            row
            for row in reversed(releases.releases(name))
            if releases.wheel_published(name, row.version, **fields)  # type: ignore[arg-type]
            and pairs.has_triton(row, str(fields["torch"]))
            and not pairs.missing_codes(row, _wheel_cuda(fields), gpu_codes(facts))
        ]
        for name in _pair(package)
    }
    for last in fitting[package]:
        rows = [
            next(
                (one for one in fitting[name] if one.conv_generation == last.conv_generation), None
            )
            for name in _pair(package)
        ]
        if all(rows):
            return [(row.package, row.version) for row in rows if row is not None]
    return []


def _why_no_wheel(package: str, fields: dict[str, object], facts: Facts) -> str:
    newest = releases.releases(package)[-1]
    missing = pairs.missing_codes(newest, _wheel_cuda(fields), gpu_codes(facts))
    if missing:
        return f"the wheels hold no code for this GPU (sm_{missing[0]}), and no PTX"
    return (
        f"none is known for torch {fields['torch']} with CUDA {fields['cuda']} and "
        f"{fields['python_tag']}; pip would fall back to a source build"
    )


def _wheel_cuda(fields: dict[str, object]) -> str:
    """The toolkit that the wheels of a CUDA major are built with."""
    major = str(fields["cuda"]).partition(".")[0]
    return {"11": "11.8", "12": "12.9", "13": "13.0"}.get(major, str(fields["cuda"]))


def _no_wheel(facts: Facts) -> str:
    """Why no wheel can fit; empty where one may."""
    if facts.get("system.os") != "linux":
        return "wheels are published for Linux only"
    libc = facts.get("system.libc") or {}
    if libc.get("kind") == "musl":
        return "wheels are published for glibc, and this system has musl"
    if libc.get("version") and known.older(str(libc["version"]), WHEEL_GLIBC):
        return f"wheels need glibc {WHEEL_GLIBC}, and this system has {libc['version']}"
    if not facts.get("torch.version"):
        return "there is no torch here, which decides on the wheel"
    if facts.get("torch.hip"):
        return "wheels are published for CUDA, and this torch is a ROCm build"
    if not facts.get("torch.cuda"):
        return f"torch {facts.get('torch.version')} is a build without CUDA"
    if facts.get("system.ngc"):
        return "the torch of an NGC container lies between releases; its wheels are not listed"
    return ""
