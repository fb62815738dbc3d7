# SPDX-License-Identifier: Apache-2.0
"""Probes of the system: its name, C library, container, processors, memory, disks and shell.

GPUs are in ``nvidia``, and memory is not compared with what a build needs.
"""

from __future__ import annotations

import ctypes
import locale
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.probe import Seen, probe
from statescan.doctor.symbols.binary import BinaryError, opened
from statescan.doctor.symbols.elf import Elf

_GB = 1 << 30
_INTERPRETER = 3
"""PT_INTERP of an ELF file."""
_NO_LIMIT = 1 << 60
"""Control groups write a number near 2**63 where there is no limit."""


@probe("system.os", source="sys.platform")
def os_name(machine: Machine) -> str:
    """The family of the system."""
    return machine.os


@probe("system.machine", source="platform.machine()")
def processor(machine: Machine) -> str:
    """The instruction set, as the system writes it."""
    return platform.machine().lower()


@probe("system.name", "system.distribution", source="/etc/os-release")
def distribution(machine: Machine) -> dict[str, Any]:
    """The system for people, and on Linux the distribution for programs."""
    if machine.os == "macos":
        name = f"macOS {platform.mac_ver()[0]}".strip()
        return {"system.name": Seen(name, "platform.mac_ver()"), "system.distribution": None}
    if machine.os == "windows":
        name = _windows_name(platform.release(), platform.version())
        return {"system.name": Seen(name, "platform.release()"), "system.distribution": None}
    values = _os_release(machine)
    if not values:
        return {"system.name": Seen("Linux", "sys.platform"), "system.distribution": None}
    name = values.get("PRETTY_NAME") or values.get("NAME") or "Linux"
    found = {
        "id": values.get("ID", "linux"),
        "like": values.get("ID_LIKE", "").split(),
        "version": values.get("VERSION_ID", ""),
    }
    return {"system.name": name, "system.distribution": found}


def _windows_name(release: str, version: str) -> str:
    build = version.rpartition(".")[2]
    # Windows 11 is 10.0 as well, and many versions of Python tell it as 10.
    if release == "10" and build.isdigit() and int(build) >= 22000:
        release = "11"
    return f"Windows {release} {version}".strip()


def _os_release(machine: Machine) -> dict[str, str]:
    for name in ("/etc/os-release", "/usr/lib/os-release"):
        text = machine.read(machine.path(name))
        rows = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
        if rows:
            return {key: value.strip().strip("\"'") for key, value in rows}
    return {}


@probe("system.libc", source="the C library of this Python")
def libc(machine: Machine) -> Any:
    """glibc or musl, with its version; only Linux has a choice."""
    if machine.os != "linux":
        return None
    loader = _loader(machine)
    if "ld-musl" in loader:
        # Called without a program, it tells its version and ends with an error.
        said = machine.run([machine.path(loader)])
        version = re.search(r"Version (\S+)", said.err + said.out)
        return Seen({"kind": "musl", "version": version[1] if version else ""}, loader)
    found = _glibc() or platform.libc_ver(str(machine.executable))[1]
    return {"kind": "glibc", "version": found} if found else None


def _loader(machine: Machine) -> str:
    """The program that loads this Python, which belongs to its C library."""
    try:
        with opened(machine.executable.resolve()) as view:
            parts = [part for part in Elf(view).segments if part.kind == _INTERPRETER]
            return view.read(parts[0].offset, parts[0].size).decode().strip("\0") if parts else ""
    except (BinaryError, UnicodeDecodeError):
        return ""


def _glibc() -> str:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        return ""
    return version if name == "glibc" else ""


@probe("system.wsl", source="/proc/sys/kernel/osrelease")
def wsl(machine: Machine) -> int:
    """Whether, and which, Windows Subsystem for Linux this is."""
    text = machine.read(machine.path("/proc/sys/kernel/osrelease"))
    if machine.os != "linux" or "microsoft" not in text.lower():
        return 0
    # WSL 1 has no Linux kernel and writes "4.4.0", the build of Windows and "Microsoft".
    return 1 if re.match(r"4\.4\.0-\d+-Microsoft", text) else 2


@probe("system.container", source="/.dockerenv, variables and /proc/1/cgroup")
def container(machine: Machine) -> str | None:
    """The kind of container this runs in."""
    if machine.os != "linux":
        return None
    if machine.variable("SINGULARITY_CONTAINER") or machine.variable("APPTAINER_CONTAINER"):
        return "singularity"
    if machine.variable("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for file, kind in (("/run/.containerenv", "podman"), ("/.dockerenv", "docker")):
        if machine.path(file).exists():
            return kind
    if machine.variable("container"):
        return machine.variable("container")
    groups = machine.read(machine.path("/proc/1/cgroup"))
    for word, kind in (("kubepods", "kubernetes"), ("docker", "docker"), ("lxc", "lxc")):
        if word in groups:
            return kind
    return None


@probe("system.ngc", source="NVIDIA_PYTORCH_VERSION")
def ngc(machine: Machine) -> str | None:
    """The release of NVIDIA's PyTorch container."""
    version = machine.variable("NVIDIA_PYTORCH_VERSION").strip()
    return version if re.fullmatch(r"\d+\.\d+.*", version) else None


@probe("system.cores", source="sched_getaffinity")
def cores(machine: Machine) -> Any:
    """CPUs of this process, which taskset and containers limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return Seen(os.cpu_count(), "os.cpu_count()")


@probe("system.memory", source="/proc/meminfo and control groups")
def memory(machine: Machine) -> Any:
    """Whole, free and allowed memory; None for what a system does not tell."""
    if machine.os == "windows":
        total, free = _windows_memory()
        return Seen(_memory(total, free, None), "GlobalMemoryStatusEx")
    if machine.os == "macos":
        said = machine.run(["sysctl", "-n", "hw.memsize"]).out.strip()
        total = int(said) if said.isdigit() else None
        return Seen(_memory(total, _macos_free(machine), None), "sysctl and vm_stat")
    rows = re.findall(r"^(\w+):\s+(\d+) kB", machine.read(machine.path("/proc/meminfo")), re.M)
    sizes = {name: int(size) * 1024 for name, size in rows}
    free = sizes.get("MemAvailable", sizes.get("MemFree"))
    limit, used = _group_limit(machine)
    if limit is not None and limit >= sizes.get("MemTotal", limit):
        limit = None
    if limit is not None and used is not None and free is not None:
        free = min(free, max(limit - used, 0))
    return _memory(sizes.get("MemTotal"), free, limit)


def _memory(total: int | None, free: int | None, limit: int | None) -> dict[str, float | None]:
    sizes = {"total_gb": total, "free_gb": free, "limit_gb": limit}
    return {name: None if size is None else round(size / _GB, 1) for name, size in sizes.items()}


def _group_limit(machine: Machine) -> tuple[int | None, int | None]:
    """The least limit of the control groups that this process is in, and what is used of it."""
    mine = machine.read(machine.path("/proc/self/cgroup"))
    rows: list[tuple[int, int | None]] = []
    for line in mine.splitlines():
        _, controllers, place = (line.split(":", 2) + ["", ""])[:3]
        version1 = "memory" in controllers.split(",")
        if controllers and not version1:
            continue
        base = "/sys/fs/cgroup/memory" if version1 else "/sys/fs/cgroup"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, usage, cache = names if version1 else ("memory.max", "memory.current", names[2][6:])
        folder = machine.path(base) / place.strip("/")
        # In a container the path is often the host's; then only the base itself is there.
        for one in (folder, *folder.parents):
            most = machine.read(one / limit).strip()
            if most.isdigit() and 0 < int(most) < _NO_LIMIT:
                rows.append((int(most), _used(machine, one, usage, cache)))
            if one == machine.path(base):
                break
    return min(rows, key=lambda row: row[0]) if rows else (None, None)


def _used(machine: Machine, folder: Path, usage: str, cache: str) -> int | None:
    """Memory of a group without what the kernel gives back when it is asked for."""
    text = machine.read(folder / usage).strip()
    if not text.isdigit():
        return None
    given_back = re.search(rf"^{cache} (\d+)", machine.read(folder / "memory.stat"), re.M)
    return max(int(text) - (int(given_back[1]) if given_back else 0), 0)


def _macos_free(machine: Machine) -> int | None:
    text = machine.run(["vm_stat"]).out
    size = re.search(r"page size of (\d+)", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative):\s+(\d+)", text, re.M)
    return int(size[1]) * sum(map(int, pages)) if size and pages else None


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    )


def _windows_memory() -> tuple[int | None, int | None]:
    kernel = getattr(ctypes, "windll", None)
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if kernel is None or not kernel.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None, None
    return int(status.total), int(status.free)


@probe("system.disks", source="free space of the file systems")
def disks(machine: Machine) -> dict[str, Any]:
    """Room where a build, a cache and an install write."""
    named = [machine.variable(name) for name in ("TMPDIR", "TEMP", "TMP")]
    chosen = next((name for name in named if name and Path(name).is_dir()), tempfile.gettempdir())
    places = {
        "tmp": Path(chosen),
        "cwd": machine.cwd,
        "cache": machine.cache_home(),
        "site": machine.site,
    }
    return {name: _disk(place) for name, place in places.items()}


def _disk(place: Path | None) -> dict[str, Any] | None:
    if place is None:
        return None
    # A folder that is still to be made will be on the disk of the one above it.
    for one in (place, *place.parents):
        try:
            return {"path": str(place), "free_gb": round(shutil.disk_usage(one).free / _GB, 1)}
        except OSError:
            continue
    return {"path": str(place), "free_gb": None}


@probe("system.encoding", source="locale and sys.flags")
def encoding(machine: Machine) -> dict[str, Any]:
    """How this Python reads text files that do not tell."""
    return {
        "preferred": locale.getpreferredencoding(False),
        "utf8_mode": bool(sys.flags.utf8_mode),
    }


@probe("system.shell", source="variables")
def shell(machine: Machine) -> str:
    """The family of the shell that started this."""
    if machine.os != "windows" or machine.variable("MSYSTEM") or machine.variable("SHELL"):
        return "bash"
    # PowerShell adds the user's own folder to the two that every process has.
    if len(machine.folders("PSModulePath")) > 2 or not machine.variable("PROMPT"):
        return "powershell"
    return "cmd"
