# SPDX-License-Identifier: Apache-2.0
"""Probes of the distributions of this environment, read from their metadata folders.

Nothing is imported, and whether versions fit each other is for checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from statescan.doctor.facts.environment import without_password
from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.probe import probe

_FOLDER = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.]*?)-(?P<version>[^-]+)(-py\d.*?)?\.(dist-info|egg-info|egg)",
    re.ASCII,
)


def site_folders(machine: Machine) -> list[Path]:
    """Every folder that packages are installed in, in the order of the search for modules."""
    folders = [
        folder
        for folder in machine.search_path
        if folder.name in ("site-packages", "dist-packages") or folder == machine.site
    ]
    return folders if machine.site in folders else [*folders, machine.site]


def metadata_folders(machine: Machine) -> Iterator[tuple[str, str, Path]]:
    """Name in normal form, version, and metadata of each distribution, the first found first."""
    # `setup.py install` makes a folder or an archive of its own, put before site-packages.
    entries = [one / "EGG-INFO" for one in machine.search_path if is_egg(one)]
    for site in site_folders(machine):
        for entry in machine.list(site):
            if entry.suffix in (".dist-info", ".egg-info") and not entry.name.startswith("~"):
                entries.append(entry)
            elif entry.suffix == ".egg-link":
                entries += _linked(machine, entry)
    for entry in entries:
        found = _FOLDER.fullmatch(entry.parent.name if entry.name == "EGG-INFO" else entry.name)
        name, version = (found["name"], found["version"]) if found else ("", "")
        if not name:
            name, version = _from_metadata(machine, entry)
        if name:
            yield _normal(name), version, entry


def is_egg(place: Path) -> bool:
    """Whether it is what `setup.py install` of old setuptools makes of a package."""
    return place.suffix == ".egg" and place.exists()


def _linked(machine: Machine, link: Path) -> list[Path]:
    """The metadata that `setup.py develop` leaves in the folder of the sources."""
    lines = machine.read(link).splitlines()
    return [
        entry
        for entry in (machine.list(Path(lines[0].strip())) if lines else [])
        if entry.suffix == ".egg-info" and _normal(entry.stem) == _normal(link.stem)
    ]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _from_metadata(machine: Machine, entry: Path) -> tuple[str, str]:
    files = (entry / "METADATA", entry / "PKG-INFO", entry)
    text = next(filter(None, (machine.read(file) for file in files)), "")
    rows = dict(re.findall(r"^(Name|Version):\s*(\S+)", text, re.MULTILINE))
    return rows.get("Name", ""), rows.get("Version", "")


@probe("packages.installed", source="metadata in site-packages")
def installed(machine: Machine) -> dict[str, Any]:
    """Every distribution; of two of one name, that which Python takes."""
    rows: dict[str, Any] = {}
    for name, version, folder in metadata_folders(machine):
        if name not in rows:
            rows[name] = _distribution(machine, version, folder)
    return dict(sorted(rows.items()))


def _distribution(machine: Machine, version: str, folder: Path) -> dict[str, Any]:
    origin = _direct_url(machine, folder)
    info = origin.get("dir_info")
    stem = folder.name.partition("-")[0]
    link = folder.parent / f"{stem.replace('_', '-')}.egg-link"
    by_pip = bool(isinstance(info, dict) and info.get("editable"))
    outside = folder.suffix == ".egg-info" and folder.parent not in site_folders(machine)
    by_link = link.exists() or outside
    url = origin.get("url")
    return {
        "version": version,
        "location": str(folder.parent),
        "installer": machine.read(folder / "INSTALLER").strip() or None,
        "wheel_tags": re.findall(r"^Tag:\s*(\S+)", machine.read(folder / "WHEEL"), re.MULTILINE),
        "editable": by_pip or by_link,
        "direct_url": without_password(url) if isinstance(url, str) else None,
    }


def _direct_url(machine: Machine, folder: Path) -> dict[str, Any]:
    text = machine.read(folder / "direct_url.json")
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@probe("packages.invalid", source="folders in site-packages")
def invalid(machine: Machine) -> list[str]:
    """What pip renames while it removes a package, and leaves when it is stopped."""
    return [
        entry.name
        for site in site_folders(machine)
        for entry in machine.list(site)
        if entry.name.startswith("~")
    ]
