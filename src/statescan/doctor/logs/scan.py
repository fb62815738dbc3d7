# SPDX-License-Identifier: Apache-2.0
"""Goes through a log once and keeps the lines that a signature fits.

Most lines of a build log are equal but for their numbers, so a line is first looked up, without its
digits, among those known to hold no literal; the rest are searched together. A literal that very
many lines hold in vain is looked for at the ends of blocks only. No judgement here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import BinaryIO, NamedTuple

from statescan.doctor.logs.attempts import Recorder
from statescan.doctor.logs.frame import unframed
from statescan.doctor.logs.reader import LONGEST, Reader
from statescan.doctor.logs.record import Log
from statescan.doctor.logs.signatures import Index, Signature, signatures, without_digits

_MOST_KNOWN = 8 << 20
"""Bytes of lines remembered as empty, with ``_OVERHEAD`` for each."""

_OVERHEAD = 100
_MOST_MATCHED = 5_000
_CACHED = 600
"""Bytes of a line whose matches are remembered: longer ones hardly ever come again."""

_MOST_SEARCHED = 16 << 20
"""Bytes of lines unlike any before, after which only errors and commands are looked for."""

_MOST_TRIES = 20
"""Lines, equal but for their numbers, that are tried in vain before their kind is given up."""

_IN_VAIN = 8_000
"""Lines of one attempt that hold a literal and tell nothing, after which that literal is spent: it
counts only in the lines at the ends of each block, until the next attempt. Looking at such a line
takes 5 us, and 200 MB may hold 13 million of them."""

_IN_VAIN_LATER = 300
_MOST_IN_VAIN = 200_000
"""Such lines in a log, after which ``_IN_VAIN_LATER`` is the number, and the next attempt changes
nothing: a log made of such pieces must end as well."""

_SAMPLED = 60
"""Lines at each end of a block in which spent literals are still looked for."""

_STAMP = re.compile(rb"^(?:#\d{1,4} \d{1,5}\.\d{1,3} |\d{4}-\d\d-\d\dT[\d:.]{8,18}Z )")
_STAMPED = frozenset(b"#0123456789")
_TAIL = 40


def scan(stream: BinaryIO) -> Log:
    """Read a log to its end.

    Args:
        stream: Of bytes, in any encoding.

    Returns:
        What signatures found, in the order of the file.
    """
    reader = Reader(stream)
    scanner = _Scanner()
    for block in reader.blocks():
        scanner.block(block)
    return scanner.finished(reader)


class _Matched(NamedTuple):
    """What a line gave: its text without frame, its matches, and the literals that it holds."""

    text: str
    indented: bool
    matches: list[tuple[Signature, re.Match[str]]]
    literals: Iterable[bytes]


class _Block:
    """Lines, their keys (without digits), and their numbers in the file."""

    def __init__(self, text: bytes, first: int) -> None:
        self.lines = text.split(b"\n")
        self.lines.pop()
        if _has_long_line(text):
            self.lines = [_ends(line) for line in self.lines]
            text = b"\n".join(self.lines) + b"\n"
        self.keys = without_digits(text).split(b"\n")
        self.keys.pop()
        self._soft = text.count(b"\r\n")
        self._first = first
        self._numbers: list[int] = []
        self.next = first + len(self.lines) - self._soft
        self.blank = text.isspace()

    def number(self, place: int) -> int:
        """Of a line; lines that end in a carriage return share one."""
        if not self._soft:
            return self._first + place
        if not self._numbers:
            hard = (not line.endswith(b"\r") for line in self.lines)
            self._numbers = list(accumulate(hard, initial=self._first))
        return self._numbers[place]

    def tail(self) -> list[tuple[int, bytes]]:
        """The last lines that are not blank, with their numbers."""
        found, number = [], self.next
        for line in reversed(self.lines[-_TAIL:]):
            number -= not line.endswith(b"\r")
            if line.strip():
                found.append((number, line))
        return found[::-1]


class _Scanner:
    def __init__(self) -> None:
        self._index = Index(signatures())
        self._recorder = Recorder()
        self._known: set[bytes] = set()
        self._hot: dict[bytes, list[bytes]] = {}
        self._known_size = 0
        self._matched: dict[bytes, _Matched] = {}
        self._tries: dict[bytes, int] = {}
        self._in_vain: dict[bytes, int] = {}
        self._all_in_vain = 0
        self._searched = 0
        self._narrowed = False
        self._number = 1
        self._words = False
        self._tail: deque[tuple[int, bytes]] = deque(maxlen=_TAIL)

    def block(self, text: bytes) -> None:
        """Look at some whole lines."""
        block = _Block(text, self._number)
        place = 0
        while place < len(block.lines):
            place = self._from(place, block)
        self._number = block.next
        self._words = self._words or not block.blank
        self._tail.extend(block.tail())

    def finished(self, reader: Reader) -> Log:
        """The log, once all is read."""
        return Log(
            attempts=self._recorder.finished(self._number - 1),
            lines=self._number - 1,
            words=self._words,
            tail=[(number, _text(line)) for number, line in self._tail],
            encoding=reader.encoding,
            size=reader.size,
        )

    def _from(self, first: int, block: _Block) -> int:
        """Look at the lines from a place on, up to one that changes what is looked for.

        Returns:
            The place to go on at.
        """
        keys = block.keys[first:] if first else block.keys
        different = set(keys)
        self._learn(different)
        hot = self._hot
        places: list[int] = []
        if not different.isdisjoint(hot):
            places = [place for place, key in enumerate(keys, first) if key in hot]
        sampled: set[int] = set()
        if self._index.spent:
            rows = range(first, len(block.lines))
            sampled = {*rows[:_SAMPLED], *rows[-_SAMPLED:]}
            places = sorted(sampled.union(places))
        for place in places:
            if self._line(block, place, place in sampled):
                return place + 1
        return len(block.lines)

    def _learn(self, keys: set[bytes]) -> None:
        """Find out which of these lines, those that are new, hold a literal."""
        if self._searched > _MOST_SEARCHED and not self._narrowed:
            self._narrowed = True
            self._index.narrow()
            self._hot.clear()
        if self._known_size > _MOST_KNOWN:
            self._known.clear()
            self._hot.clear()
            self._known_size = 0
        new = list(keys.difference(self._known, self._hot))
        if not new:
            return
        size = sum(map(len, new))
        self._searched += size
        self._known_size += size + _OVERHEAD * len(new)
        found = self._index.holding(new)
        self._known.update(new)
        self._known.difference_update(found)
        self._hot.update(found)

    def _line(self, block: _Block, place: int, sampled: bool) -> bool:
        """Look at a line, and tell whether from the next on others are looked for."""
        line, key = block.lines[place], block.keys[place]
        literals = self._hot.get(key, [])
        if sampled:
            literals = [*literals, *self._index.spent]
        if line and line[0] in _STAMPED:
            line = _STAMP.sub(b"", line, count=1)
        kept = None if sampled else self._matched.get(line)
        if kept is None:
            kept = self._match(line, literals)
            if not kept.matches:
                self._missed(key)
            self._cache(line, kept)
        before, told = self._recorder.begun, False
        for row, match in kept.matches:
            if self._recorder.add(row, match, kept.text, block.number(place), kept.indented):
                told = True
            elif self._recorder.is_full(row):
                self._index.drop(row)
                self._matched.clear()
            for following in block.lines[place + 1 : place + 1 + row.follow]:
                self._recorder.follow(unframed(_text(following)))
        if self._recorder.begun != before:
            return self._begin()
        return not told and self._nothing_told(kept.literals)

    def _begin(self) -> bool:
        """In a new attempt all literals count again."""
        self._in_vain.clear()
        if not self._index.spent or self._all_in_vain > _MOST_IN_VAIN:
            return False
        self._index.revive()
        self._known.clear()
        self._changed()
        return True

    def _nothing_told(self, literals: Iterable[bytes]) -> bool:
        """Count a line in vain, and tell whether a literal in it is spent by it."""
        self._all_in_vain += 1
        most = _IN_VAIN if self._all_in_vain < _MOST_IN_VAIN else _IN_VAIN_LATER
        spent = False
        for literal in literals:
            count = self._in_vain[literal] = self._in_vain.get(literal, 0) + 1
            if count > most and literal not in self._index.spent:
                self._index.spend(literal)
                spent = True
        if spent:
            self._changed()
        return spent

    def _changed(self) -> None:
        self._hot.clear()
        self._matched.clear()

    def _missed(self, key: bytes) -> None:
        """A line that only its numbers may still make match is given up after some tries."""
        tries = self._tries.get(key, 0) + 1
        if tries >= _MOST_TRIES:
            self._known.add(key)
            self._hot.pop(key, None)
        if len(self._tries) > _MOST_MATCHED:
            self._tries.clear()
        self._tries[key] = tries

    def _match(self, line: bytes, literals: Iterable[bytes]) -> _Matched:
        held = self._index.candidates(literals, line)
        rows = dict.fromkeys(row for each in held.values() for row in each)
        if not rows:
            return _Matched("", False, [], held)
        raw = _text(line)
        text = unframed(raw)
        matches = [(row, match) for row in rows if (match := row.pattern.search(text)) is not None]
        # A command begins an attempt, to which whatever else is on its line belongs.
        matches.sort(key=lambda pair: pair[0].id != "prompt")
        return _Matched(text, raw[:1] in (" ", "\t"), matches, held)

    def _cache(self, line: bytes, kept: _Matched) -> None:
        if len(line) <= _CACHED:
            if len(self._matched) > _MOST_MATCHED:
                self._matched.clear()
            self._matched[line] = kept


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")


def _has_long_line(text: bytes) -> bool:
    """Whether there may be a line that is longer than is looked at.

    Such a line fills a window of half its length; looking at the windows takes 1% of the time that
    measuring all lines takes.
    """
    step = LONGEST // 2
    return any(text.find(b"\n", at, at + step) < 0 for at in range(0, len(text) - step, step))


def _ends(line: bytes) -> bytes:
    """A long line's two ends."""
    if len(line) <= LONGEST:
        return line
    return line[: LONGEST // 2] + b" " + line[-LONGEST // 2 :]
