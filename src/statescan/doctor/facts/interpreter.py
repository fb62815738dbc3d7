# SPDX-License-Identifier: Apache-2.0
"""Probes of the interpreter, its environment, and of what installs packages into it.

The packages themselves are in ``packages``.
"""

from __future__ import annotations

import platform
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.packages import metadata_folders
from statescan.doctor.facts.probe import Seen, probe


@probe("python.version", source="sys.version_info")
def version(machine: Machine) -> str:
    """As it is written in a requirement; a beta keeps its letter."""
    return platform.python_version()


@probe("python.executable", source="sys.executable")
def executable(machine: Machine) -> str:
    """The path."""
    return str(machine.executable)


@probe("python.implementation", source="sys.implementation")
def implementation(machine: Machine) -> str:
    """CPython or another."""
    return sys.implementation.name


@probe("python.tag", source="sys.version_info")
def tag(machine: Machine) -> str:
    """The tag that wheels for this interpreter have in their name."""
    number = f"{sys.version_info[0]}{sys.version_info[1]}"
    if sys.implementation.name == "pypy":
        return f"pp{number}"
    threads = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return f"cp{number}{threads}" if sys.implementation.name == "cpython" else f"py{number}"


@probe("python.environment", source="sys.prefix")
def environment(machine: Machine) -> Any:
    """What kind of environment this is, and where."""
    prefix = machine.prefix
    if prefix != machine.base_prefix:
        config = prefix / "pyvenv.cfg"
        made_by_uv = re.search(r"^uv\s*=", machine.read(config), re.MULTILINE)
        return Seen({"kind": "uv" if made_by_uv else "venv", "prefix": str(prefix)}, str(config))
    if (prefix / "conda-meta").is_dir():
        kind = "pixi" if ".pixi" in prefix.parts else "conda"
        return Seen({"kind": kind, "prefix": str(prefix)}, str(prefix / "conda-meta"))
    return {"kind": "system", "prefix": str(prefix)}


@probe("python.externally_managed", source="EXTERNALLY-MANAGED")
def externally_managed(machine: Machine) -> Any:
    """The mark lies beside the standard library and does not count inside a venv."""
    if machine.prefix != machine.base_prefix:
        return Seen(False, "a virtual environment")
    folder = Path(sysconfig.get_path("stdlib"))
    if machine.root is not None:
        folder = machine.path(folder)
    mark = folder / "EXTERNALLY-MANAGED"
    return Seen(mark.is_file(), str(mark))


@probe("python.headers", source="sysconfig")
def headers(machine: Machine) -> dict[str, Any]:
    """Where Python.h has to be, and whether it is there."""
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    named = [folder for folder in folders if folder]
    for folder in named:
        if machine.path(folder).joinpath("Python.h").is_file():
            return {"folder": folder, "present": True}
    return {"folder": named[0] if named else "", "present": False}


@probe("python.pip", source="metadata in site-packages")
def pip(machine: Machine) -> dict[str, Any] | None:
    """pip of this environment."""
    for name, number, _ in metadata_folders(machine):
        if name == "pip":
            return {"version": number}
    return None


@probe("python.uv", source="PATH")
def uv(machine: Machine) -> dict[str, Any] | None:
    """uv, which needs no environment of its own."""
    path = machine.which("uv")
    if path is None:
        return None
    found = re.match(r"uv (\S+)", machine.run([path, "--version"]).out)
    return {"version": found[1] if found else "", "path": str(path)}


@probe("python.conda", source="CONDA_EXE and PATH")
def conda(machine: Machine) -> Any:
    """conda or a program like it, and the environment that is active."""
    named = machine.variable("CONDA_EXE") or machine.variable("MAMBA_EXE")
    path = Path(named) if named and Path(named).is_file() else None
    for command in ("conda", "mamba", "micromamba"):
        path = path or machine.which(command)
    if path is None:
        return None
    number, source = _conda_version(machine, path)
    active = machine.variable("CONDA_PREFIX") or None
    return Seen({"version": number, "path": str(path), "prefix": active}, source)


def _conda_version(machine: Machine, path: Path) -> tuple[str, str]:
    """By the record of the package, since conda itself takes a second to tell."""
    for folder in (path.parent.parent, path.resolve().parent.parent):
        for record in machine.list(folder / "conda-meta"):
            found = re.fullmatch(r"(?:conda|mamba)-(\d[\w.]*)-\w+\.json", record.name)
            if found:
                return found[1], str(record)
    found = re.search(r"(\d+\.\d+[\w.]*)", machine.run([path, "--version"]).out)
    return (found[1] if found else ""), f"{path} --version"
