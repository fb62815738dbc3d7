# SPDX-License-Identifier: Apache-2.0
"""Finds which symbols of a binary nothing on this machine defines, and where its libraries are.

Libraries are opened and searched by hash, never loaded; judging is for ``judge``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from statescan.doctor.symbols import generation
from statescan.doctor.symbols.binary import BinaryError, opened
from statescan.doctor.symbols.demangle import demangle
from statescan.doctor.symbols.elf import Elf
from statescan.doctor.symbols.pe import Pe
from statescan.doctor.symbols.resolve import Loaded, Scope

_GLOBAL_WITH_TORCH = ("libtorch_global_deps.so",)
_IMPORTED_WITH_TORCH = (*_GLOBAL_WITH_TORCH, "libtorch_python.so", "libtorch.so")
"""What ``import torch`` loads; only the first is loaded so that every module sees its symbols."""


def missing_symbols(
    report: Mapping[str, Any], torch_libraries: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The symbols that a binary asks of torch and that these libraries do not define.

    Args:
        report: From ``report``.
        torch_libraries: Paths by file name, as in the fact ``torch.libraries``.

    Returns:
        For each symbol its name, its readable form, and what its absence means.
    """
    with ExitStack() as stack:
        opened_libraries: list[Elf | Pe] = []
        for path in torch_libraries.values():
            try:
                view = stack.enter_context(opened(Path(path)))
                opened_libraries.append(Pe(view) if report["format"] == "pe" else Elf(view))
            except BinaryError:
                continue
        return described(_absent(report["undefined_torch"], opened_libraries))


def described(names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of ``missing_symbols`` for these names."""
    readable, _ = demangle(names)
    return [
        {
            "symbol": name,
            "readable": readable.get(name, name),
            "meaning": "; ".join(row["meaning"] for row in generation.meanings(name)),
            "cuda_only": generation.is_cuda_only(name),
            "cxx11_abi": generation.string_abi(name),
            "defined_in": "",
        }
        for name in names
    ]


def _absent(names: Iterable[str], libraries: Sequence[Elf | Pe]) -> list[str]:
    return [name for name in names if not any(_exports(library, name) for library in libraries)]


def _exports(library: Elf | Pe, name: str) -> bool:
    try:
        return library.exports(name)
    except BinaryError:
        return False


def look_around(
    path: Path,
    undefined: Sequence[str],
    torch_libraries: Mapping[str, str],
    origins: Sequence[Path] = (),
) -> dict[str, Any]:
    """Where an ELF file's libraries are on this machine, and which symbols none of them defines.

    Args:
        path: The file.
        undefined: The symbols that it needs.
        torch_libraries: Of the torch that it would run with; empty without one.
        origins: Folders that ``$ORIGIN`` stands for, when the file is not where it will be.

    Returns:
        ``libraries``, ``missing`` and ``versions_missing`` of a report.
    """
    with Scope() as scope:
        root = scope.add(path, "given", (), origins)
        rows = scope.rows(root)
        if all(row["status"] == "found" for row in rows) or not torch_libraries:
            return _answer(scope, root, rows, undefined)
    with Scope() as scope:
        for name in _IMPORTED_WITH_TORCH:
            if name in torch_libraries and name not in scope.by_name:
                _try_to_add(scope, Path(torch_libraries[name]))
        root = scope.add(path, "given", (), origins)
        later = scope.rows(root)
        before = {row["name"] for row in rows if row["status"] == "missing"}
        for row in later:
            if row["status"] == "found" and row["name"] in before:
                row["status"] = "after-torch"
        return _answer(scope, root, later, undefined)


def _try_to_add(scope: Scope, path: Path) -> None:
    try:
        scope.add(path, "import torch", ())
    except BinaryError:
        return


def _answer(
    scope: Scope, root: Loaded, rows: list[dict[str, Any]], undefined: Sequence[str]
) -> dict[str, Any]:
    visible = scope.visible_to(root, _GLOBAL_WITH_TORCH)
    found = described(_absent(undefined, [library.elf for library in visible]))
    for row in found:
        # In the process, and yet out of the binary's sight: it does not name that library.
        definers = (one.path.name for one in scope.loaded if _exports(one.elf, row["symbol"]))
        row["defined_in"] = next(definers, "")
    names = [library.path.name for library in visible]
    return {
        "libraries": rows,
        "missing": {
            "torch": [row for row in found if generation.is_torch_symbol(row["symbol"])],
            "other": [row for row in found if not generation.is_torch_symbol(row["symbol"])],
            "searched_torch": any(map(generation.is_torch_library, names)),
            # With a library missing, nobody knows what it would have defined.
            "complete": scope.program_is_known
            and not any(row["status"] == "missing" for row in rows),
        },
        "versions_missing": _versions_missing(scope, root),
    }


def _versions_missing(scope: Scope, root: Loaded) -> list[dict[str, Any]]:
    rows = []
    for name, versions in root.elf.version_needs().items():
        library = scope.by_name.get(name)
        offered = library.elf.version_definitions() if library else []
        lacking = [version for version in versions if version not in offered]
        if library is not None and offered and lacking:
            rows.append(
                {
                    "library": name,
                    "path": str(library.path),
                    "versions": lacking,
                    "has": offered[1:],
                }
            )
    return rows
