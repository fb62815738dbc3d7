# SPDX-License-Identifier: Apache-2.0
"""Reads a log of any encoding as blocks of whole lines in UTF-8, in constant memory.

Nothing is understood here; a line that only a carriage return ends keeps that character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

CHUNK = 1 << 18
"""Bytes read at a time."""

LONGEST = 4096
"""Bytes of a line that are looked at: of a longer one, its two ends."""

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_HIGH = bytes(range(128, 256))
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r"))
_DOUBLY_ENCODED = tuple(text.encode() for text in ("鈺", "鈹", "閿欒", "娌℃湁", "鑷村懡"))
"""Frames and the commonest words of Chinese compilers, when their UTF-8 was read as GBK."""

_READABLE = ("错误", "没有", "致命", "─", "│")
_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)?|[ -/]{0,2}[0-~])?"
)
_BACKSPACES = re.compile(rb"[^\x08\n]?\x08")


class Reader:
    """The blocks of a stream, and what was found out about its encoding.

    Attributes:
        encoding: Of the file: "utf-8", "utf-16-le", "utf-16-be"; "gb18030" or "cp1252" as soon as
            a line was not UTF-8.
        size: Bytes read so far.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.encoding = "utf-8"
        self.size = 0

    def blocks(self) -> Iterator[bytes]:
        """UTF-8 text that ends with a line feed each time; only the last may lack one in the file.

        A carriage return alone, of a progress bar, becomes a return and a line feed: such a line
        end does not count in the file's line numbers.
        """
        rest = b""
        for text in self._decoded():
            text = rest + text
            if text.endswith(b"\r"):
                # The line feed that may belong to it is in the next chunk.
                text, held = text[:-1], b"\r"
            else:
                held = b""
            if b"\r" in text:
                text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\r\n")
            end = text.rfind(b"\n") + 1
            rest = _shortened(text[end:]) + held
            if end:
                yield self._clean(text[:end])
        if rest:
            yield self._clean(rest.rstrip(b"\r") + b"\n")

    def _decoded(self) -> Iterator[bytes]:
        first = self._stream.read(CHUNK)
        self.size = len(first)
        skipped, self.encoding = _encoding(first)
        first = first[skipped:]
        if not self.encoding.startswith("utf-16"):
            yield first
            while chunk := self._stream.read(CHUNK):
                self.size += len(chunk)
                yield chunk
            return
        decoder = codecs.getincrementaldecoder(self.encoding)(errors="replace")
        chunk = first
        while chunk:
            yield decoder.decode(chunk).encode("utf-8", errors="replace")
            chunk = self._stream.read(CHUNK)
            self.size += len(chunk)
        yield decoder.decode(b"", final=True).encode("utf-8", errors="replace")

    def _clean(self, block: bytes) -> bytes:
        """Without control characters, and in UTF-8 throughout."""
        if b"\x00" in block:
            # UTF-16 that a shell appended to 8-bit text.
            block = block.replace(b"\x00", b"")
        if b"\x1b" in block:
            block = _ESCAPES.sub(b"", block)
        if b"\x08" in block:
            block = _BACKSPACES.sub(b"", block)
        try:
            block.decode("utf-8")
        except UnicodeDecodeError:
            if len(block.translate(None, _CONTROLS)) * 20 < len(block) * 19:
                # No text at all: what can be read in it is ASCII.
                return block.translate(None, _CONTROLS + _HIGH)
            block = b"\n".join(map(self._line, block.split(b"\n")))
        if any(mark in block for mark in _DOUBLY_ENCODED):
            block = b"\n".join(map(_once_encoded, block.split(b"\n")))
        return block

    def _line(self, line: bytes) -> bytes:
        if line.isascii():
            return line
        try:
            line.decode("utf-8")
            return line
        except UnicodeDecodeError:
            text, encoding = _legacy(line)
        if self.encoding == "utf-8":
            self.encoding = encoding
        return text.encode("utf-8")


def _once_encoded(line: bytes) -> bytes:
    """A line whose UTF-8 was read as Chinese (GBK) and written as UTF-8 again."""
    if line.isascii():
        return line
    known = line.decode("utf-8", errors="replace").replace("\ufffd", "?")
    restored = known.encode("gb18030", errors="replace")
    # A byte without a partner was lost on the way, so that some signs stay unreadable.
    text = restored.decode("utf-8", errors="replace")
    readable = any(word in text for word in _READABLE)
    return text.encode("utf-8") if readable or "\ufffd" not in text else line


def _encoding(first: bytes) -> tuple[int, str]:
    """How long the byte order mark is, and the encoding by it or by where the zeros are."""
    for mark, name in _BOMS:
        if first.startswith(mark):
            return len(mark), name
    sample = first[:4096]
    if len(sample) >= 4:
        even, odd = sample[::2].count(0), sample[1::2].count(0)
        if max(even, odd) * 5 > len(sample) and min(even, odd) * 20 < len(sample):
            return 0, "utf-16-le" if odd > even else "utf-16-be"
    return 0, "utf-8"


def _shortened(line: bytes) -> bytes:
    """The beginning of a line whose end is not read yet, cut so that it cannot grow."""
    return line if len(line) < 16 * LONGEST else line[:LONGEST] + b" " + line[-LONGEST:]


_DOUBLE = re.compile(rb"[\xa1-\xfe][\xa1-\xfe]")


def _legacy(line: bytes) -> tuple[str, str]:
    """A line that is not UTF-8: Chinese (GBK) where the bytes come in its pairs, else Western.

    Western text has single bytes above 127 between letters, which GBK would join to wrong signs.
    """
    high = len(line) - len(line.translate(None, _HIGH))
    paired = 2 * len(_DOUBLE.findall(line))
    if paired * 10 >= high * 8:
        return line.decode("gb18030", errors="replace"), "gb18030"
    return line.decode("cp1252", errors="replace"), "cp1252"
