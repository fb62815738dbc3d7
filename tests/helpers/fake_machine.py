# SPDX-License-Identifier: Apache-2.0
"""Makes machines for the probes of the doctor: real folders, and small programs that print.

What a probe has to find in them is said by the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine

NVCC = """\
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2024 NVIDIA Corporation
Built on Thu_Mar_28_02:18:24_PDT_2024
Cuda compilation tools, release {0}, V{0}.131
Build cuda_{0}.r{0}/compiler.34097967_0
"""
GCC = (
    "g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0\nCopyright (C) 2021 Free Software Foundation, Inc.\n"
)


def machine(below: Path, os: str = "linux", **more: Any) -> Machine:
    """A machine whose files are all below one folder; ``environ`` and others may be given."""
    environ: Mapping[str, str] = more.pop("environ", {})
    site = below / "venv" / "lib" / "python3.11" / "site-packages"
    values: dict[str, Any] = {
        "cwd": below / "work",
        "executable": Path(sys.executable),
        "prefix": below / "venv",
        "base_prefix": below / "usr",
        "site": site,
        "search_path": (site,),
        "root": below,
    }
    for folder in (values["cwd"], site):
        folder.mkdir(parents=True, exist_ok=True)
    home = {"HOME": str(below / "home"), "USERPROFILE": str(below / "home"), "PATH": ""}
    return Machine(os=os, environ={**home, **environ}, **{**values, **more})


def write(path: Path, text: str = "") -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def program(path: Path, out: str = "", *, script: str = "") -> Path:
    """An executable that prints a text, or a shell script."""
    body = script or f"cat <<'END'\n{out.rstrip()}\nEND\n"
    write(path, f"#!/bin/sh\nPATH=/usr/bin:/bin\n{body}")
    path.chmod(0o755)
    return path


def nvcc(home: Path, version: str) -> Path:
    """A toolkit's compiler."""
    return program(home / "bin" / "nvcc", NVCC.format(version))


def distribution(site: Path, name: str, version: str, **files: str) -> Path:
    """The metadata of an installed package; a file's first dot is written as two underscores."""
    folder = site / f"{name}-{version}.dist-info"
    write(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        write(folder / file.replace("__", "."), text)
    return folder
