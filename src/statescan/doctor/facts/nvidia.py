# SPDX-License-Identifier: Apache-2.0
"""Probes of drivers and GPUs without torch: NVIDIA's by a child process, AMD's by files.

Whether torch can use them is asked in ``children``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from statescan.doctor.facts import children
from statescan.doctor.facts.libraries import loader_folders
from statescan.doctor.facts.machine import Machine, Ran
from statescan.doctor.facts.probe import Seen, probe
from statescan.doctor.facts.system import container
from statescan.doctor.symbols.resolve import cached_libraries

_NAMES = ("driver.version", "driver.cuda", "driver.gpus")
_QUERY = (
    "--query-gpu=name,compute_cap,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)


def _driver_library(machine: Machine) -> Path | None:
    """The library that programs load to reach the driver."""
    if machine.os == "windows":
        found = Path(machine.variable("SystemRoot") or "C:\\Windows") / "System32" / "nvcuda.dll"
        return found if found.is_file() else None
    if machine.os != "linux":
        return None
    wsl = (machine.path("/usr/lib/wsl/lib"), "WSL")
    for place, _ in (*loader_folders(machine, "libcuda.so.1"), wsl):
        if (place / "libcuda.so.1").exists():
            return place / "libcuda.so.1"
    return None


@probe("driver.library", source="folders of the loader")
def library(machine: Machine) -> str | None:
    """libcuda.so.1 or nvcuda.dll."""
    found = _driver_library(machine)
    return None if found is None else str(found)


@probe("driver.link_name", source="folders of libcuda")
def link_name(machine: Machine) -> bool | None:
    """Whether there is a libcuda.so where Triton and the linker look."""
    if machine.os != "linux":
        return None
    cached = cached_libraries(machine.path("/etc/ld.so.cache"))
    folders = [
        Path(path).parent
        for name in ("libcuda.so", "libcuda.so.1")
        for path in cached.get(name, ())
    ]
    folders += machine.folders("TRITON_LIBCUDA_PATH") + machine.folders("LD_LIBRARY_PATH")
    folders += machine.folders("LIBRARY_PATH")
    found = _driver_library(machine)
    if found is not None:
        folders.append(found.parent)
    return any((folder / "libcuda.so").exists() for folder in folders)


@probe(*_NAMES, source="the NVIDIA driver")
def gpus(machine: Machine) -> dict[str, Any]:
    """Version, newest CUDA and devices, by NVML, by the driver itself, or by nvidia-smi."""
    written, reachable = _written_version(machine), _driver_library(machine) is not None
    tool = machine.which("nvidia-smi") or _wsl_tool(machine)
    # A container sees the kernel of its host, and was perhaps given none of its GPUs.
    inside = machine.os == "linux" and container(machine) is not None
    if machine.os == "macos" or not (reachable or tool or (written.value and not inside)):
        return {"driver.version": None, "driver.cuda": None, "driver.gpus": []}
    found = children.driver(machine)
    by_tool = _by_tool(machine, tool) if tool and not found.get("gpus") else {}
    version = found.get("version") or by_tool.get("version")
    source = str(found.get("source") if found.get("ok") else "nvidia-smi")
    devices = found["gpus"] if found.get("ok") else by_tool.get("gpus")
    problem = "" if devices is not None else str(found["problem"])
    return {
        "driver.version": Seen(version, source) if version else written,
        "driver.cuda": Seen(found.get("cuda") or by_tool.get("cuda"), source),
        # No device, told by a driver that works, is an answer; no answer is none.
        "driver.gpus": Seen(devices, source, problem),
    }


def _written_version(machine: Machine) -> Seen:
    """The version of the kernel module that is loaded."""
    files = {
        "/proc/driver/nvidia/version": r"Kernel Module\s+(?:for \w+\s+)?(\d+\.\d[\d.]*)",
        "/sys/module/nvidia/version": r"(\d+\.\d[\d.]*)",
    }
    for name, pattern in files.items():
        found = re.search(pattern, machine.read(machine.path(name)))
        if found:
            return Seen(found[1], name)
    return Seen(None)


def _wsl_tool(machine: Machine) -> Path | None:
    found = machine.path("/usr/lib/wsl/lib/nvidia-smi")
    return found if machine.os == "linux" and found.is_file() else None


def _by_tool(machine: Machine, tool: Path) -> dict[str, Any]:
    listed = machine.run([tool, *_QUERY], timeout=15)
    rows = [line.split(", ") for line in listed.out.splitlines() if line.count(", ") == 3]
    devices = [
        {"name": name, "capability": number, "memory_gb": _gigabytes(size)}
        for name, number, size, _ in rows
    ]
    answer: dict[str, Any] = {"gpus": devices} if listed.ok else {}
    whole: Ran = machine.run([tool], timeout=15)
    for key, pattern in (
        ("version", r"Driver Version:\s*([\d.]+)"),
        ("cuda", r"CUDA(?: UMD)? Version:\s*([\d.]+)"),
    ):
        found = re.search(pattern, whole.out)
        answer |= {key: found[1]} if found else {}
    return answer


def _gigabytes(megabytes: str) -> float | None:
    return round(float(megabytes) / 1024, 1) if megabytes.strip().isdigit() else None


@probe("driver.amd", source="/opt/rocm and /sys/class/kfd")
def amd(machine: Machine) -> dict[str, Any] | None:
    """ROCm and AMD's GPUs."""
    if machine.os != "linux":
        return None
    homes = [machine.path("/opt/rocm")]
    homes += [
        Path(value) for name in ("ROCM_HOME", "ROCM_PATH") if (value := machine.variable(name))
    ]
    said = (machine.read(home / ".info" / "version").strip() for home in homes)
    release = next((text.partition("-")[0] for text in said if text), None)
    nodes = machine.list(machine.path("/sys/class/kfd/kfd/topology/nodes"))
    names = [_gfx(machine.read(node / "properties")) for node in nodes]
    found = [name for name in names if name]
    return {"rocm": release, "gpus": found} if release or found else None


def _gfx(properties: str) -> str:
    """ "gfx90a" of the number 90010; empty for a node that is a CPU."""
    found = re.search(r"^gfx_target_version (\d+)", properties, re.MULTILINE)
    number = int(found[1]) if found else 0
    major, minor, step = number // 10000, number // 100 % 100, number % 100
    return f"gfx{major}{minor:x}{step:x}" if number else ""
