# SPDX-License-Identifier: Apache-2.0
"""Reads what a cubin says about its kernels: registers, local and shared memory, and its ABI.

A cubin is an ELF file with sections of NVIDIA's own; only those that the build judges are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_REGISTERS, _FRAME, _MIN_STACK, _PARAMETERS = 0x2F, 0x11, 0x12, 0x0A
_SIZED = 4
"""Form of an attribute with a size and a payload; the others fit in their four bytes."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: Registers of a thread.
        local_bytes: Local memory of a thread: spilled registers and arrays that have no register.
        shared_bytes: Static shared memory of a block.
        parameter_bytes: Size of all parameters.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    kind: int
    link: int


class Cubin:
    """One cubin, by its bytes."""

    def __init__(self, data: bytes) -> None:
        if data[:4] != b"\x7fELF" or data[4] != 2:
            raise ValueError("not a cubin: it does not begin as a 64-bit ELF file")
        self.data = data
        self.abi = (data[7], data[8])
        (table,) = struct.unpack_from("<Q", data, 0x28)
        entry_size, count, names = struct.unpack_from("<HHH", data, 0x3A)
        raw = [_SECTION.unpack_from(data, table + i * entry_size) for i in range(count)]
        strings = raw[names][4]
        self.sections = [
            _Section(self._string(strings + row[0]), row[4], row[5], row[1], row[6]) for row in raw
        ]

    def kernels(self) -> dict[str, Resources]:
        """Resources by symbol."""
        symbols = self._symbols()
        values: dict[tuple[int, str], int] = {}
        for attribute, payload in self._attributes(".nv.info"):
            if len(payload) == 8:
                index, value = struct.unpack("<II", payload)
                values[attribute, symbols[index]] = value
        sizes = {section.name: section.size for section in self.sections}
        found = {}
        for section in self.sections:
            if section.name.startswith(".text."):
                name = section.name.removeprefix(".text.")
                stack = max(values.get((_FRAME, name), 0), values.get((_MIN_STACK, name), 0))
                found[name] = Resources(
                    values.get((_REGISTERS, name), 0),
                    max(stack, sizes.get(f".nv.local.{name}", 0)),
                    sizes.get(f".nv.shared.{name}", 0),
                    self._parameter_bytes(name),
                )
        return found

    def _parameter_bytes(self, name: str) -> int:
        for attribute, payload in self._attributes(f".nv.info.{name}"):
            if attribute == _PARAMETERS:
                return int(struct.unpack("<IHH", payload)[2])
        return 0

    def _attributes(self, section_name: str) -> Iterator[tuple[int, bytes]]:
        for section in self.sections:
            if section.name != section_name:
                continue
            place, end = section.offset, section.offset + section.size
            while place < end:
                form, attribute, size = struct.unpack_from("<BBH", self.data, place)
                place += 4
                if form == _SIZED:
                    yield attribute, self.data[place : place + size]
                    place += size

    def _symbols(self) -> list[str]:
        table = next(section for section in self.sections if section.name == ".symtab")
        strings = self.sections[table.link].offset
        places = range(table.offset, table.offset + table.size, _SYMBOL.size)
        return [
            self._string(strings + _SYMBOL.unpack_from(self.data, place)[0]) for place in places
        ]

    def _string(self, place: int) -> str:
        return self.data[place : self.data.index(b"\0", place)].decode()
