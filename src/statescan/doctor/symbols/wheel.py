# SPDX-License-Identifier: Apache-2.0
"""Reads a wheel without installing it: its names, its metadata, and each binary inside.

The archive is hostile until it has been read: sizes have limits, and nothing leaves the folder.
"""

from __future__ import annotations

import email.parser
import struct
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from statescan.doctor.symbols import names
from statescan.doctor.symbols.binary import BinaryError, printable
from statescan.doctor.symbols.report import report

MOST_BYTES = 3 << 30
"""Of all binaries of one wheel, unpacked; the largest of the packages concerned have a third."""

_MOST_MEMBERS, _MOST_METADATA, _MOST_BINARIES = 20_000, 1 << 20, 64
_CHUNK = 1 << 20
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, OSError, ValueError),
    *(NotImplementedError, RuntimeError, struct.error, KeyError, OverflowError),
)


def inspect(
    path: Path, torch_libraries: Mapping[str, str] | None = None, *, look: bool = True
) -> dict[str, Any]:
    """JSON data about a wheel; raises BinaryError when the file is no sound wheel.

    Args:
        path: A ``.whl`` file.
        torch_libraries: As for ``report``.
        look: As for ``report``.
    """
    path = Path(path)
    name = names.wheel_name(path.name)
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path.name)
            found = _metadata(archive, members, path.name)
            binaries = [member for member in members if _is_binary(member.filename)]
            reports = _reports(archive, binaries, path.name, torch_libraries, look)
    except _ZIP_ERRORS as error:
        raise BinaryError(
            f"{path.name} is cut off or damaged, or no wheel: {_first_line(error)}."
        ) from error
    return {
        "path": str(path),
        "format": "wheel",
        "distribution": name.distribution,
        "version": name.version,
        "toolkit": name.toolkit,
        "torch": name.torch,
        "cxx11_abi": name.cxx11_abi,
        "tags": list(name.tags),
        **found,
        "binaries": reports,
    }


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return printable(text.splitlines()[0])[:200].rstrip(".")


def _members(archive: zipfile.ZipFile, name: str) -> list[zipfile.ZipInfo]:
    members = archive.infolist()
    if len(members) > _MOST_MEMBERS:
        raise BinaryError(f"{name} has {len(members)} members, more than any real wheel.")
    return [member for member in members if not member.is_dir()]


def _is_binary(name: str) -> bool:
    base = PurePosixPath(name).name
    return base.endswith((".so", ".pyd", ".dll", ".dylib")) or ".so." in base


def _metadata(
    archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], name: str
) -> dict[str, Any]:
    texts = {}
    for kind in ("WHEEL", "METADATA"):
        inside = [
            member
            for member in members
            if member.filename.endswith(f".dist-info/{kind}") and member.filename.count("/") == 1
        ]
        if not inside:
            raise BinaryError(f"{name} has no .dist-info/{kind}, so it is no wheel.")
        with archive.open(inside[0]) as file:
            texts[kind] = file.read(_MOST_METADATA).decode("utf-8", errors="replace")
    wheel = email.parser.HeaderParser().parsestr(texts["WHEEL"])
    metadata = email.parser.HeaderParser().parsestr(texts["METADATA"])
    tags = [str(tag) for tag in wheel.get_all("Tag", [])]
    return {
        "wheel_tags": [
            tag
            for text in tags[:200]
            for tag in names.expand_tags(*(text.split("-") + ["", ""])[:3])
        ],
        "pure": str(wheel.get("Root-Is-Purelib", "")).strip().lower() == "true",
        "metadata_name": str(metadata.get("Name", "")),
        "metadata_version": str(metadata.get("Version", "")),
        "requires": [str(line) for line in metadata.get_all("Requires-Dist", [])][:500],
        "requires_python": str(metadata.get("Requires-Python", "")),
    }


def _reports(
    archive: zipfile.ZipFile,
    binaries: list[zipfile.ZipInfo],
    name: str,
    torch_libraries: Mapping[str, str] | None,
    look: bool,
) -> list[dict[str, Any]]:
    if len(binaries) > _MOST_BINARIES:
        raise BinaryError(
            f"{name} has {len(binaries)} binaries; {_MOST_BINARIES} are read at most."
        )
    total = sum(member.file_size for member in binaries)
    if total > MOST_BYTES:
        raise BinaryError(
            f"{name} would unpack to {total / 1e9:.0f} GB; at most {MOST_BYTES / 1e9:.0f} are read."
        )
    installed = Path(sysconfig.get_paths()["platlib"])
    with tempfile.TemporaryDirectory(prefix="statescan-wheel-") as folder:
        root = Path(folder)
        placed = []
        for member in binaries:
            inside = _safe_path(member.filename, name)
            _unpack(archive, member, root / inside)
            placed.append(inside)
        # All of them first: one may need another.
        found = []
        for inside in placed:
            file = root / inside
            origins = (file.parent, (installed / inside).parent)
            row = report(file, torch_libraries, look=look, origins=origins)
            found.append(_outside(row, folder, str(inside)))
        return found


def _safe_path(name: str, wheel: str) -> PurePosixPath:
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name
    if bad or not path.parts:
        raise BinaryError(f"{wheel} has a member outside of itself: {printable(name)[:200]!r}.")
    return path


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    """Write one member, never more than its header says; a link is written as a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    left = member.file_size
    with archive.open(member) as source, target.open("wb") as sink:
        while left > 0:
            block = source.read(min(_CHUNK, left))
            if not block:
                raise EOFError(f"{printable(member.filename)} ends too early")
            sink.write(block)
            left -= len(block)
        # Reading on to the end is what compares the checksum.
        if source.read(1):
            raise ValueError(f"{printable(member.filename)} is larger than its header says")


def _outside(row: dict[str, Any], folder: str, inside: str) -> dict[str, Any]:
    """The report with the member's name in place of the temporary folder."""

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(folder, "WHEEL")
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        return [renamed(item) for item in value] if isinstance(value, list) else value

    return {**{key: renamed(value) for key, value in row.items()}, "path": inside}
