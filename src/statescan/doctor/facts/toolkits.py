# SPDX-License-Identifier: Apache-2.0
"""Probes of CUDA toolkits: every one that a build could take, and the one that torch takes.

Whether it fits torch or is whole is for checks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.packages import site_folders
from statescan.doctor.facts.probe import Seen, probe

HEADERS = (
    *("cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h"),
    *(
        "cusparse.h",
        "cublas_v2.h",
        "cusolverDn.h",
        "nv/target",
        "thrust/version.h",
        "cub/version.cuh",
    ),
)
"""What the sources of the originals and torch's headers include."""
LIBRARIES = ("cudart", "cublas", "cusparse", "cusolver")

_WINDOWS = "C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA"
_TARGETS = ("x86_64-linux", "sbsa-linux", "aarch64-linux")
_MULTIARCH = ("x86_64-linux-gnu", "aarch64-linux-gnu")


@probe("toolkit.nvcc_on_path", source="PATH")
def nvcc_on_path(machine: Machine) -> list[dict[str, Any]]:
    """Every nvcc, the first one first."""
    return [
        {"path": str(path), "version": nvcc_version(machine, path), "real": str(path.resolve())}
        for path in machine.which_all("nvcc")
    ]


def nvcc_version(machine: Machine, nvcc: Path) -> str | None:
    """ "12.4", as the program says it."""
    ran = machine.run([nvcc, "--version"], timeout=15)
    found = re.search(r"release (\d+\.\d+)", ran.out)
    return found[1] if found else None


@probe("toolkit.build", source="CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda")
def build(machine: Machine) -> Any:
    """The toolkit that torch's builds take; it is not looked at before it is taken."""
    chosen = _chosen(machine)
    if chosen is None:
        return None
    home, via = chosen
    nvcc = _nvcc(machine, Path(home))
    found = {
        "path": home,
        "via": via,
        "exists": Path(home).is_dir(),
        "nvcc": None if nvcc is None else str(nvcc),
        "version": None if nvcc is None else nvcc_version(machine, nvcc),
    }
    return Seen(found, f"{via}={home}" if via.startswith("CUDA") else via)


def _chosen(machine: Machine) -> tuple[str, str] | None:
    """The folder and the rule by which torch.utils.cpp_extension takes it."""
    if machine.variable("CUDA_HOME"):
        return machine.variable("CUDA_HOME"), "CUDA_HOME"
    if "CUDA_PATH" in machine.environ:
        # Set to nothing, it still keeps torch from looking on.
        value = machine.variable("CUDA_PATH")
        return (value, "CUDA_PATH") if value else None
    nvcc = machine.which("nvcc")
    if nvcc is not None:
        return str(nvcc.parent.parent), "PATH"
    if machine.os == "windows":
        homes = [one for one in machine.list(machine.path(_WINDOWS)) if _is_versioned(one)]
        return (str(homes[0]), "Program Files") if homes else None
    usual = machine.path("/usr/local/cuda")
    return (str(usual), "/usr/local") if usual.exists() else None


def _is_versioned(folder: Path) -> bool:
    return re.fullmatch(r"v.*\..*", folder.name) is not None


def _nvcc(machine: Machine, home: Path) -> Path | None:
    path = home / "bin" / ("nvcc.exe" if machine.os == "windows" else "nvcc")
    return path if path.is_file() else None


@probe("toolkit.homes", source="variables, PATH and the usual folders")
def homes(machine: Machine) -> list[dict[str, Any]]:
    """Every toolkit on this machine, that of a build first."""
    found: dict[Path, dict[str, Any]] = {}
    for home, via in _candidates(machine):
        row = found.get(Path(home).resolve())
        if row is not None:
            row["via"] += [] if via in row["via"] else [via]
            continue
        row = _home(machine, home, via)
        if row["nvcc"] or any(row["headers"].values()) or row["libraries"]["cudart"]:
            found[Path(home).resolve()] = row
    return list(found.values())


def _candidates(machine: Machine) -> list[tuple[str, str]]:
    chosen = _chosen(machine)
    rows = [chosen] if chosen is not None else []
    rows += [
        (machine.variable(name), name)
        for name in ("CUDA_HOME", "CUDA_PATH")
        if machine.variable(name)
    ]
    prefixes = [machine.variable("CONDA_PREFIX"), str(machine.base_prefix)]
    conda = [one for one in prefixes if one and (Path(one) / "conda-meta").is_dir()]
    # Its nvcc may be on PATH as well; "conda" says more of where it is from.
    rows += [
        (str(Path(one) / "Library") if machine.os == "windows" else one, "conda") for one in conda
    ]
    rows += [(str(nvcc.parent.parent), "PATH") for nvcc in machine.which_all("nvcc")]
    if machine.os == "windows":
        programs = machine.list(machine.path(_WINDOWS))
        rows += [(str(one), "Program Files") for one in programs if _is_versioned(one)]
    else:
        local = machine.list(machine.path("/usr/local"))
        rows += [
            (str(one), "/usr/local") for one in local if re.fullmatch(r"cuda(-[\d.]+)?", one.name)
        ]
        rows += [(str(machine.path("/opt/cuda")), "/opt")]
    for site in site_folders(machine):
        wheels = machine.list(site / "nvidia")
        rows += [(str(one), "pip") for one in wheels if re.fullmatch(r"cuda_nvcc|cu\d+", one.name)]
    return rows


def _home(machine: Machine, home: str, via: str) -> dict[str, Any]:
    folder = Path(home)
    nvcc = _nvcc(machine, folder)
    return {
        "path": home,
        "version": _version(machine, folder, nvcc),
        "via": [via],
        "nvcc": nvcc is not None,
        "headers": _headers(folder),
        "libraries": {name: _library(folder, name) for name in LIBRARIES},
    }


def _version(machine: Machine, home: Path, nvcc: Path | None) -> str | None:
    """By its nvcc, else by the file that lies in the folder."""
    said = nvcc_version(machine, nvcc) if nvcc is not None else None
    if said:
        return said
    try:
        written = json.loads(machine.read(home / "version.json") or "{}")["cuda"]["version"]
    except (ValueError, KeyError, TypeError):
        written = machine.read(home / "version.txt")
    found = re.search(r"(\d+\.\d+)", str(written))
    return found[1] if found else None


def _headers(home: Path) -> dict[str, bool]:
    folders = [home / "include", *(home / "targets" / one / "include" for one in _TARGETS)]
    # CUDA 13 has these three below cccl.
    folders += [folder / "cccl" for folder in folders]
    return {name: any((one / name).is_file() for one in folders) for name in HEADERS}


def _library(home: Path, name: str) -> str | None:
    """The file that the linker takes for it."""
    folders = [home / "lib64", home / "lib", home / "lib" / "x64"]
    folders += [home / "targets" / one / "lib" for one in _TARGETS]
    folders += [home / "lib" / one for one in _MULTIARCH]
    for folder in folders:
        # nvcc links a static runtime by itself; torch's builds ask for the shared one.
        for file in (f"lib{name}.so", f"{name}.lib"):
            if (folder / file).is_file():
                return str(folder / file)
    return None
