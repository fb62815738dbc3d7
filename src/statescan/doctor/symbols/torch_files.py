# SPDX-License-Identifier: Apache-2.0
"""Reads an installed torch from its files: version, CUDA, string ABI and libraries.

Nothing is imported. Probes that go further are in ``facts``; this serves one folder.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from statescan.doctor import catalog
from statescan.doctor.model import Fact
from statescan.doctor.symbols.binary import BinaryError, opened
from statescan.doctor.symbols.elf import Elf
from statescan.doctor.symbols.generation import is_torch_library
from statescan.errors import ArgumentError

_SUFFIXES = (".so", ".dll", ".dylib")
_ASSIGNED = re.compile(
    r"^(__version__|cuda|hip)(?:\s*:[^=]+)?\s*=\s*(?:'([^']*)'|None)", re.MULTILINE
)


def libraries(folder: Path) -> dict[str, str]:
    """torch's own libraries in its folder, by file name."""
    try:
        files = sorted((folder / "lib").iterdir())
    except OSError:
        return {}
    return {
        file.name: str(file)
        for file in files
        if file.suffix in _SUFFIXES and is_torch_library(file.name)
    }


def beside(path: Path) -> Path | None:
    """The torch for a module at ``path``: of the same site-packages, else of this Python."""
    folders: Iterable[Path] = (
        *path.absolute().parents,
        *(Path(place) for key, place in sysconfig.get_paths().items() if key.endswith("lib")),
    )
    for folder in folders:
        if libraries(folder / "torch"):
            return folder / "torch"
    return None


def locate(given: Path) -> Path:
    """The folder of the package, for a site-packages, the package itself or its ``lib``."""
    for folder in (given, given / "torch", given.parent):
        if libraries(folder):
            return folder
    raise ArgumentError(
        f"--torch: no libraries of torch are in {str(given)!r}.\n"
        "It must be the folder of the package, which has lib/libc10.so or lib/c10.dll in it.\n"
        "Find it with: python -c \"import importlib.util as u; print(u.find_spec('torch').origin)\""
    )


def cxx11_abi(torch_libraries: Mapping[str, str]) -> bool | None:
    """The string ABI of that torch, by which form of a function it has."""
    path = torch_libraries.get("libc10.so")
    if path is None:
        return None
    probes = catalog.load("symbols")["string_abi_probes"]
    try:
        with opened(Path(path)) as view:
            elf = Elf(view)
            for answer in ("true", "false"):
                if any(elf.exports(name) for name in probes[answer]):
                    return answer == "true"
    except BinaryError:
        return None
    return None


def facts(folder: Path) -> dict[str, Fact]:
    """The facts about torch that can be read from that folder."""
    found = libraries(folder)
    written = _version_file(folder)
    values: dict[str, Any] = {
        "torch.version": written.get("__version__"),
        "torch.cuda": written.get("cuda"),
        "torch.hip": written.get("hip"),
        "torch.cxx11_abi": cxx11_abi(found),
        "torch.location": str(folder),
        "torch.libraries": found,
        "torch.devices": None,
        "torch.arch_list": None,
    }
    return {name: Fact(name, value, str(folder)) for name, value in values.items()}


def _version_file(folder: Path) -> dict[str, str | None]:
    try:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")[: 1 << 16]
    except OSError:
        return {}
    return {match[1]: match[2] for match in _ASSIGNED.finditer(text)}
