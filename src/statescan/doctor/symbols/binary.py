# SPDX-License-Identifier: Apache-2.0
"""Bounded reading of binary files: every offset is checked, and the work has a limit.

The formats themselves are in the modules of their names. A file is hostile until it has been read:
whatever it claims, the answer is data or one ``BinaryError``.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statescan.errors import StatescanError

MOST_TEXT = 32 << 20
"""Bytes of names read from one file; the largest library of torch 2.13 has five million."""

LONGEST_NAME = 1 << 14
"""Bytes of one name; the longest one in torch 2.13 has 600."""


class BinaryError(StatescanError):
    """The file is not a binary, is damaged, or is of a kind that is not read."""


class WrongKindError(BinaryError):
    """The file is sound, and is not an extension module, a shared library or a wheel."""


class View:
    """A buffer that refuses to be read outside of it."""

    def __init__(self, data: bytes | mmap.mmap, name: str = "file") -> None:
        self.data = data
        self.size = len(data)
        self.name = name
        self._text_left = MOST_TEXT

    def unpack(self, form: struct.Struct, offset: int) -> tuple[Any, ...]:
        """The fields at ``offset``."""
        self.check(offset, form.size)
        return form.unpack_from(self.data, offset)

    def rows(self, form: struct.Struct, offset: int, count: int) -> Iterator[tuple[Any, ...]]:
        """``count`` records in a row."""
        self.check(offset, form.size * count)
        return form.iter_unpack(memoryview(self.data)[offset : offset + form.size * count])

    def read(self, offset: int, size: int) -> bytes:
        """Bytes, all of them."""
        self.check(offset, size)
        return bytes(self.data[offset : offset + size])

    def find(self, what: bytes, start: int, end: int) -> int:
        """Where the bytes are within that range; -1 when they are not, or the range is outside."""
        # Offsets of a hostile file can be larger than a search takes.
        if start >= self.size:
            return -1
        return self.data.find(what, start, min(end, self.size))

    def raw_text(self, offset: int, end: int | None = None) -> bytes:
        """The bytes up to the next NUL, which must come before ``end``."""
        end = self.size if end is None else min(end, self.size)
        self.check(offset, 1)
        stop = self.data.find(b"\0", offset, min(end, offset + LONGEST_NAME))
        if stop < 0:
            raise self.damaged("a name has no end")
        self._text_left -= stop - offset + 1
        if self._text_left < 0:
            raise self.damaged("its names are larger than any real file has")
        return bytes(self.data[offset:stop])

    def text(self, offset: int, end: int | None = None) -> str:
        """The same as text; bytes that are no ASCII are written as escapes."""
        return self.raw_text(offset, end).decode("ascii", errors="backslashreplace")

    def check(self, offset: int, size: int) -> None:
        """Refuse a range that is not in the file."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.damaged(f"it ends before byte {offset + size} of {self.size}")

    def damaged(self, why: str) -> BinaryError:
        """The error to raise for content that contradicts itself."""
        return BinaryError(f"{self.name} is cut off or damaged: {why}.")


@contextmanager
def opened(path: Path) -> Iterator[View]:
    """A view of a regular file, mapped and not read; it must not be used afterwards."""
    try:
        # Opening a pipe or a device could wait for ever.
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file" if path.exists() else "absent"
            raise WrongKindError(f"{path.name} is {kind}: a file is needed.")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise BinaryError(f"{path.name} is empty.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield View(data, path.name)
    except (OSError, ValueError, BufferError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BinaryError(f"{path.name} cannot be read: {reason}.") from error


def printable(text: str) -> str:
    """``text`` without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
