# SPDX-License-Identifier: Apache-2.0
"""Probes of host compilers and of what runs them: which would be called, and its version.

Whether nvcc accepts them is for checks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.probe import Seen, probe

_WRAPPERS = ("ccache", "sccache", "distcc", "env")
_NAME = re.compile(
    r"(gcc|g\+\+|clang|clang\+\+)(-\d[\d.]*)?(\.exe)?|\w+-conda(_cos\d)?-linux-gnu-(gcc|g\+\+|cc|c\+\+)"
)
_NOTHING = {"path": None, "family": None, "version": None}
_VSWHERE = "Microsoft Visual Studio/Installer/vswhere.exe"
_MSVC = "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"


@probe("compiler.c", source="CC and PATH")
def c(machine: Machine) -> Any:
    """The C compiler of builds, and of Triton when a program runs."""
    return _named(machine, ("CC",), ("gcc", "cc", "clang"))


@probe("compiler.cxx", source="CXX and PATH")
def cxx(machine: Machine) -> Any:
    """The C++ compiler of builds."""
    return _named(machine, ("CXX",), ("c++", "g++", "clang++"))


@probe("compiler.cuda_host", source="variables and PATH")
def cuda_host(machine: Machine) -> Any:
    """What nvcc calls for the code of the host in torch's builds, which give it CC as an option.

    Tried with nvcc 13.0: the last option counts, so that one appended goes before CC and one
    prepended after it; NVCC_CCBIN serves without any; CUDAHOSTCXX is read by CMake alone.
    """
    for variable in ("NVCC_APPEND_FLAGS", "CC", "NVCC_PREPEND_FLAGS", "NVCC_CCBIN"):
        value = machine.variable(variable).strip()
        named = _option(machine, value) if variable.endswith("FLAGS") else value
        if named:
            return Seen(_described(machine, _words(machine, named)), f"{variable}={value}")
    return _named(machine, (), ("gcc", "g++"))


def _option(machine: Machine, flags: str) -> str:
    """The compiler that nvcc's flags name."""
    words = shlex.split(flags, posix=machine.os != "windows")
    found = ""
    for index, word in enumerate(words):
        name, joined, value = word.partition("=")
        if name in ("-ccbin", "--compiler-bindir"):
            found = value if joined else "".join(words[index + 1 : index + 2])
    return found


def _named(machine: Machine, variables: Sequence[str], usual: Sequence[str]) -> Seen:
    for variable in variables:
        value = machine.variable(variable).strip()
        if value:
            return Seen(_described(machine, _words(machine, value)), f"{variable}={value}")
    present = next((name for name in usual if machine.which(name)), usual[0])
    return Seen(_described(machine, [present]), "PATH")


def _words(machine: Machine, value: str) -> list[str]:
    """The compiler and its arguments, without a cache in front of it."""
    words = [value] if Path(value).exists() else shlex.split(value, posix=machine.os != "windows")
    while len(words) > 1 and Path(words[0]).name in _WRAPPERS:
        words = words[1:]
    if Path(words[0]).is_dir():
        # NVCC_CCBIN may be the folder that the compiler is in.
        words = [str(Path(words[0]) / "gcc")]
    return words


def _described(machine: Machine, words: Sequence[str]) -> dict[str, Any]:
    path = machine.which(words[0])
    if path is None:
        return {"command": words[0], **_NOTHING}
    family, version = _family(machine, path)
    return {"command": words[0], "path": str(path), "family": family, "version": version}


def _family(machine: Machine, path: Path) -> tuple[str | None, str | None]:
    first = next(iter(machine.run([path, "--version"]).out.splitlines()), "")
    # In brackets stands the package, which has numbers as well.
    number = re.search(r"(\d+\.\d+(?:\.\d+)?)", re.sub(r"\([^)]*\)", "", first))
    version = number[1] if number else None
    if "clang" in first.lower():
        return "clang", version
    if re.search(r"gcc|g\+\+|GCC|\bc\+\+|\bcc\b", first):
        full = machine.run([path, "-dumpfullversion"]).out.strip()
        return "gcc", full if re.fullmatch(r"\d+(\.\d+)+", full) else version
    return None, version


@probe("compiler.available", source="PATH")
def available(machine: Machine) -> list[dict[str, Any]]:
    """Every compiler on PATH that nvcc could be told to take."""
    found: dict[tuple[str, Path], dict[str, Any]] = {}
    for folder in machine.folders("PATH"):
        for entry in machine.list(folder):
            if _NAME.fullmatch(entry.name) and machine.which(str(entry)):
                key = (entry.name, entry.resolve())
                if key not in found:
                    family, version = _family(machine, entry)
                    row = {"command": entry.name, "path": str(entry)}
                    found[key] = {**row, "family": family, "version": version}
    return list(found.values())


@probe("compiler.msvc", source="vswhere and variables")
def msvc(machine: Machine) -> Any:
    """Visual C++ with the version of its compiler, of Windows alone."""
    if machine.os != "windows":
        return None
    prompt = bool(machine.variable("VCINSTALLDIR") or machine.variable("VSCMD_ARG_TGT_ARCH"))
    installed, source = machine.variable("VSINSTALLDIR"), "VSINSTALLDIR"
    if not installed:
        installed, source = _by_vswhere(machine), "vswhere"
    tools = machine.variable("VCToolsVersion")
    if installed and not tools:
        auxiliary = Path(installed) / "VC" / "Auxiliary" / "Build"
        tools = machine.read(auxiliary / "Microsoft.VCToolsVersion.default.txt").strip()
    if not tools:
        return Seen(None, source)
    path = Path(installed) / "VC" / "Tools" / "MSVC" / tools / "bin" / "Hostx64" / "x64" / "cl.exe"
    # The tools are numbered 14.x and the compiler in them 19.x, with the same x.
    version = re.sub(r"^14\.(\d+).*", r"19.\1", tools)
    row = {"version": version, "path": str(path), "sdk": _has_sdk(machine), "prompt": prompt}
    return Seen(row, source)


def _by_vswhere(machine: Machine) -> str:
    for variable in ("ProgramFiles(x86)", "ProgramFiles"):
        tool = Path(machine.variable(variable)) / _VSWHERE
        if machine.variable(variable) and tool.is_file():
            options = ("-latest", "-products", "*", "-requires", _MSVC, "-utf8")
            ran = machine.run([tool, *options, "-property", "installationPath"])
            return next(iter(ran.out.splitlines()), "").strip()
    return ""


def _has_sdk(machine: Machine) -> bool:
    if machine.variable("WindowsSdkDir"):
        return True
    programs = machine.variable("ProgramFiles(x86)")
    kits = Path(programs) / "Windows Kits" / "10" / "Include"
    return bool(programs) and any((one / "um").is_dir() for one in machine.list(kits))


@probe("compiler.ninja", source="PATH")
def ninja(machine: Machine) -> dict[str, Any] | None:
    """What compiles several files at a time."""
    path = machine.which("ninja")
    if path is None:
        return None
    return {"path": str(path), "version": machine.run([path, "--version"]).out.strip()}


@probe("compiler.make", source="PATH")
def make(machine: Machine) -> dict[str, str] | None:
    """make, which some packages' builds call."""
    path = machine.which("make")
    return None if path is None else {"path": str(path)}
