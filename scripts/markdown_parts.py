# SPDX-License-Identifier: Apache-2.0
"""Pieces of Markdown that the generators of pages share.

What the pages say is in the generators.
"""

from __future__ import annotations

NOTE = "<!-- Written by scripts/docs; edit the code it is read from. -->\n"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
