# SPDX-License-Identifier: Apache-2.0
"""The signatures of tool output, read from the catalogue and indexed by the literals in them.

What a signature means for the verdict is decided by ``rules`` and ``verdict``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from statescan.doctor import catalog
from statescan.doctor.logs.search import Search

DIGITS = b"0123456789"

KINDS = ("cause", "hint", "consequence", "noise", "context", "success", "unknown")
"""What a line of a signature is: the cause itself, a sign of one, a consequence of an earlier line,
something that only looks wrong, a fact about the machine or the run, a success, or an error that
no signature explains."""

_ALWAYS_WANTED = (
    *("prompt", "frame", "traceback", "box", "box-end", "collecting", "building-wheel"),
    *("torch-build", "torch-print", "installed", "uninstall", "uninstalled", "uv-change"),
    *("isolation-path", "isolation-step", "created-wheel", "using-cached"),
)
_MOST_IN_VAIN = 2000
"""Lines found by literals that are looked for no more, after which the search is made anew without
them; that takes 5 ms."""

PER_LOG = 200
PER_ATTEMPT = 12


@dataclass(eq=False)
class Signature:
    """A kind of line.

    Attributes:
        id: Its name.
        kind: One of ``KINDS``.
        slug: The problem that it is a sign of; empty where it is none.
        literals: At least one of them is in every such line.
        regex: Searched in the line without its frame.
        rule: The function of ``rules`` that looks at the lines around; empty for none.
        limit: How many of them are looked at: in a log for context and noise, else in an attempt.
        follow: How many of the next lines belong to it.
        instead_of: Problems that such a line is taken for.
        meaning: Of a consequence or noise: what it says, for people.
    """

    id: str
    kind: str
    slug: str
    literals: tuple[bytes, ...]
    regex: str
    rule: str
    limit: int
    follow: int
    instead_of: tuple[str, ...]
    meaning: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Compiled at the first line that may match: most are never needed."""
        return re.compile(self.regex)

    @property
    def in_whole_log(self) -> bool:
        """Whether the limit is of the log and not of each attempt in it."""
        return self.kind in ("context", "noise")


@cache
def signatures() -> tuple[Signature, ...]:
    """Every signature, in the order of the catalogue."""
    rows = [row for name in catalog.load("patterns")["files"] for row in catalog.load(name)]
    return tuple(
        Signature(
            id=row["id"],
            kind=row["kind"],
            slug=row.get("slug", ""),
            literals=tuple(literal.encode() for literal in row["any"]),
            regex=row["regex"],
            rule=row.get("rule", ""),
            limit=row.get("limit", PER_LOG if row["kind"] == "context" else PER_ATTEMPT),
            follow=row.get("follow", 0),
            instead_of=tuple(row.get("instead_of", ())),
            meaning=row.get("meaning", ""),
        )
        for row in rows
    )


def without_digits(text: bytes) -> bytes:
    """Lines of a build differ in their numbers; without them most are equal."""
    return text.translate(None, DIGITS)


class Index:
    """Which signatures a line may have, by the literals in it.

    A literal is no more looked for while it is spent, or once all its signatures are dropped.
    """

    def __init__(self, rows: Iterable[Signature]) -> None:
        self._rows: dict[bytes, list[Signature]] = {}
        for row in rows:
            for literal in row.literals:
                self._rows.setdefault(literal, []).append(row)
        self.spent: set[bytes] = set()
        self._build()

    def _build(self) -> None:
        self._plain: dict[bytes, list[bytes]] = {}
        for literal, rows in self._rows.items():
            if rows and literal not in self.spent:
                self._plain.setdefault(without_digits(literal), []).append(literal)
        self._search = Search(self._plain, _roots())
        self._in_vain = 0
        self._stale = False

    def holding(self, keys: list[bytes]) -> dict[bytes, list[bytes]]:
        """Those of the lines, without digits, that may hold a literal, and which ones."""
        found = {}
        for key, held in self._search.holding(keys).items():
            literals = [
                literal
                for plain in held
                for literal in self._plain[plain]
                if self._rows[literal] and literal not in self.spent
            ]
            if literals:
                found[key] = literals
            else:
                self._in_vain += 1
        if self._stale and self._in_vain > _MOST_IN_VAIN:
            self._build()
        return found

    def candidates(self, literals: Iterable[bytes], line: bytes) -> dict[bytes, list[Signature]]:
        """Those of the literals that are in the line, with their signatures."""
        return {literal: self._rows[literal] for literal in literals if literal in line}

    def spend(self, literal: bytes) -> None:
        """Look for that literal no more until ``revive``."""
        self.spent.add(literal)
        self._stale = True

    def revive(self) -> None:
        """Look for the spent literals again."""
        self.spent.clear()
        self._build()

    def drop(self, row: Signature) -> None:
        """Look for that signature no more."""
        for literal in row.literals:
            if row in self._rows[literal]:
                self._rows[literal].remove(row)
                self._stale = True

    def narrow(self) -> None:
        """Look only for errors, commands and what an install changed from here on."""
        for row in {row for rows in self._rows.values() for row in rows}:
            if row.kind not in ("cause", "consequence", "success") and row.id not in _ALWAYS_WANTED:
                self.drop(row)
        self._build()


@cache
def _roots() -> tuple[bytes, ...]:
    """Substrings that several literals share, the longest first."""
    return tuple(root.encode() for root in catalog.load("patterns")["roots"])
