# SPDX-License-Identifier: Apache-2.0
"""What the checks ask of the tables of releases and toolchains, with this machine's values put in.

The tables themselves are ``doctor/releases.py`` and the catalogue; nothing is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from statescan.doctor import catalog, releases
from statescan.doctor.model import Facts
from statescan.doctor.releases import Release
from statescan.doctor.symbols import gpu_code
from statescan.doctor.symbols.findings import numbers

LEAST_NVCC = "11.6"
"""Every setup.py of the originals refuses an older one."""
LEAST_TORCH = "2.4"
"""Of statescan."""
LEAST_PYTHON = "3.10"
"""Of statescan."""


def older(version: str, than: str) -> bool:
    """Whether the first version is before the second, as far as the second is written out."""
    wanted = numbers(than)
    return numbers(version)[: len(wanted)] < wanted


def newer(version: str, than: str) -> bool:
    """Whether the first version is after the second, as far as the second is written out."""
    wanted = numbers(than)
    return numbers(version)[: len(wanted)] > wanted


def major(version: str) -> str:
    """The first number of a version."""
    return version.partition(".")[0]


def minor(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def fitting(facts: Facts, package: str) -> Release:
    """The newest release for this Python and Triton; the newest of all where none is."""
    rows = [row for row in releases.releases(package) if _fits(row, facts)]
    return (rows or releases.releases(package))[-1]


def _fits(one: Release, facts: Facts) -> bool:
    python = str(facts.get("python.version", ""))
    if python and older(python, one.python_min):
        return False
    torch = minor(str(facts.get("torch.version", "")))
    triton = catalog.load("pins")["torch"].get(torch, {}).get("triton", "")
    # With a newer Triton pip would bring a newer torch as well.
    return not (triton and triton_min(one)) or not older(triton, minor(triton_min(one)))


def triton_min(one: Release) -> str:
    """The oldest Triton that a release asks for; empty where it asks for none."""
    for line in one.requires:
        match = re.match(r"triton\s*>=\s*([\d.]+)", line)
        if match:
            return match[1]
    return ""


def release(package: str, version: str) -> Release | None:
    """The installed release, or the nearest one that is known."""
    return releases.release(package, version) if version else None


def builds_module(package: str, version: str) -> bool:
    """Whether an install of that release builds its CUDA module without being told to.

    mamba-ssm's sources leave it out since after the last release that is listed.
    """
    last = releases.releases(package)[-1].version
    return package != "mamba-ssm" or numbers(version) <= numbers(last)


def published(facts: Facts, package: str) -> bool | None:
    """Whether a wheel of the release that fits was published for this machine; None if unknown.

    Of a release that is newer than the table of wheels the one before it must tell.
    """
    fitting_version = numbers(fitting(facts, package).version)
    for one in reversed(releases.releases(package)):
        if numbers(one.version) <= fitting_version:
            answer = _published(facts, package, one.version)
            if answer is not None:
                return answer
    return None


def published_wheel(facts: Facts, package: str) -> str:
    """File name of the newest published wheel for this machine; empty where there is none."""
    fields = _fields(facts)
    for one in reversed(releases.releases(package)):
        if _fits(one, facts) and _published(facts, package, one.version):
            return releases.wheel_name(package, one.version, **fields)
    return ""


def _published(facts: Facts, package: str, version: str) -> bool | None:
    fields = _fields(facts)
    libc = facts.get("system.libc") or {}
    if facts.get("system.os") != "linux" or libc.get("kind") == "musl":
        return False
    if not (fields["torch"] and fields["cuda"] and fields["python_tag"]):
        return False
    return releases.wheel_published(package, version, **fields)


def _fields(facts: Facts) -> dict[str, Any]:
    """The values that a wheel's name is made of."""
    return {
        "cuda": str(facts.get("torch.cuda", "")),
        # In NVIDIA's containers wheels are named by the container.
        "torch": str(facts.get("system.ngc") or minor(str(facts.get("torch.version", "")))),
        "abi": facts.get("torch.cxx11_abi"),
        "python_tag": str(facts.get("python.tag", "")),
        "platform": f"{facts.get('system.os', '')}_{facts.get('system.machine', '')}",
    }


def gpus(facts: Facts) -> list[tuple[str, tuple[int, int]]]:
    """Names and compute capabilities of the NVIDIA GPUs, as the driver or torch tells them."""
    return gpu_code.of_machine(facts.get("driver.gpus") or facts.get("torch.devices") or ())


def capability(gpu: tuple[int, int]) -> str:
    """A compute capability as it is written."""
    return f"{gpu[0]}.{gpu[1]}"


def lacking(
    archs: Iterable[str], devices: Iterable[tuple[str, tuple[int, int]]]
) -> list[tuple[str, tuple[int, int]]]:
    """The GPUs that code for these targets ("sm_80", "compute_90") does not run on."""
    names = list(archs)
    held = {
        "cubin": [name for name in names if name.startswith("sm_")],
        "ptx": [name for name in names if name.startswith("compute_")],
    }
    return [row for row in devices if gpu_code.runs_on(held, row[1]) is None]


def torch_lacks(facts: Facts) -> tuple[list[tuple[str, tuple[int, int]]], str]:
    """The GPUs that torch has no code for, and what it has; by its CUDA where it did not say."""
    devices, archs = gpus(facts), facts.get("torch.arch_list") or []
    if archs:
        return lacking(archs, devices), ", ".join(archs)
    bounds = catalog.load("pins")["torch_gpus"].get(str(facts.get("torch.cuda", "")))
    if bounds is None:
        return [], ""
    low, high = numbers(bounds[0]), numbers(bounds[1])
    lost = [row for row in devices if not low <= row[1] <= high]
    return lost, f"compute capability {bounds[0]} to {bounds[1]}"


def wheel_nvcc(cuda: str) -> str:
    """The nvcc that published wheels were made with, by the CUDA of the torch that they are for."""
    return {"11": "11.8", "12": "12.8", "13": "13.0"}.get(major(cuda), "")


def older_with_code(package: str, nvcc: str, gpu: tuple[int, int]) -> str:
    """The newest release with sources whose build holds code for a GPU; empty for none."""
    for one in reversed(releases.releases(package)):
        if one.sdist_has_sources and not lacking(one.cubins(nvcc), [("", gpu)]):
            return one.version
    return ""


def nvcc_knows(nvcc: str, gpu: tuple[int, int]) -> bool:
    """Whether this nvcc makes code for a GPU."""
    low, high = releases.nvcc_archs(nvcc)
    return low <= gpu[0] * 10 + gpu[1] <= high


def compiler_of(facts: Facts, name: str) -> Mapping[str, Any]:
    """The fact about a compiler; empty where there is none."""
    row = facts.get(name) or {}
    return row if row.get("path") else {}
