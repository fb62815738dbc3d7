# SPDX-License-Identifier: Apache-2.0
"""Reads macOS binaries: the machines they are for, and the libraries that they load.

Symbols are not read: no release of the packages concerned has code for macOS.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from statescan.doctor.symbols.binary import BinaryError, View

MACHINES = {7: "i386", 0x01000007: "x86_64", 12: "arm", 0x0100000C: "arm64"}
KINDS = {1: "relocatable object", 2: "executable", 6: "shared object", 8: "shared object"}

_THIN = {b"\xcf\xfa\xed\xfe": "<", b"\xce\xfa\xed\xfe": "<", b"\xfe\xed\xfa\xcf": ">"}
_FAT = b"\xca\xfe\xba\xbe"
_LIBRARY_COMMANDS = (0xC, 0x80000018, 0x8000001F, 0x80000023)
_ID, _RPATH = 0xD, 0x8000001C


@dataclass(frozen=True)
class MachO:
    """One Mach-O file.

    Attributes:
        machines: CPUs; several in a universal file.
        kind: What it is, in words.
        needed: Libraries that it loads.
        rpaths: Folders where it looks for them.
        install_name: Its own name as a library.
    """

    machines: tuple[str, ...]
    kind: str
    needed: tuple[str, ...]
    rpaths: tuple[str, ...]
    install_name: str


def is_macho(head: bytes) -> bool:
    """Whether a file that begins so is one; Java's class files share a magic number with it."""
    return head[:4] in _THIN or (head[:4] == _FAT and 0 < int.from_bytes(head[4:8], "big") < 30)


def read(view: View) -> MachO:
    """Read a file, of a universal one the first part and the names of all."""
    head = view.read(0, 8)
    if not is_macho(head):
        raise BinaryError(f"{view.name} is not a Mach-O file.")
    if head[:4] != _FAT:
        return _thin(view, 0, ())
    count = int.from_bytes(head[4:], "big")
    parts = list(view.rows(struct.Struct(">IIIII"), 8, count))
    return _thin(view, parts[0][2], tuple(_machine(part[0]) for part in parts))


def _machine(number: int) -> str:
    return MACHINES.get(number, f"machine {number:#x}")


def _thin(view: View, start: int, machines: tuple[str, ...]) -> MachO:
    magic = view.read(start, 4)
    if magic not in _THIN:
        raise view.damaged("a part of it is no Mach-O file")
    order = _THIN[magic]
    cpu, _, kind, count, size = view.unpack(struct.Struct(f"{order}5I"), start + 4)
    place = start + (28 if magic == b"\xce\xfa\xed\xfe" else 32)
    end = place + size
    view.check(place, size)
    needed, rpaths, install_name = [], [], ""
    command = struct.Struct(f"{order}III")
    for _ in range(min(count, 10_000)):
        if place + command.size > end:
            break
        tag, length, text = view.unpack(command, place)
        if length < 8:
            raise view.damaged("a load command has no length")
        if tag in (*_LIBRARY_COMMANDS, _ID, _RPATH):
            name = view.text(place + text, min(end, place + length))
            if tag == _RPATH:
                rpaths.append(name)
            elif tag == _ID:
                install_name = name
            else:
                needed.append(name)
        place += length
    return MachO(
        machines or (_machine(cpu),),
        KINDS.get(kind, f"file of Mach-O type {kind}"),
        *(tuple(needed), tuple(rpaths), install_name),
    )
