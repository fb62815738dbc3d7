# SPDX-License-Identifier: Apache-2.0
"""Probes of the C++ library and the CUDA runtimes that the loader would take for this Python.

Libraries are read, never loaded; which of them a module needs is in its own report.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.packages import site_folders
from statescan.doctor.facts.probe import probe
from statescan.doctor.symbols.binary import BinaryError, opened
from statescan.doctor.symbols.elf import Elf
from statescan.doctor.symbols.resolve import cached_libraries

_STDCXX = "libstdc++.so.6"
_CUDART = re.compile(r"(libcudart\.so\.\d+(\.0)?|cudart64_\d+\.dll)")
_MULTIARCH = ("x86_64-linux-gnu", "aarch64-linux-gnu")


def loader_folders(machine: Machine, name: str) -> list[tuple[Path, str]]:
    """Where Linux's loader looks for a library that a module of this Python needs, in order."""
    rows = [(folder, "conda" if _is_conda(machine) else "RPATH") for folder in _rpath(machine)]
    rows += [(folder, "LD_LIBRARY_PATH") for folder in machine.folders("LD_LIBRARY_PATH")]
    cached = cached_libraries(machine.path("/etc/ld.so.cache")).get(name, ())
    rows += [(Path(listed).parent, "system") for listed in cached]
    for base in ("/lib64", "/usr/lib64", "/lib", "/usr/lib"):
        rows.append((machine.path(base), "system"))
    for base in ("/lib", "/usr/lib"):
        rows += [(machine.path(base) / one, "system") for one in _MULTIARCH]
    return rows


def _is_conda(machine: Machine) -> bool:
    return (machine.base_prefix / "conda-meta").is_dir()


def _rpath(machine: Machine) -> list[Path]:
    """Of the program: it counts for every library, unless a RUNPATH takes its place."""
    program = machine.executable.resolve()
    try:
        with opened(program) as view:
            elf = Elf(view)
            written = [] if elf.runpath else list(elf.rpath)
    except BinaryError:
        return []
    origin = str(program.parent)
    return [
        Path(one.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)).resolve()
        for one in written
    ]


@probe("libraries.libstdcxx", source="folders of the loader")
def libstdcxx(machine: Machine) -> list[dict[str, Any]]:
    """Each libstdc++ in the order of the loader, with the newest versions that it defines."""
    if machine.os != "linux":
        return []
    found: dict[Path, dict[str, Any]] = {}
    for folder, via in loader_folders(machine, _STDCXX):
        path = folder / _STDCXX
        if not path.is_file() or path.resolve() in found or not _is_for_here(machine, path):
            continue
        glibcxx, cxxabi = _newest(path)
        row = {"path": str(path), "glibcxx": glibcxx, "cxxabi": cxxabi, "via": via}
        found[path.resolve()] = row
    return list(found.values())


def _is_for_here(machine: Machine, path: Path) -> bool:
    """Whether it is of the interpreter's kind: the loader passes over 32-bit libraries."""
    heads = []
    for one in (machine.executable.resolve(), path):
        try:
            with opened(one) as view:
                heads.append(view.read(0, 20))
        except BinaryError:
            return one != path
    program, library = heads
    return program[:4] != b"\x7fELF" or (program[4:6], program[18:]) == (library[4:6], library[18:])


def _newest(path: Path) -> tuple[str | None, str | None]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        glibcxx = _highest(re.findall(rb"GLIBCXX_(\d+(?:\.\d+)+)\0", data))
        cxxabi = _highest(re.findall(rb"CXXABI_(\d+(?:\.\d+)+)\0", data))
    return glibcxx, cxxabi


def _highest(versions: Iterable[bytes]) -> str | None:
    texts = {version.decode("ascii") for version in versions}
    return max(texts, key=lambda text: tuple(map(int, text.split("."))), default=None)


@probe("libraries.cudart", source="torch's wheels and folders of the loader")
def cudart(machine: Machine) -> list[dict[str, str]]:
    """CUDA runtimes that a module could be given: torch's own first, as its import loads them."""
    places: list[tuple[Path, str]] = []
    for site in site_folders(machine):
        places += [(site / "torch" / "lib", "torch")]
        wheels = machine.list(site / "nvidia")
        places += [(one / part, "torch wheel") for one in wheels for part in ("lib", "bin")]
    if machine.os == "linux":
        places += [
            (folder, via)
            for name in _sonames(machine)
            for folder, via in loader_folders(machine, name)
        ]
    elif machine.os == "windows":
        places += [(folder, "PATH") for folder in machine.folders("PATH")]
    found: dict[Path, dict[str, str]] = {}
    for folder, via in dict.fromkeys(places):
        for path in machine.list(folder):
            if _CUDART.fullmatch(path.name):
                row = {"soname": path.name, "path": str(path), "via": via}
                found.setdefault(path.resolve(), row)
    return list(found.values())


def _sonames(machine: Machine) -> list[str]:
    """Names of runtimes that the loader's cache knows; at least one, to look in its folders."""
    cached = cached_libraries(machine.path("/etc/ld.so.cache"))
    return [name for name in cached if _CUDART.fullmatch(name)] or ["libcudart.so.12"]
