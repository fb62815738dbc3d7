# SPDX-License-Identifier: Apache-2.0
"""Reads ELF files: what they need, what they offer, and single symbols by their hash.

Both sizes and both byte orders; only what the loader itself reads, so stripped files work.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from statescan.doctor.symbols.binary import BinaryError, View

_MACHINE_ROWS = """3 i386, 8 mips, 20 ppc, 21 ppc64, 22 s390x, 40 arm, 43 sparc64, 62 x86_64,
183 aarch64, 190 cuda, 224 amdgpu, 243 riscv64, 247 bpf, 258 loongarch64"""
MACHINES = {int(row.split()[0]): row.split()[1] for row in _MACHINE_ROWS.split(",")}
"""Names as ``platform.machine()`` gives them, by ``e_machine``."""

KINDS = {1: "relocatable object", 2: "executable", 3: "shared object", 4: "core dump"}

_SECTION_HEADERS, _PROGRAM_HEADERS, _SYMBOLS, _DYNAMIC = 1 << 14, 1 << 12, 2_000_000, 1 << 14
"""Most of each that is looked at: some times what the largest library of torch has."""

_LOAD, _DYNAMIC_SEGMENT, _INTERPRETER = 1, 2, 3
_NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ = 1, 4, 5, 6, 10
_SONAME, _RPATH, _RUNPATH, _GNU_HASH = 14, 15, 29, 0x6FFFFEF5
_VERDEF, _VERDEFNUM, _VERNEED, _VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_LOCAL, _WEAK = 0, 2


class Segment(NamedTuple):
    """A part of the file that is mapped."""

    kind: int
    offset: int
    address: int
    size: int


class Section(NamedTuple):
    """A named part of the file; a stripped file has none."""

    name: str
    kind: int
    offset: int
    size: int
    entry_size: int


class Symbol(NamedTuple):
    """A name of the dynamic symbol table."""

    name: str
    defined: bool
    weak: bool


@dataclass(frozen=True)
class _Layout:
    """The structures of one size and byte order."""

    header: struct.Struct
    segment: struct.Struct
    section: struct.Struct
    symbol: struct.Struct
    dynamic: struct.Struct
    word: struct.Struct


def _layout(wide: bool, order: str) -> _Layout:
    forms = (
        ("HHIQQQIHHHHHH", "IIQQQQQQ", "IIQQQQIIQQ", "IBBHQQ", "qQ", "Q")
        if wide
        else ("HHIIIIIHHHHHH", "IIIIIIII", "IIIIIIIIII", "IIIBBH", "iI", "I")
    )
    return _Layout(*(struct.Struct(order + form) for form in forms))


class Elf:
    """One ELF file.

    Attributes:
        machine: Name of the CPU.
        wide: Whether it is a 64-bit file.
        big_endian: Its byte order.
        kind: What it is, in words.
        needed: Libraries that it asks for.
        soname: Its own name as a library; empty without one.
        rpath: Folders of DT_RPATH, as written.
        runpath: Folders of DT_RUNPATH, as written.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        if view.size < 52 or view.read(0, 4) != b"\x7fELF":
            raise BinaryError(f"{view.name} is not an ELF file.")
        size, order = view.read(4, 2)
        if size not in (1, 2) or order not in (1, 2):
            raise view.damaged("its ELF header names no size or byte order")
        self.wide, self.big_endian = size == 2, order == 2
        self._order = ">" if self.big_endian else "<"
        self._form = _layout(self.wide, self._order)
        fields = view.unpack(self._form.header, 16)
        self.kind = KINDS.get(fields[0], f"file of ELF type {fields[0]}")
        self.machine = self._machine(fields[1])
        self.flags = fields[6]
        self.segments = self._segments(fields[4], *fields[8:10])
        self._section_table = (fields[5], *fields[10:13])
        self.has_interpreter = any(part.kind == _INTERPRETER for part in self.segments)
        self._entries = self._dynamic_entries()
        self._strings = self._string_table()
        self.needed = [self._name(value) for value in self._entries.get(_NEEDED, ())]
        self.soname = "".join(self._name(value) for value in self._entries.get(_SONAME, ())[:1])
        self.rpath = self._folders(_RPATH)
        self.runpath = self._folders(_RUNPATH)

    def _machine(self, number: int) -> str:
        name = MACHINES.get(number, f"machine {number}")
        # The same number serves both byte orders of this family, and the names differ.
        return "ppc64le" if name == "ppc64" and not self.big_endian else name

    def _segments(self, offset: int, entry_size: int, count: int) -> list[Segment]:
        if not count:
            return []
        if entry_size != self._form.segment.size or count > _PROGRAM_HEADERS:
            raise self.view.damaged("its program headers have no sensible size")
        rows = self.view.rows(self._form.segment, offset, count)
        if self.wide:
            return [Segment(row[0], row[2], row[3], row[5]) for row in rows]
        return [Segment(row[0], row[1], row[2], row[4]) for row in rows]

    def sections(self) -> list[Section]:
        """Its sections; empty where the table was stripped or is damaged."""
        offset, entry_size, count, names = self._section_table
        if not count or entry_size != self._form.section.size or count > _SECTION_HEADERS:
            return []
        try:
            rows = list(self.view.rows(self._form.section, offset, count))
            if names >= len(rows):
                return []
            strings, end = rows[names][4], rows[names][4] + rows[names][5]
            return [
                Section(self.view.text(strings + row[0], end), row[1], row[4], row[5], row[9])
                for row in rows
            ]
        except BinaryError:
            return []

    def offset_of(self, address: int) -> int:
        """Where in the file that address of memory comes from."""
        for part in self.segments:
            if part.kind == _LOAD and part.address <= address < part.address + part.size:
                return part.offset + address - part.address
        raise self.view.damaged(f"address {address:#x} is in no segment")

    def _dynamic_entries(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for part in self.segments:
            if part.kind != _DYNAMIC_SEGMENT:
                continue
            count = min(part.size // self._form.dynamic.size, _DYNAMIC)
            for tag, value in self.view.rows(self._form.dynamic, part.offset, count):
                if tag == 0:
                    break
                found.setdefault(tag & 0xFFFFFFFF, []).append(value)
        return found

    def _string_table(self) -> tuple[int, int]:
        if _STRTAB not in self._entries:
            return (0, 0)
        start = self.offset_of(self._entries[_STRTAB][0])
        size = self._entries.get(_STRSZ, [self.view.size - start])[0]
        return (start, min(start + size, self.view.size))

    def _name(self, index: int) -> str:
        start, end = self._strings
        if not start <= start + index < end:
            raise self.view.damaged("a name is outside of the table of names")
        return self.view.text(start + index, end)

    def _folders(self, tag: int) -> list[str]:
        values = self._entries.get(tag, ())
        return [folder for value in values for folder in self._name(value).split(":") if folder]

    def _table(self, tag: int) -> int | None:
        return self.offset_of(self._entries[tag][0]) if tag in self._entries else None

    def version_needs(self) -> dict[str, list[str]]:
        """Symbol versions that it asks of each library."""
        offset = self._table(_VERNEED)
        found: dict[str, list[str]] = {}
        if offset is None:
            return found
        head, item = struct.Struct(self._order + "HHIII"), struct.Struct(self._order + "IHHII")
        for _ in range(min(self._entries.get(_VERNEEDNUM, [0])[0], 1 << 12)):
            _, count, file, first, step = self.view.unpack(head, offset)
            versions = found.setdefault(self._name(file), [])
            place = offset + first
            for _ in range(min(count, 1 << 12)):
                _, _, _, name, after = self.view.unpack(item, place)
                versions.append(self._name(name))
                if not after:
                    break
                place += after
            if not step:
                break
            offset += step
        return {name: list(dict.fromkeys(versions)) for name, versions in found.items()}

    def version_definitions(self) -> list[str]:
        """Symbol versions that it offers; the first is the library itself."""
        offset = self._table(_VERDEF)
        found: list[str] = []
        if offset is None:
            return found
        head, item = struct.Struct(self._order + "HHHHIII"), struct.Struct(self._order + "II")
        for _ in range(min(self._entries.get(_VERDEFNUM, [0])[0], 1 << 12)):
            *_, count, _, first, step = self.view.unpack(head, offset)
            if count:
                found.append(self._name(self.view.unpack(item, offset + first)[0]))
            if not step:
                break
            offset += step
        return found

    def symbols(self) -> Iterator[Symbol]:
        """Every name of the dynamic symbol table that is not local."""
        table, count = self._symbol_table, self._symbol_count()
        if table is None or not count:
            return
        for number, row in enumerate(self.view.rows(self._form.symbol, table, count)):
            name, info, section = (
                (row[0], row[1], row[3]) if self.wide else (row[0], row[3], row[5])
            )
            if number and name and info >> 4 != _LOCAL:
                yield Symbol(self._name(name), section != 0, info >> 4 == _WEAK)

    @cached_property
    def _symbol_table(self) -> int | None:
        return self._table(_SYMTAB)

    def _symbol_count(self) -> int:
        count = 0
        for part in self.sections():
            if part.kind == 11 and part.entry_size == self._form.symbol.size:
                count = part.size // part.entry_size
        if not count and _HASH in self._entries:
            count = self.view.unpack(self._two, self.offset_of(self._entries[_HASH][0]))[1]
        if not count and _GNU_HASH in self._entries:
            count = self._count_by_gnu_hash()
        if count > _SYMBOLS:
            raise self.view.damaged(f"it claims to have {count} symbols")
        return count

    @cached_property
    def _two(self) -> struct.Struct:
        return struct.Struct(self._order + "II")

    @cached_property
    def _one(self) -> struct.Struct:
        return struct.Struct(self._order + "I")

    def _count_by_gnu_hash(self) -> int:
        """The end of the last chain; a table without exports tells only where they would begin."""
        buckets, first, offset = self._gnu_hash_header[:3]
        last = max((row[0] for row in self.view.rows(self._one, offset, buckets)), default=0)
        if last < first:
            return first
        chain = offset + 4 * buckets
        for number in range(last, last + _SYMBOLS):
            if self.view.unpack(self._one, chain + 4 * (number - first))[0] & 1:
                return number + 1
        raise self.view.damaged("its table of hashes has no end")

    @cached_property
    def _gnu_hash_header(self) -> tuple[int, int, int, int, int, int]:
        """Buckets, first symbol, offset of the buckets; words, shift and offset of the filter."""
        start = self.offset_of(self._entries[_GNU_HASH][0])
        head = struct.Struct(self._order + "IIII")
        buckets, first, words, shift = self.view.unpack(head, start)
        offset = start + 16 + words * self._form.word.size
        self.view.check(offset, 4 * buckets)
        return (buckets, first, offset, words, shift, start + 16)

    def exports(self, name: str) -> bool:
        """Whether it defines that symbol, found through its hash table as the loader does."""
        if _GNU_HASH in self._entries:
            return self._by_gnu_hash(name)
        if _HASH in self._entries:
            return self._by_old_hash(name)
        return False

    def _by_gnu_hash(self, name: str) -> bool:
        buckets, first, offset, words, shift, bloom = self._gnu_hash_header
        code = _gnu_hash(name)
        bits = 8 * self._form.word.size
        if not buckets or not words:
            return False
        (word,) = self.view.unpack(
            self._form.word, bloom + (code // bits) % words * self._form.word.size
        )
        if not (word >> (code % bits)) & (word >> ((code >> min(shift, 31)) % bits)) & 1:
            return False
        (number,) = self.view.unpack(self._one, offset + 4 * (code % buckets))
        if number < first:
            return False
        chain = offset + 4 * buckets
        for index in range(number, number + _SYMBOLS):
            (found,) = self.view.unpack(self._one, chain + 4 * (index - first))
            if found | 1 == code | 1 and self._defines(index, name):
                return True
            if found & 1:
                return False
        return False

    def _by_old_hash(self, name: str) -> bool:
        start = self.offset_of(self._entries[_HASH][0])
        buckets, chains = self.view.unpack(self._two, start)
        if not buckets:
            return False
        code = _old_hash(name)
        (index,) = self.view.unpack(self._one, start + 8 + 4 * (code % buckets))
        # A chain that goes in a circle would never reach the 0 that ends it.
        for _ in range(min(chains, _SYMBOLS)):
            if not index:
                return False
            if self._defines(index, name):
                return True
            (index,) = self.view.unpack(self._one, start + 8 + 4 * (buckets + index))
        return False

    def _defines(self, index: int, name: str) -> bool:
        table = self._symbol_table
        if table is None:
            return False
        row = self.view.unpack(self._form.symbol, table + index * self._form.symbol.size)
        section = row[3] if self.wide else row[5]
        return section != 0 and self._name(row[0]) == name


@lru_cache(maxsize=4096)
def _gnu_hash(name: str) -> int:
    """One name is looked up in many libraries, so its hash is kept."""
    code = 5381
    for byte in name.encode():
        code = (code * 33 + byte) & 0xFFFFFFFF
    return code


def _old_hash(name: str) -> int:
    code = 0
    for byte in name.encode():
        code = ((code << 4) + byte) & 0xFFFFFFFF
        high = code & 0xF0000000
        code = (code ^ (high >> 24)) & ~high
    return code
