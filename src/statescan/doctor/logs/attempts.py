# SPDX-License-Identifier: Apache-2.0
"""Puts the lines that signatures fit into attempts, each from one command to the next.

What is kept is bounded: of a signature, of an attempt, and of the number of attempts.
"""

from __future__ import annotations

import re
from collections import deque

from statescan.doctor.logs import commands
from statescan.doctor.logs.record import SHOWN, Attempt, Frame, Hit
from statescan.doctor.logs.signatures import Signature

_MOST_ATTEMPTS = 48
_NEAR = 150
"""Lines before an error in which its traceback and its surroundings are looked for."""

_MOST_FRAMES = 60
_ENDS = ("failed-building", "metadata-failed", "subprocess-note", "pip-success", "pip-success-any")
"""After one of these, a new start of an installer is another attempt."""


class Recorder:
    """Collects hits in the order of the log.

    Attributes:
        begun: How many attempts began.
    """

    def __init__(self) -> None:
        self.begun = 1
        self._attempts = [Attempt(1)]
        self._in_log: dict[Signature, int] = {}
        self._in_attempt: dict[Signature, int] = {}
        self._frames: deque[Frame] = deque(maxlen=_MOST_FRAMES)
        self._recent: deque[tuple[int, str]] = deque(maxlen=80)
        self._following: Hit | None = None

    def add(
        self, row: Signature, match: re.Match[str], text: str, number: int, indented: bool
    ) -> bool:
        """Note a line.

        Returns:
            Whether it told anything; not when it was one too many of its kind.
        """
        self._following = None
        if row.id == "prompt":
            return self._command(text, number, indented)
        if row.id == "frame":
            self._frames.append(Frame(number, match["path"], (match["name"] or "").strip()))
            return True
        if row.id in ("box", "box-end"):
            self._box(match, number)
            return True
        if row.id == "collecting" and self._attempts[-1].ended and not self._attempts[-1].command:
            self._start(number)
        if row.id in _ENDS:
            self._attempts[-1].ended = True
        counts = self._in_log if row.in_whole_log else self._in_attempt
        counts[row] = counts.get(row, 0) + 1
        if row.limit and counts[row] > row.limit:
            return False
        self._keep(row, match, text, number)
        return True

    def is_full(self, row: Signature) -> bool:
        """Whether no more lines of that kind are noted in the whole log."""
        return row.in_whole_log and 0 < row.limit < self._in_log.get(row, 0)

    def follow(self, text: str) -> None:
        """Note the next line of the hit just added."""
        if self._following is not None:
            self._following.follow.append(text[:SHOWN])

    def finished(self, last: int) -> list[Attempt]:
        """The attempts, once the log has ended at that line."""
        self._attempts[-1].last = last
        return self._attempts

    def _keep(self, row: Signature, match: re.Match[str], text: str, number: int) -> None:
        hit = Hit(
            row,
            number,
            _around(text, match.start(), match.end()),
            {name: value for name, value in match.groupdict().items() if value},
        )
        if row.kind in ("cause", "hint", "unknown"):
            hit.frames = tuple(frame for frame in self._frames if number - frame.number < _NEAR)
            hit.nearby = frozenset(name for place, name in self._recent if number - place < _NEAR)
        self._recent.append((number, row.id))
        self._attempts[-1].hits.append(hit)
        self._following = hit

    def _command(self, text: str, number: int, indented: bool) -> bool:
        command = commands.command_of(text, indented)
        if command:
            self._start(number)
            self._attempts[-1].command = command
            self._attempts[-1].kind = commands.kind_of(command)
        return bool(command)

    def _start(self, number: int) -> None:
        self._attempts[-1].last = number - 1
        self.begun += 1
        self._in_attempt = {}
        self._frames.clear()
        self._recent.clear()
        self._attempts.append(Attempt(number))
        if len(self._attempts) > _MOST_ATTEMPTS:
            # Those without anything in them go first.
            idle = next((a for a in self._attempts[:-8] if not a.hits), self._attempts[0])
            self._attempts.remove(idle)

    def _box(self, match: re.Match[str], number: int) -> None:
        attempt = self._attempts[-1]
        if "count" in match.groupdict():
            attempt.announced = int(match["count"])
            attempt.box = (number, 0)
        elif attempt.box[0]:
            attempt.box = (attempt.box[0], number)


def _around(text: str, start: int, end: int) -> str:
    """The line, or of a long one what is around the match."""
    if len(text) <= SHOWN:
        return text
    start = max(0, min(start - 60, len(text) - SHOWN))
    cut = text[start : start + SHOWN]
    return f"{'...' if start else ''}{cut}{'...' if start + SHOWN < len(text) else ''}"
