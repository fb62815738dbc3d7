# SPDX-License-Identifier: Apache-2.0
"""Reads Windows' executables and libraries: the machine, what they import, and what they export.

Names stay as Microsoft's compiler writes them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from statescan.doctor.symbols.binary import BinaryError, View

MACHINES = {0x014C: "x86", 0x8664: "amd64", 0xAA64: "arm64", 0x01C4: "arm", 0x0200: "ia64"}

_COFF, _SECTION = struct.Struct("<HHIIIHH"), struct.Struct("<8sIIIIIIHHI")
_IMPORT, _DELAYED = struct.Struct("<IIIII"), struct.Struct("<IIIIIIII")
_EXPORT, _WORD, _LONG = struct.Struct("<IIHHIIIIIII"), struct.Struct("<I"), struct.Struct("<Q")
_DLLS, _IMPORTS = 4096, 200_000


class Section(NamedTuple):
    """A part of the file and its place in memory."""

    name: str
    address: int
    memory: int
    offset: int
    size: int


class Pe:
    """One PE file.

    Attributes:
        machine: Name of the CPU.
        is_library: Whether it is a DLL; a ``.pyd`` is one.
        sections: Its sections.
        imports: Names that it takes from each DLL.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        if view.size < 64 or view.read(0, 2) != b"MZ":
            raise BinaryError(f"{view.name} is not a PE file.")
        (start,) = view.unpack(_WORD, 0x3C)
        if view.read(start, 4) != b"PE\0\0":
            raise view.damaged("it has no PE header")
        number, count, _, _, _, optional, flags = view.unpack(_COFF, start + 4)
        self.machine = MACHINES.get(number, f"machine {number:#x}")
        self.is_library = bool(flags & 0x2000)
        place = start + 4 + _COFF.size
        (magic,) = struct.unpack("<H", view.read(place, 2))
        if magic not in (0x10B, 0x20B):
            raise view.damaged("its optional header is of no known kind")
        self._wide = magic == 0x20B
        self._directories = self._read_directories(place, optional)
        self.sections = [
            Section(row[0].rstrip(b"\0").decode("ascii", "replace"), row[2], row[1], row[4], row[3])
            for row in view.rows(_SECTION, place + optional, count)
        ]
        self.imports = self._imports()

    def _read_directories(self, place: int, size: int) -> list[tuple[int, int]]:
        """Address and size of each table that the header points to."""
        at = 108 if self._wide else 92
        if size < at + 4:
            return []
        (count,) = self.view.unpack(_WORD, place + at)
        count = min(count, 16, (size - at - 4) // 8)
        rows = self.view.rows(struct.Struct("<II"), place + at + 4, count)
        return [(row[0], row[1]) for row in rows]

    def _directory(self, number: int) -> int:
        return self._directories[number][0] if number < len(self._directories) else 0

    def _offset(self, address: int) -> int:
        for section in self.sections:
            within = address - section.address
            if 0 <= within < max(section.memory, section.size) and within < section.size:
                return section.offset + within
        raise self.view.damaged(f"address {address:#x} is in no section")

    def _imports(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for directory, form, name_at, thunks_at in (
            (1, _IMPORT, 3, (0, 4)),
            (13, _DELAYED, 1, (4,)),
        ):
            address = self._directory(directory)
            if not address:
                continue
            place = self._offset(address)
            for _ in range(_DLLS):
                row = self.view.unpack(form, place)
                if not row[name_at]:
                    break
                names = found.setdefault(self.view.text(self._offset(row[name_at])), [])
                thunks = next((row[at] for at in thunks_at if row[at]), 0)
                names.extend(self._thunks(thunks, _IMPORTS - sum(map(len, found.values()))))
                place += form.size
        return found

    def _thunks(self, address: int, most: int) -> list[str]:
        """Names in one table of imports; those taken by number have none."""
        names: list[str] = []
        if not address:
            return names
        form = _LONG if self._wide else _WORD
        place, by_number = self._offset(address), 1 << (8 * form.size - 1)
        for _ in range(max(most, 0)):
            (value,) = self.view.unpack(form, place)
            if not value:
                break
            if not value & by_number:
                names.append(self.view.text(self._offset(value & 0x7FFFFFFF) + 2))
            place += form.size
        return names

    def exports(self, name: str) -> bool:
        """Whether it offers that name, searched as the loader does: the names are sorted."""
        address = self._directory(0)
        if not address:
            return False
        row = self.view.unpack(_EXPORT, self._offset(address))
        count, names = row[7], row[9]
        low, high, wanted = 0, min(count, self.view.size // 4), name.encode()
        while low < high:
            middle = (low + high) // 2
            (pointer,) = self.view.unpack(_WORD, self._offset(names + 4 * middle))
            found = self.view.raw_text(self._offset(pointer))
            if found == wanted:
                return True
            if found < wanted:
                low = middle + 1
            else:
                high = middle
        return False
