# SPDX-License-Identifier: Apache-2.0
"""How far a compilation is: kernel k of n, elapsed and estimated time, from ninja and the wrapper.

Nothing is printed here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from statescan.doctor import catalog
from statescan.doctor.builder.nvcc_filter import SOURCES
from statescan.doctor.builder.wrapper import Compilation, Wrapper

_STATUS = re.compile(rb"^\s*\[(\d{1,5})/(\d{1,5})\] ")
_RULE = re.compile(r"^build .*: (?:cuda_compile|compile) (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class State:
    """A moment of a compilation.

    Attributes:
        done: Source files that are compiled.
        total: Source files; None while that is not known.
        running: Files that nvcc works on.
        elapsed: Seconds since its start.
        left: Seconds that it will take from now on, by the files so far; None before the first.
    """

    done: int
    total: int | None
    running: tuple[str, ...]
    elapsed: float
    left: float | None

    def text(self) -> str:
        """One line for people."""
        total = "?" if self.total is None else str(self.total)
        parts = [f"{self.done} of {total} files compiled"]
        if self.running:
            parts.append(f"now {', '.join(self.running)}")
        parts.append(f"{clock(self.elapsed)} so far")
        if self.left is not None and self.done != self.total:
            # A file that takes longer than it should tells only that the end is not known.
            more = f"about {clock(self.left)} left" if self.left >= 1 else "longer than expected"
            parts.append(more)
        return "; ".join(parts)


class Progress:
    """Follows one compilation."""

    def __init__(
        self,
        wrapper: Wrapper,
        sources: Path,
        jobs: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._wrapper, self._sources, self._now = wrapper, sources, now
        self._jobs = max(1, jobs)
        self._started = now()
        self._done, self._total = 0, None  # type: tuple[int, int | None]
        self._before = len(wrapper.compilations())
        self._names: tuple[str, ...] = ()

    def line(self, line: bytes) -> bool:
        """Read a line of output; whether it told of a file that is compiled."""
        match = _STATUS.match(line)
        if match:
            self._done, self._total = int(match[1]), int(match[2])
        return bool(match)

    def state(self) -> State:
        """Where it is now."""
        now = self._now()
        rows = self._wrapper.compilations()[self._before :]
        done = max(self._done, sum(row.code == 0 for row in rows))
        names = self._planned()
        total = self._total if self._total is not None else len(names) or None
        running = tuple(row.source for row in rows if row.seconds is None)
        left = None if total is None else self._left(rows, names, now)
        return State(done, total, running, now - self._started, left)

    def _planned(self) -> tuple[str, ...]:
        """File names by ninja's own plan, which is there before its first line of output."""
        if not self._names:
            for plan in self._sources.glob("build/temp*/**/build.ninja"):
                text = plan.read_text(encoding="utf-8", errors="replace")
                self._names = tuple(Path(source).name for source in _RULE.findall(text))
        return self._names

    def _left(self, rows: Sequence[Compilation], names: Sequence[str], now: float) -> float | None:
        """Seconds that nvcc still needs, by its times so far and the usual ratios of the files."""
        ended = {row.source: row.seconds for row in rows if row.seconds is not None}
        expected = sum(_usual(name) for name in ended)
        if not expected:
            return None
        speed = sum(ended.values()) / expected
        spent = {row.source: now - row.started for row in rows if row.seconds is None}
        open_ = [name for name in names if name.endswith(SOURCES) and name not in ended]
        each = [max(0.0, _usual(name) * speed - spent.get(name, 0.0)) for name in open_]
        # As long as the longest of them, however many may run at a time.
        return max([sum(each) / self._jobs, *each], default=0.0)


def _usual(name: str) -> float:
    """Seconds that a file took where it was measured; unknown files count as one kind."""
    found: float = catalog.load("builds")["seconds"].get(name, 100.0)
    return found


def clock(seconds: float) -> str:
    """A time as "40 s", "3 min 05 s" or "1 h 10 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
