# SPDX-License-Identifier: Apache-2.0
"""Finds which of many lines may hold one of many literals, in as few passes as can be.

Only bytes are compared; what a literal means is in ``signatures``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

_COMMON = frozenset(b"abcdefghijklmnopqrstuvwxyz /,\n")
"""What logs are full of. A literal with any other character is searched by its piece from there:
one regular expression of all those pieces skips to the next of their first characters, 2 ns a byte
altogether, where each literal searched alone takes 0.5 ns a byte and there are 600."""

_FREQUENT = frozenset(b"_:=()\"'-.")
"""Rare characters that paths and symbols hold many of: used where there is no rarer one."""

_LONGEST_PIECE = 12
_SHORTEST_PIECE = 3


class Search:
    """The literals to look for, without their digits as the lines searched are.

    Args:
        literals: All of them.
        roots: Substrings that literals without a rare character share, the longest first.
    """

    def __init__(self, literals: Iterable[bytes], roots: Iterable[bytes]) -> None:
        known = tuple(roots)
        pieces: dict[bytes, bytes] = {}
        self._by_word: dict[bytes, list[bytes]] = {}
        for literal in dict.fromkeys(literals):
            piece = rare_piece(literal)
            if piece:
                pieces[literal] = piece
            else:
                root = next((root for root in known if root in literal), literal)
                self._by_word.setdefault(root, []).append(literal)
        self._roots = list(self._by_word)
        every = set(pieces.values())
        shortest = {piece: _shortest_prefix(piece, every) for piece in every}
        for literal, piece in pieces.items():
            self._by_word.setdefault(shortest[piece], []).append(literal)
        words = set(shortest.values())
        self._ascii = _compiled(word for word in words if word.isascii())
        self._other = _compiled(word for word in words if not word.isascii())

    def holding(self, keys: list[bytes]) -> dict[bytes, list[bytes]]:
        """Those of the lines that hold a root or a piece, and the literals that they hold."""
        joined = b"\n".join(keys)
        ends: list[int] = []
        words: dict[int, list[bytes]] = {}
        for place, word in self._found(joined):
            if not ends:
                ends.extend(accumulate(len(key) + 1 for key in keys))
            words.setdefault(bisect_right(ends, place), []).append(word)
        for root in self._roots:
            place = joined.find(root)
            if place >= 0 and not ends:
                ends.extend(accumulate(len(key) + 1 for key in keys))
            while place >= 0:
                row = bisect_right(ends, place)
                words.setdefault(row, []).append(root)
                place = joined.find(root, ends[row])
        return {keys[row]: self._literals(keys[row], words[row]) for row in words}

    def _literals(self, key: bytes, words: list[bytes]) -> list[bytes]:
        return [
            literal
            for word in dict.fromkeys(words)
            for literal in self._by_word[word]
            if literal in key
        ]

    def _found(self, joined: bytes) -> Iterator[tuple[int, bytes]]:
        """The pieces, and where they are."""
        for pattern in (self._ascii,) if joined.isascii() else (self._ascii, self._other):
            match = pattern.search(joined)
            while match is not None:
                yield match.start(), match[0]
                # Pieces overlap.
                match = pattern.search(joined, match.start() + 1)


def rare_piece(literal: bytes) -> bytes:
    """The piece by which a literal is searched; empty where all its characters are common."""
    places = [
        place
        for place, character in enumerate(literal)
        if character not in _COMMON and (len(literal) - place >= _SHORTEST_PIECE or place == 0)
    ]
    if not places:
        return b""
    first = min(places, key=lambda place: (literal[place] in _FREQUENT, place))
    return literal[first : first + _LONGEST_PIECE]


def _shortest_prefix(piece: bytes, pieces: set[bytes]) -> bytes:
    return next(piece[:end] for end in range(1, len(piece) + 1) if piece[:end] in pieces)


def _compiled(words: Iterable[bytes]) -> re.Pattern[bytes]:
    """A pattern of words none of which begins with another; it branches once a character."""
    tree: dict[int, dict] = {}  # type: ignore[type-arg]
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
    return re.compile(_branches(tree) or rb"(?!)")


def _branches(tree: dict[int, dict]) -> bytes:  # type: ignore[type-arg]
    rows = [re.escape(bytes([first])) + _branches(rest) for first, rest in sorted(tree.items())]
    return rows[0] if len(rows) == 1 else b"(?:" + b"|".join(rows) + b")" if rows else b""
