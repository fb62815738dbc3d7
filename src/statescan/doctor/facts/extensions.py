# SPDX-License-Identifier: Apache-2.0
"""Probes of the originals' modules on disk: compiled files, packages, and folders that hide them.

Whether they can be imported is asked of a child process, in ``children``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.packages import is_egg, metadata_folders, site_folders
from statescan.doctor.facts.probe import probe
from statescan.doctor.symbols import report
from statescan.doctor.symbols.binary import BinaryError

PACKAGES = ("mamba_ssm", "causal_conv1d")
_PATTERNS = ("selective_scan_cuda*", "causal_conv1d_cuda*")
_SUFFIXES = (".so", ".pyd")
_SHADOWED = (*PACKAGES, "torch", "triton")


def module_files(machine: Machine) -> dict[str, list[Path]]:
    """Compiled modules by name, in the order of the search, the current folder first."""
    found: dict[str, list[Path]] = {}
    for folder in dict.fromkeys((machine.cwd, *machine.search_path, *site_folders(machine))):
        for pattern in _PATTERNS:
            for path in sorted(folder.glob(pattern)):
                if path.suffix in _SUFFIXES and path.is_file():
                    found.setdefault(path.name.partition(".")[0], []).append(path)
    return found


def importable_modules(machine: Machine) -> list[str]:
    """Names of compiled modules whose import can be tried: those that are on the path."""
    return [
        name
        for name, paths in module_files(machine).items()
        if machine.sees_cwd or any(path.parent != machine.cwd for path in paths)
    ]


def package_files(machine: Machine) -> dict[str, Path | None]:
    """The file that an import of each package takes; None where only its metadata is seen."""
    folders = [machine.cwd] if machine.sees_cwd else []
    found: dict[str, Path | None] = {}
    for name in PACKAGES:
        files = (folder / name / "__init__.py" for folder in (*folders, *machine.search_path))
        file = next((one for one in files if one.is_file()), None)
        # An editable install may have nothing but a finder on the path.
        if file is not None or _has_metadata(machine, name):
            found[name] = file
    return found


def _has_metadata(machine: Machine, name: str) -> bool:
    return any(one == name.replace("_", "-") for one, _, _ in metadata_folders(machine))


def importable_packages(machine: Machine) -> list[str]:
    """Names of packages whose import can be tried."""
    return list(package_files(machine))


def _report(path: Path) -> dict[str, Any]:
    try:
        return report.report(path)
    except BinaryError as error:
        return report.damaged(path, str(error))


@probe("extensions.modules", source="files of site-packages and the current folder")
def modules(machine: Machine) -> dict[str, Any]:
    """Compiled modules with what each binary says."""
    sites = site_folders(machine)
    return {
        name: {
            "files": [
                {
                    "path": str(path),
                    "binary": _report(path),
                    "in_site_packages": path.parent in sites or is_egg(path.parent),
                }
                for path in paths
            ],
            "importable": None,
            "error": "",
        }
        for name, paths in module_files(machine).items()
    }


@probe("extensions.python", source="folders of sys.path")
def python(machine: Machine) -> dict[str, Any]:
    """The packages that call the compiled modules."""
    return {
        name: {
            "importable": None,
            "error": "",
            "file": None if path is None else str(path),
            "usable": {},
        }
        for name, path in package_files(machine).items()
    }


@probe("extensions.shadows", source="the current folder and PYTHONPATH")
def shadows(machine: Machine) -> list[dict[str, str]]:
    """Folders that Python finds before the installed package of the same name."""
    sites = site_folders(machine)
    before = [machine.cwd, *(one for one in machine.search_path if one not in sites)]
    rows = []
    for name in _SHADOWED:
        if not any(_is_package(site / name) for site in sites):
            continue
        for folder in before:
            if folder in sites or not _is_package(folder / name):
                continue
            place = folder / name
            rows.append({"module": name, "path": str(place if place.is_dir() else f"{place}.py")})
            break
    return rows


def _is_package(place: Path) -> bool:
    """A folder without __init__.py hides nothing: a regular package behind it comes first."""
    return (place / "__init__.py").is_file() or place.with_name(f"{place.name}.py").is_file()
