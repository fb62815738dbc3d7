# SPDX-License-Identifier: Apache-2.0
"""Finds the libraries of an ELF file as the loader of Linux would, in this Python, without loading.

Gathers only: what a missing library means is for ``judge``.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from statescan.doctor.symbols.binary import BinaryError, View, opened
from statescan.doctor.symbols.elf import Elf

CACHE = Path("/etc/ld.so.cache")

_OLD_CACHE, _NEW_CACHE = b"ld.so-1.7.0\0", b"glibc-ld.so.cache1.1"
_CACHE_ENTRY = struct.Struct("<iIIIQ")
_MOST_CACHED = 200_000

_MOST_LIBRARIES = 400
_MULTIARCH = {
    "x86_64": "x86_64-linux-gnu",
    "aarch64": "aarch64-linux-gnu",
    "i386": "i386-linux-gnu",
}


@dataclass(eq=False)
class Loaded:
    """A library in the process.

    Attributes:
        elf: What was read of it; only valid inside the ``Scope``.
        path: Where it is.
        via: How it was found.
        chain: The libraries that asked for it, the nearest first: their RPATH counts for it.
        origins: What ``$ORIGIN`` stands for.
    """

    elf: Elf
    path: Path
    via: str
    chain: tuple[Loaded, ...] = ()
    origins: tuple[Path, ...] = ()
    missing: list[str] = field(default_factory=list)


class Scope:
    """The libraries of one process, opened and not loaded; use it in a ``with`` statement.

    Args:
        environment: Its variables.
        executable: The program: this Python.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, executable: Path | None = None
    ) -> None:
        variables = os.environ if environment is None else environment
        self._library_path = (
            [folder or "." for folder in variables.get("LD_LIBRARY_PATH", "").split(":")]
            if variables.get("LD_LIBRARY_PATH")
            else []
        )
        self._executable = Path(sys.executable or "/") if executable is None else executable
        self._stack = ExitStack()
        self._program: Loaded | None = None
        self.loaded: list[Loaded] = []
        self.by_name: dict[str, Loaded] = {}

    def __enter__(self) -> Scope:
        try:
            path = self._executable.resolve()
            self._program = self.add(path, "the program", (), (path.parent,))
        except (BinaryError, OSError):
            # A script or a foreign file as the program: only its own folders are then unknown.
            self._program = None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(
        self, path: Path, via: str, chain: tuple[Loaded, ...], origins: Iterable[Path] = ()
    ) -> Loaded:
        """Open a library and, after it, all that it needs; BinaryError when it cannot be."""
        library = self._open(path, via, chain, origins)
        queue = [library]
        while queue:
            asking = queue.pop(0)
            for name in asking.elf.needed:
                if name in self.by_name:
                    continue
                found = self.find(name, asking)
                if found is None or len(self.loaded) >= _MOST_LIBRARIES:
                    asking.missing.append(name)
                    continue
                try:
                    queue.append(
                        self._open(*found, (asking, *asking.chain), (found[0].parent,), name)
                    )
                except BinaryError:
                    asking.missing.append(name)
        return library

    def _open(
        self,
        path: Path,
        via: str,
        chain: tuple[Loaded, ...],
        origins: Iterable[Path],
        name: str = "",
    ) -> Loaded:
        elf = Elf(self._stack.enter_context(opened(path)))
        library = Loaded(elf, path, via, chain, tuple(origins) or (path.parent,))
        self.loaded.append(library)
        for alias in (name, elf.soname, path.name):
            if alias:
                self.by_name.setdefault(alias, library)
        return library

    def find(self, name: str, asking: Loaded) -> tuple[Path, str] | None:
        """Where the loader takes that library from for the library that asks, and why there."""
        if "/" in name:
            return self._fitting(Path(name), "its own path", asking)
        for folder, via in self._folders(asking):
            found = self._fitting(folder / name, via, asking)
            if found:
                return found
        for listed in cached_libraries().get(name, ()):
            found = self._fitting(Path(listed), "ld.so.cache", asking)
            if found:
                return found
        for default in self._defaults(asking.elf.machine):
            found = self._fitting(default / name, "a default folder", asking)
            if found:
                return found
        return None

    def _folders(self, asking: Loaded) -> Iterable[tuple[Path, str]]:
        if not asking.elf.runpath:
            askers = [asking, *asking.chain]
            if self._program is not None and self._program not in askers:
                askers.append(self._program)
            for library in askers:
                # A RUNPATH switches the RPATH of the same library off.
                folders = [] if library.elf.runpath else library.elf.rpath
                for written in folders:
                    yield from self._expanded(written, library, f"RPATH {written}")
        for folder in self._library_path:
            yield Path(folder), "LD_LIBRARY_PATH"
        for written in asking.elf.runpath:
            yield from self._expanded(written, asking, f"RUNPATH {written}")

    def _expanded(self, written: str, library: Loaded, via: str) -> Iterable[tuple[Path, str]]:
        for origin in library.origins:
            folder = written.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", str(origin))
            for token, value in (("LIB", "lib64" if library.elf.wide else "lib"), ("PLATFORM", "")):
                folder = folder.replace(f"${{{token}}}", value).replace(f"${token}", value)
            yield Path(folder), via

    def _defaults(self, machine: str) -> Iterable[Path]:
        if Path(f"/lib/ld-musl-{machine}.so.1").exists():
            return map(Path, ("/lib", "/usr/local/lib", "/usr/lib"))
        folders = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"]
        if machine in _MULTIARCH:
            folders += [f"/lib/{_MULTIARCH[machine]}", f"/usr/lib/{_MULTIARCH[machine]}"]
        return map(Path, folders)

    def _fitting(self, path: Path, via: str, asking: Loaded) -> tuple[Path, str] | None:
        """The path, if a library for the same machine is there: the loader passes over others."""
        try:
            with opened(path) as view:
                head = view.read(0, 20)
        except BinaryError:
            return None
        wanted = asking.elf.view.read(0, 20)
        same = head[:6] == wanted[:6] and head[18:20] == wanted[18:20]
        return (path, via) if same else None

    def visible_to(self, root: Loaded, and_globally: Iterable[str] = ()) -> list[Loaded]:
        """The libraries whose symbols the root sees: its own, the program's and the global ones.

        What Python loads for another module is not among them, even when it is in the process.
        """
        starts = [root, self._program, *(self.by_name.get(name) for name in and_globally)]
        queue = [library for library in starts if library is not None]
        seen: list[Loaded] = []
        while queue:
            library = queue.pop()
            if library not in seen:
                seen.append(library)
                behind = (self.by_name.get(name) for name in library.elf.needed)
                queue += [one for one in behind if one is not None and one not in seen]
        return seen

    @property
    def program_is_known(self) -> bool:
        """Whether the program and all its libraries were read, so that its symbols are known."""
        if self._program is None:
            return False
        return not any(one.missing for one in self.visible_to(self._program))

    def rows(self, root: Loaded) -> list[dict[str, Any]]:
        """What the root needs, then what of the libraries behind it fails: name, path and way."""
        rows = [_row(name, self.by_name.get(name), "") for name in root.elf.needed]
        below = [library for library in self.loaded if root in library.chain]
        rows += [
            _row(name, None, library.path.name) for library in below for name in library.missing
        ]
        return rows


def _row(name: str, library: Loaded | None, needed_by: str) -> dict[str, Any]:
    return {
        "name": name,
        "status": "missing" if library is None else "found",
        "path": None if library is None else str(library.path),
        "via": "" if library is None else library.via,
        "needed_by": needed_by,
    }


def cached_libraries(path: Path = CACHE) -> dict[str, list[str]]:
    """Paths by library name, in the order of the file; empty where it cannot be read."""
    try:
        size = path.stat().st_size
        stamp = path.stat().st_mtime_ns
        return _read_cache(str(path), stamp) if size < 64 << 20 else {}
    except OSError:
        return {}


@lru_cache(maxsize=4)
def _read_cache(path: str, _stamp: int) -> dict[str, list[str]]:
    try:
        return _parse_cache(View(Path(path).read_bytes(), path))
    except (OSError, BinaryError):
        return {}


def _parse_cache(view: View) -> dict[str, list[str]]:
    start = 0
    if view.read(0, min(len(_OLD_CACHE), view.size)) == _OLD_CACHE:
        # The old form comes first, and the new one starts at the next multiple of eight.
        (count,) = view.unpack(struct.Struct("<I"), len(_OLD_CACHE))
        start = (len(_OLD_CACHE) + 4 + 12 * count + 7) // 8 * 8
    if view.read(start, len(_NEW_CACHE)) != _NEW_CACHE:
        return {}
    (count,) = view.unpack(struct.Struct("<I"), start + len(_NEW_CACHE))
    found: dict[str, list[str]] = {}
    for _, name, value, _, _ in view.rows(_CACHE_ENTRY, start + 48, min(count, _MOST_CACHED)):
        found.setdefault(view.text(start + name), []).append(view.text(start + value))
    return found
