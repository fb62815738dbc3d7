# SPDX-License-Identifier: Apache-2.0
"""Bars as SVG text: time against the floor, and speed-up over the original, row by row.

Made without a plotting package, so that the same lines give the same bytes everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gpu_bench.rows import CEILINGS, ROWS, UPDATES, Row

Line = Mapping[str, Any]
Bars = list[tuple[str, list[tuple[str, float]]]]
"""Groups of bars: the group's label, and in it (kind, value)."""

COLOURS = {"statescan": "#1d6fb8", "original": "#b5b5b5"}
_BAR, _GAP, _LABEL, _WIDTH, _TOP = 11, 8, 190, 720, 56
_NUMBER = 58
_LAUNCH_MS = 0.002


def row_and_floor(line: Line) -> tuple[Row | None, float | None]:
    """The row of a result and its floor in milliseconds; None where it is not known.

    Nor where it is below what the launch of any kernel takes.
    """
    row = next((row for row in ROWS if row.name == line["row"]), None)
    ceilings = CEILINGS.get(line["gpu"])
    if row is None or ceilings is None:
        return row, None
    floor = row.floor_ms(line["direction"], ceilings)
    return row, floor if floor > _LAUNCH_MS else None


def against_floor(lines: Sequence[Line], title: str) -> str:
    """Times over their floor, on a logarithmic scale; "" where no floor is known."""
    groups: Bars = []
    for line in lines:
        floor = row_and_floor(line)[1] if line["op"] != "model" else None
        if floor:
            values = zip(COLOURS, _times(line), strict=True)
            groups.append((_label(line), [(k, v / floor) for k, v in values if v]))
    return _draw(groups, f"{title}: time over its floor (1 = the floor)") if groups else ""


def speed_ups(lines: Sequence[Line], title: str) -> str:
    """The original's time over ours; "" where there is no original."""
    groups: Bars = []
    for line in lines:
        mine, theirs = _times(line)
        if mine and theirs:
            groups.append((_label(line), [("statescan", theirs / mine)]))
    return _draw(groups, f"{title}: times as fast as the original") if groups else ""


def _times(line: Line) -> tuple[float | None, float | None]:
    """Ours and the original's, in any one unit where less is better."""
    if line["op"] == "model":
        theirs = line["peer_tokens_per_s"]
        return 1 / line["tokens_per_s"], None if theirs is None else 1 / theirs
    if line["op"] in UPDATES:
        return line["device_ms"], line["peer_device_ms"]
    return line["statescan_ms"], line["peer_ms"]


def _label(line: Line) -> str:
    if line["op"] == "model":
        return f"{line['name']} {line['mode'].replace('_', ', ')} b{line['batch']}"
    if line["op"] in UPDATES:
        return f"{line['row']} batch {line['batch']}"
    return f"{line['row']} {line['direction']} {line['dtype']}"


def _draw(groups: Bars, title: str) -> str:
    values = [value for _, bars in groups for _, value in bars]
    low, high = min(1.0, *values), max(2.0, *values)
    room = _WIDTH - _LABEL - _NUMBER

    def place(value: float) -> float:
        return _LABEL + room * math.log(value / low) / math.log(high / low)

    parts, top = [], _TOP
    for label, bars in groups:
        height = _BAR * len(bars)
        middle = top + height / 2 + 4
        parts.append(
            f'<text x="{_LABEL - 8}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>'
        )
        for kind, value in bars:
            start, end = sorted((place(1.0), place(value)))
            width = max(1.0, end - start)
            parts.append(
                f'<rect x="{start:.1f}" y="{top}" width="{width:.1f}" height="{_BAR - 1}" '
                f'fill="{COLOURS[kind]}"/>'
            )
            parts.append(f'<text x="{start + width + 4:.1f}" y="{top + 9}">{value:.2f}</text>')
            top += _BAR
        top += _GAP
    one = place(1.0)
    parts.append(f'<path d="M{one:.1f} {_TOP - 6}V{top - _GAP + 4}" stroke="#333"/>')
    return _page(title, parts, top, {kind for _, bars in groups for kind, _ in bars})


def _page(title: str, parts: Sequence[str], height: int, kinds: set[str]) -> str:
    legend, left = [], _LABEL
    for kind, colour in COLOURS.items():
        if kind in kinds:
            legend.append(f'<rect x="{left}" y="32" width="10" height="10" fill="{colour}"/>')
            legend.append(f'<text x="{left + 14}" y="41">{kind}</text>')
            left += 90
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="10">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="8" y="18" font-size="13" font-weight="bold">{escape(title)}</text>',
            *legend,
            *parts,
            "</svg>",
            "",
        ]
    )
