# SPDX-License-Identifier: Apache-2.0
"""What a scan keeps of a log: the lines that signatures fit, by the attempts they are in.

Plain data of bounded size; no judgement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from statescan.doctor.logs.signatures import Signature

SHOWN = 400
"""Characters kept of a line."""


@dataclass(frozen=True)
class Frame:
    """A frame of a Python traceback."""

    number: int
    path: str
    name: str


@dataclass(eq=False)
class Hit:
    """A line that a signature fits.

    Attributes:
        signature: Which one.
        number: Of the line in the file, from 1.
        text: Of the line, without its frame, cut around the match.
        values: The named groups of the match that are not empty.
        frames: Of the tracebacks shortly before, the innermost last.
        follow: The next lines, as many as the signature asks for.
        nearby: Identifiers of signatures whose lines came shortly before.
    """

    signature: Signature
    number: int
    text: str
    values: dict[str, str]
    frames: tuple[Frame, ...] = ()
    follow: list[str] = field(default_factory=list)
    nearby: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        """The signature's."""
        return self.signature.id

    def in_frames(self, *parts: str) -> bool:
        """Whether one of these is in the path or the function of a frame."""
        return any(part in f"{frame.path} {frame.name}" for frame in self.frames for part in parts)


@dataclass(eq=False)
class Attempt:
    """From one command, or one start of an installer, to the next.

    Attributes:
        first: Number of its first line.
        command: As typed; empty where the log does not show it.
        kind: "install", "run", "probe" or "" (see ``commands``).
        hits: In the order of the log.
        announced: Lines that an installer's frame says it holds; None without a frame.
        box: Numbers of the frame's first and last line, 0 where it is not there.
        last: Number of its last line.
    """

    first: int
    command: str = ""
    kind: str = ""
    hits: list[Hit] = field(default_factory=list)
    announced: int | None = None
    box: tuple[int, int] = (0, 0)
    last: int = 0
    ended: bool = False

    def of(self, *names: str) -> Iterator[Hit]:
        """Its hits of these signatures."""
        return (hit for hit in self.hits if hit.id in names)

    def of_kind(self, *kinds: str) -> Iterator[Hit]:
        """Its hits of signatures of these kinds."""
        return (hit for hit in self.hits if hit.signature.kind in kinds)


@dataclass
class Log:
    """A scanned log.

    Attributes:
        attempts: In order; the oldest are missing where there were very many.
        lines: Number of lines of the file.
        words: Whether there was anything but blank lines.
        tail: The last lines with their numbers, blank ones left out.
        encoding: Of the file.
        size: Of the file in bytes.
    """

    attempts: list[Attempt] = field(default_factory=list)
    lines: int = 0
    words: bool = False
    tail: list[tuple[int, str]] = field(default_factory=list)
    encoding: str = "utf-8"
    size: int = 0

    def of(self, *names: str) -> list[Hit]:
        """All hits of these signatures."""
        return [hit for attempt in self.attempts for hit in attempt.of(*names)]
