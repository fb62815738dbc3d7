# SPDX-License-Identifier: Apache-2.0
"""How output looks: tables, errors, hints, JSON documents, progress. No command computes here.

Data goes to stdout, everything else to stderr. Colour only repeats what the words say.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from statescan import settings

SCHEMA_VERSION = 1
"""Of every JSON document; it grows when a field changes its meaning or goes away."""

_COLOURS = {"ok": "32", "yes": "32", "chosen": "32", "FAILED": "31", "no": "33", "refused": "33"}
"""ANSI colours of table cells by their text."""


def prepare_streams() -> None:
    """Never fail on a character that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and (stream.encoding or "").lower() not in ("utf-8", "utf8"):
            reconfigure(errors="replace")


def colour_wanted(stream: TextIO) -> bool:
    """A terminal that understands colours, and nobody asks for plain text."""
    return stream.isatty() and not settings.no_color()


def line_width() -> int:
    """Columns to fill: the terminal's, within reason; 80 when there is none."""
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def say(text: str = "") -> None:
    """Print a line of data."""
    print(text, flush=True)


def stream(text: str) -> None:
    """Print a piece of a model's text at once.

    A terminal obeys control characters, and a model may write any: there they are replaced.
    """
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def talk(text: str = "") -> None:
    """Print a line that is not data."""
    print(text, file=sys.stderr, flush=True)


def status(text: str = "") -> None:
    """Show what is being done, on one line of a terminal that the next call replaces."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[: line_width() - 1]}")
        sys.stderr.flush()


def error(message: str) -> None:
    """Print an error message of one or a few lines."""
    talk(f"error: {message}")


def hints(lines: Iterable[str]) -> None:
    """Print what to do next, after a blank line; nothing for no hints."""
    lines = list(dict.fromkeys(lines))
    if lines:
        talk()
    for line in lines:
        talk(f"hint: {line}")


def heading(text: str) -> None:
    """Begin a section."""
    say()
    say(text)
    say("-" * min(len(text), line_width()))


def document(command: str, content: Mapping[str, Any]) -> None:
    """Print the one JSON document of a command; NaN and infinity become strings."""
    whole = {"schema_version": SCHEMA_VERSION, "command": command, **content}
    say(json.dumps(_finite(whole), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> None:
    """Print aligned columns; the last one is wrapped to the width of the line.

    Args:
        headers: Titles.
        rows: Cells as text.
        right: Numbers of the columns whose cells end flush, for figures.
    """
    for line in table_lines(headers, rows, right, line_width(), colour_wanted(sys.stdout)):
        say(line)


def table_lines(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Iterable[int],
    width: int,
    coloured: bool,
) -> list[str]:
    """The lines of ``table``."""
    flush = set(right)
    grid = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in grid) for column in range(len(headers))]
    last = len(headers) - 1
    indent = sum(widths[:last]) + 2 * last
    # A last column narrower than this is harder to read than a line that is too long.
    room = max(width - indent, 24)
    lines = []
    for number, row in enumerate(grid):
        wrapped = textwrap.wrap(row[last], room) or [""]
        if last in flush:
            wrapped = [wrapped[0].rjust(min(widths[last], room)), *wrapped[1:]]
        cells = [
            text.rjust(size) if column in flush else text.ljust(size)
            for column, (text, size) in enumerate(zip(row[:last], widths))
        ] + wrapped[:1]
        if coloured:
            cells = [_style(text, bold=number == 0) for text in cells]
        lines.append("  ".join(cells).rstrip())
        lines += [" " * indent + part for part in wrapped[1:]]
    return lines


class GrowingTable:
    """A table whose rows are printed as they come, in columns of fixed width.

    Args:
        headers: Titles.
        widths: Characters of each column.
        right: Numbers of the columns whose cells end flush.
    """

    def __init__(
        self, headers: Sequence[str], widths: Sequence[int], right: Iterable[int] = ()
    ) -> None:
        self._widths, self._right = widths, set(right)
        self._print(headers, bold=True)

    def add(self, *cells: str) -> None:
        """Print a row."""
        self._print(cells, bold=False)

    def _print(self, cells: Sequence[str], bold: bool) -> None:
        padded = [
            text.rjust(size) if column in self._right else text.ljust(size)
            for column, (text, size) in enumerate(zip(cells, self._widths))
        ]
        if colour_wanted(sys.stdout):
            padded = [_style(text, bold) for text in padded]
        say("  ".join(padded).rstrip())


def _style(cell: str, bold: bool) -> str:
    code = "1" if bold else _COLOURS.get(cell.strip())
    return f"\033[{code}m{cell}\033[0m" if code and cell.strip() else cell


def wrap(text: str, indent: str = "") -> None:
    """Print a paragraph within the width of the line."""
    say(textwrap.fill(text, line_width(), initial_indent=indent, subsequent_indent=indent))


def size(count: float | None) -> str:
    """Bytes for people, "n/a" when unknown."""
    if count is None:
        return "n/a"
    if count < 1024 * 1024:
        return f"{count / 1024:.0f} KiB"
    mebibytes = count / (1024 * 1024)
    return f"{mebibytes:.1f} MiB" if mebibytes < 100 else f"{mebibytes:.0f} MiB"


def figure(value: float) -> str:
    """Three significant digits without an exponent, for rates and times."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
