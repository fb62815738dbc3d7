# SPDX-License-Identifier: Apache-2.0
"""Advice that guides on the web give for mamba-ssm and causal-conv1d, and what is true of it.

The entries are data of ``catalog/advice.json``; how they look is decided in ``render``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from statescan.doctor import catalog
from statescan.doctor.model import Command

VERDICTS: Mapping[str, str] = {
    "works": "does what it says, under the conditions named",
    "ignored": "changes nothing",
    "harmful": "makes things worse, or hides the cause",
    "outdated": "was right once, for releases that are named",
}
"""What each verdict means."""

_WORD = re.compile(r"[a-z0-9_]+")
_COMMON = frozenset(("pip", "install", "the", "a", "and", "to", "of", "in", "for", "with", "or"))


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        code: ADV and three digits.
        advice: As people write it.
        verdict: One of ``VERDICTS``.
        since: Which release or fact makes it so.
        why: In a sentence or two.
        instead: What to type.
        references: Reports, as in ``model.Problem``.
    """

    code: str
    advice: str
    verdict: str
    since: str
    why: str
    instead: tuple[Command, ...]
    references: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Its JSON form, with example values in place of placeholders."""
        return {
            "code": self.code,
            "advice": self.advice,
            "verdict": self.verdict,
            "since": self.since,
            "why": self.why,
            "instead": [command.to_json() for command in commands(self, {})],
            "references": list(self.references),
        }


@cache
def entries() -> dict[str, Advice]:
    """Every piece of advice by code, in order."""
    rows = [
        Advice(
            *(row["code"], row["advice"], row["verdict"], row["since"], row["why"]),
            tuple(Command.from_json(command) for command in row["instead"]),
            tuple(row["references"]),
        )
        for row in catalog.load("advice")
    ]
    return {row.code: row for row in rows}


def commands(advice: Advice, values: Mapping[str, str]) -> tuple[Command, ...]:
    """What to type instead, for these values of the catalogue's placeholders."""
    return catalog.fill_commands(advice.instead, values)


def search(text: str) -> list[Advice]:
    """Entries that contain every telling word of ``text``, the closest first.

    Args:
        text: A command or a tip as somebody pasted it.
    """
    wanted = _words(text)
    if not wanted:
        return []
    found = [(row, _words(row.advice)) for row in entries().values()]
    matching = [(row, words) for row, words in found if wanted <= words]
    # Of two that contain all words, the one that says less beside them is meant.
    return [row for row, words in sorted(matching, key=lambda pair: len(pair[1] - wanted))]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower())) - _COMMON
