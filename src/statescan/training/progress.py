# SPDX-License-Identifier: Apache-2.0
"""Shows how training goes: a bar where rich is installed and a terminal listens, else plain lines.

Everything goes to stderr; nothing here changes the run.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO


class Progress(Protocol):
    """What the loop tells the user."""

    def step(self, step: int, loss: float, lr: float) -> None:
        """One step is done."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def close(self) -> None:
        """The run is over."""


class Silent:
    """Shows nothing."""

    def step(self, step: int, loss: float, lr: float) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing to end."""


class _Meter:
    """Smoothed loss, speed since the start of this process, and the time that is left."""

    def __init__(self, first: int, steps: int, tokens_per_step: int) -> None:
        self._first, self._steps, self._tokens = first, steps, tokens_per_step
        self._start = time.monotonic()
        self._loss: float | None = None

    def read(self, step: int, loss: float) -> tuple[float, float, float]:
        """Smoothed loss (nats a token), tokens a second, seconds left."""
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        elapsed = max(time.monotonic() - self._start, 1e-9)
        done = step - self._first
        return self._loss, done * self._tokens / elapsed, elapsed / done * (self._steps - step)


class PlainProgress:
    """A line every ``every`` steps."""

    def __init__(
        self, first: int, steps: int, tokens_per_step: int, every: int, file: TextIO | None = None
    ) -> None:
        self._meter = _Meter(first, steps, tokens_per_step)
        self._first, self._steps, self._every = first, steps, every
        self._file = file

    def step(self, step: int, loss: float, lr: float) -> None:
        """Write a line if it is time."""
        smooth, speed, left = self._meter.read(step, loss)
        if step % self._every == 0 or step == self._steps or step == self._first + 1:
            self.note(
                f"step {step}/{self._steps}  loss {smooth:.4f}  lr {lr:.2e}  "
                f"{speed:,.0f} tokens/s  {clock(left)} left"
            )

    def note(self, text: str) -> None:
        """Write a line."""
        # stderr is looked up now, not at import: tests and notebooks replace it.
        file = sys.stderr if self._file is None else self._file
        file.write(text + "\n")
        file.flush()

    def close(self) -> None:
        """Nothing to end."""


class RichProgress:
    """A bar with loss, speed and time left."""

    def __init__(self, first: int, steps: int, tokens_per_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._meter = _Meter(first, steps, tokens_per_step)
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=steps, completed=first)
        self._bar.start()

    def step(self, step: int, loss: float, lr: float) -> None:
        """Move the bar."""
        smooth, speed, left = self._meter.read(step, loss)
        text = f"loss {smooth:.4f}  lr {lr:.2e}  {speed:,.0f} tokens/s  {clock(left)} left"
        self._bar.update(self._task, completed=step, description=text)

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()


def make_progress(first: int, steps: int, tokens_per_step: int, every: int) -> Progress:
    """The best display that this process has."""
    if sys.stderr is not None and sys.stderr.isatty():
        try:
            return RichProgress(first, steps, tokens_per_step)
        except ImportError:
            # rich belongs to an extra, and plain lines tell the same.
            return PlainProgress(first, steps, tokens_per_step, every)
    return PlainProgress(first, steps, tokens_per_step, every)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
