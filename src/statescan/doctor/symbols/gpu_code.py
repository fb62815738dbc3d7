# SPDX-License-Identifier: Apache-2.0
"""Reads which GPU code a binary holds, and tells which GPUs can run such code.

Only the headers of CUDA's fat binaries and of AMD's bundles are read: they stay plain when the code
in them is compressed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from statescan.doctor.symbols.binary import View

MAGIC = 0xBA55ED50
SECTIONS = (".nv_fatbin", "__nv_relfatbin", ".nv_fatb", "__nv_fatbin", "__nv_module")
"""Where compilers put them; names of sections in PE files end after eight characters."""

_HEAD = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_PTX, _ELF = 1, 2
_ARCH_SPECIFIC, _FAMILY_SPECIFIC = 1 << 20, 1 << 21
"""Bits of an entry's flags, seen in code made for sm_90a and for sm_100f."""

_MOST_ENTRIES = 200_000
_AMD_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_TARGET = re.compile(r"^(?:sm|compute)_(\d{1,2})(\d)([af]?)$")
_AMD_TARGET = re.compile(rb"(gfx[0-9a-f]{3,5}(?::[\w+:-]{1,60})?)")


def gpu_code(view: View, ranges: Iterable[tuple[int, int]]) -> dict[str, list[str]]:
    """Targets of the machine code (``cubin``) and of the PTX in these parts of the file.

    Args:
        view: The file.
        ranges: Offsets and sizes of the sections with GPU code; where there are none, the whole
            file is searched for the magic number.
    """
    cubin: set[tuple[int, str]] = set()
    ptx: set[tuple[int, str]] = set()
    for kind, arch, suffix in _entries(view, tuple(ranges) or ((0, view.size),)):
        (ptx if kind == _PTX else cubin).add((arch, suffix))
    return {
        "cubin": [f"sm_{arch}{suffix}" for arch, suffix in sorted(cubin)],
        "ptx": [f"compute_{arch}{suffix}" for arch, suffix in sorted(ptx)],
    }


def _entries(view: View, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    left = _MOST_ENTRIES
    for start, size in ranges:
        end = min(start + size, view.size)
        place = view.find(struct.pack("<I", MAGIC), start, end)
        while place >= 0 and left > 0:
            left -= 1
            after = place + 4
            if place + _HEAD.size <= end:
                _, version, head, length = view.unpack(_HEAD, place)
                # The same four bytes may stand anywhere by chance; a header has these values.
                if version == 1 and head == 16 and place + head + length <= end:
                    after = place + head + length
                    for entry in _of_one(view, place + head, after):
                        left -= 1
                        yield entry
            place = view.find(struct.pack("<I", MAGIC), after, end)


def _of_one(view: View, place: int, end: int) -> Iterator[tuple[int, int, str]]:
    while place + _ENTRY.size <= end:
        kind, _, head, size, *_, arch, _, _, flags = view.unpack(_ENTRY, place)
        if head < _ENTRY.size or place + head + size > end:
            return
        if kind in (_PTX, _ELF) and 0 < arch < 1000:
            specific = "a" if flags & _ARCH_SPECIFIC else "f" if flags & _FAMILY_SPECIFIC else ""
            yield kind, arch, specific
        place += head + size


def amd_code(view: View, ranges: Iterable[tuple[int, int]]) -> list[str]:
    """AMD GPUs that the bundles in these sections are for, such as ``gfx90a``."""
    found: set[str] = set()
    for start, size in ranges:
        end = min(start + size, view.size)
        place = view.find(_AMD_MAGIC, start, end)
        for _ in range(1024):
            if place < 0:
                break
            # The table of targets is at the front; the code behind it is not looked at.
            table = view.read(place, min(1 << 14, end - place))
            found.update(match.decode() for match in _AMD_TARGET.findall(table))
            place = view.find(_AMD_MAGIC, place + len(_AMD_MAGIC), end)
    return sorted(found)


def capability(text: str) -> tuple[int, int]:
    """ "9.0" as numbers; (0, 0) for what is no compute capability."""
    match = re.match(r"^(\d{1,2})\.(\d)$", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def runs_on(archs: Mapping[str, Iterable[str]], gpu: tuple[int, int]) -> str | None:
    """How code for these targets runs on a GPU: "cubin", "ptx" (compiled at first use) or None.

    Args:
        archs: ``cubin`` and ``ptx`` of a report.
        gpu: Its compute capability.
    """
    if any(_machine_code_fits(target, gpu) for target in archs.get("cubin", ())):
        return "cubin"
    if any(_ptx_fits(target, gpu) for target in archs.get("ptx", ())):
        return "ptx"
    return None


def _machine_code_fits(target: str, gpu: tuple[int, int]) -> bool:
    """Machine code runs within its major version, on the same minor version and later ones."""
    match = _TARGET.match(target)
    if match is None:
        return False
    made_for = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return made_for == gpu
    return made_for[0] == gpu[0] and made_for[1] <= gpu[1]


def _ptx_fits(target: str, gpu: tuple[int, int]) -> bool:
    """PTX is compiled for any later GPU, unless it uses what only one or one family has."""
    match = _TARGET.match(target)
    if match is None:
        return False
    made_for = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return made_for == gpu
    if match[3] == "f":
        return made_for[0] == gpu[0] and made_for <= gpu
    return made_for <= gpu


def of_machine(devices: Iterable[Any]) -> list[tuple[str, tuple[int, int]]]:
    """Names and compute capabilities from the facts ``torch.devices`` or ``driver.gpus``."""
    rows = [
        (str(row.get("name") or "GPU"), capability(str(row.get("capability") or "")))
        for row in devices
        if isinstance(row, Mapping)
    ]
    return [row for row in rows if row[1] != (0, 0)]
