# SPDX-License-Identifier: Apache-2.0
"""Puts together what one binary says about itself, and what this machine has for it.

Facts only: no value here says that something is wrong, and the file is never loaded.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from statescan.doctor.symbols import generation, gpu_code, lookup, macho, names, torch_files
from statescan.doctor.symbols.binary import BinaryError, View, WrongKindError, opened
from statescan.doctor.symbols.elf import Elf
from statescan.doctor.symbols.pe import Pe

_EMPTY: Mapping[str, Any] = {
    "format": "unknown",
    "problem": "",
    "kind": "",
    "machine": "",
    "bits": 0,
    "byte_order": "",
    "needed": [],
    "soname": "",
    "rpath": [],
    "runpath": [],
    "version_needs": {},
    "undefined_torch": [],
    "undefined_count": 0,
    "cxx11_abi": None,
    "torch_generation": None,
    "cuda_archs": {"cubin": [], "ptx": []},
    "amd_archs": [],
    "cudart": None,
    "links_torch": False,
    "libraries": None,
    "missing": None,
    "versions_missing": None,
}
MOST_UNDEFINED = 20_000
"""Symbols that a binary may need; of torch's own libraries, the Python one needs 5000."""

_NOT_BINARIES = (
    (b"!<arch>\n", "a static library (.a)"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"#!", "a script"),
    (b"<", "a page of HTML or XML"),
    (b"BC\xc0\xde", "LLVM bitcode"),
)


def report(
    path: Path,
    torch_libraries: Mapping[str, str] | None = None,
    *,
    look: bool = True,
    origins: Sequence[Path] = (),
) -> dict[str, Any]:
    """JSON data about one binary; a damaged file gives a report whose ``problem`` says so.

    Args:
        path: An extension module or a shared library.
        torch_libraries: Those of the torch that it is for, by file name, to look its symbols up
            in; by default those beside it or of this Python.
        look: Whether to look on this machine for all its libraries and symbols.
        origins: Folders that ``$ORIGIN`` stands for, when the file is not where it will be.
    """
    try:
        return read(path, torch_libraries, look=look, origins=origins)
    except BinaryError as error:
        return damaged(path, str(error))


def damaged(path: Path, problem: str) -> dict[str, Any]:
    """The report of a file that cannot be read to its end."""
    return {**_named(path), "problem": problem}


def read(
    path: Path,
    torch_libraries: Mapping[str, str] | None = None,
    *,
    look: bool = True,
    origins: Sequence[Path] = (),
) -> dict[str, Any]:
    """The same; raises BinaryError for a damaged file and WrongKindError for another kind."""
    path = Path(path)
    found = _named(path)
    with opened(path) as view:
        kind, undefined = _read_format(view, found)
    if kind not in ("shared object", "executable"):
        raise WrongKindError(
            f"{path.name} is a {kind}: an extension module (.so, .pyd) or a wheel is needed."
        )
    if look and _is_of_this_machine(found):
        if torch_libraries is None:
            folder = torch_files.beside(path)
            torch_libraries = torch_files.libraries(folder) if folder else {}
        found |= lookup.look_around(path, undefined, torch_libraries, origins)
    elif torch_libraries and found["links_torch"]:
        found["missing"] = {
            "torch": lookup.missing_symbols(found, torch_libraries),
            "other": [],
            "searched_torch": True,
            "complete": True,
        }
    return found


def _is_of_this_machine(found: Mapping[str, Any]) -> bool:
    """Whether the loader of this machine, whose rules are known here, would load the file."""
    machine = platform.machine()
    return bool(
        found["format"] == "elf" and sys.platform == "linux" and found["machine"] == machine
    )


def _named(path: Path) -> dict[str, Any]:
    return {
        **{key: _copy(value) for key, value in _EMPTY.items()},
        "path": str(path),
        "module": names.module_name(path.name),
        "python_tag": names.python_tag(path.name),
        "platform_tag": names.platform_tag(path.name),
    }


def _copy(value: Any) -> Any:
    """Lists and mappings anew, so that no two reports share one."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def _read_format(view: View, found: dict[str, Any]) -> tuple[str, list[str]]:
    """Fill the report from the file; returns what kind of file it is and its undefined symbols."""
    head = view.read(0, min(64, view.size))
    if head[:4] == b"\x7fELF":
        found["format"] = "elf"
        return _read_elf(Elf(view), found)
    if head[:2] == b"MZ":
        found["format"] = "pe"
        return _read_pe(Pe(view), found)
    if macho.is_macho(head):
        found["format"] = "macho"
        return _read_macho(macho.read(view), found)
    known = next((what for magic, what in _NOT_BINARIES if head.startswith(magic)), "")
    what = known or "no binary of Linux, Windows or macOS"
    raise WrongKindError(
        f"{view.name} is {what}: an extension module (.so, .pyd) or a wheel is needed."
    )


def _read_elf(elf: Elf, found: dict[str, Any]) -> tuple[str, list[str]]:
    # Position-independent programs have the type of libraries, and an interpreter.
    kind = "executable" if elf.has_interpreter and not elf.soname else elf.kind
    symbols = [symbol for symbol in elf.symbols() if not symbol.defined]
    # What is weak may stay without a definition.
    undefined = [symbol.name for symbol in symbols if not symbol.weak]
    if len(undefined) > MOST_UNDEFINED or sum(map(len, undefined)) > 200 * MOST_UNDEFINED:
        raise elf.view.damaged("it needs more symbols than any real file does")
    _names(found, elf.needed, undefined)
    parts = [(part.name, (part.offset, part.size)) for part in elf.sections() if part.kind != 8]
    found |= {
        "kind": kind,
        "machine": elf.machine,
        "bits": 64 if elf.wide else 32,
        "byte_order": "big" if elf.big_endian else "little",
        "soname": elf.soname,
        "rpath": elf.rpath,
        "runpath": elf.runpath,
        "version_needs": elf.version_needs(),
        "cuda_archs": _gpu_code(elf.view, parts),
        "amd_archs": gpu_code.amd_code(
            elf.view, [place for name, place in parts if name.startswith(".hip_fatbin")]
        ),
    }
    return kind, undefined


def _gpu_code(view: View, parts: Sequence[tuple[str, tuple[int, int]]]) -> dict[str, list[str]]:
    """By sections where there are any; a file that was stripped of their names is searched."""
    places = [place for name, place in parts if name in gpu_code.SECTIONS]
    if parts and not places:
        return {"cubin": [], "ptx": []}
    return gpu_code.gpu_code(view, places)


def _read_pe(pe: Pe, found: dict[str, Any]) -> tuple[str, list[str]]:
    asked = {
        name: symbols for name, symbols in pe.imports.items() if generation.is_torch_library(name)
    }
    _names(found, list(pe.imports), [name for symbols in pe.imports.values() for name in symbols])
    parts = [(part.name, (part.offset, part.size)) for part in pe.sections]
    kind = "shared object" if pe.is_library else "executable"
    found |= {
        "kind": kind,
        "machine": pe.machine,
        "bits": 64 if pe.machine in ("amd64", "arm64", "ia64") else 32,
        "byte_order": "little",
        "imports": pe.imports,
        "undefined_torch": sorted({name for symbols in asked.values() for name in symbols}),
        "cuda_archs": _gpu_code(pe.view, parts),
    }
    return kind, []


def _read_macho(file: macho.MachO, found: dict[str, Any]) -> tuple[str, list[str]]:
    _names(found, list(file.needed), [])
    found |= {
        "kind": file.kind,
        "machine": "+".join(file.machines),
        "bits": 32 if file.machines[0] in ("i386", "arm") else 64,
        "byte_order": "little",
        "soname": file.install_name,
        "rpath": list(file.rpaths),
    }
    return file.kind, []


def _names(found: dict[str, Any], needed: list[str], undefined: list[str]) -> None:
    """What follows from the names of libraries and symbols."""
    torch_names = [name for name in undefined if generation.is_torch_symbol(name)]
    majors = [major for major in map(names.cudart_major, needed) if major]
    found |= {
        "needed": needed,
        "undefined_torch": torch_names,
        "undefined_count": len(undefined),
        "cxx11_abi": generation.cxx11_abi(torch_names, undefined),
        "torch_generation": generation.generation(torch_names),
        "links_torch": any(map(generation.is_torch_library, needed)) or bool(torch_names),
        "cudart": majors[0] if majors else None,
    }
