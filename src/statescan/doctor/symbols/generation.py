# SPDX-License-Identifier: Apache-2.0
"""Tells from mangled names which torch a binary was built for, and with which C++ strings.

What each name means is data in ``catalog/symbols.json``; no file is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from statescan.doctor import catalog

Version = tuple[int, int]

_NEW_STRING = "NSt7__cxx1112basic_string"
_TOKEN = re.compile(r"(?P<length>\d+)|L[a-z]n?\d+E|S[0-9A-Z]*_|[CD]\d|T\d*_")
"""What has digits in a mangled name: lengths, literals, substitutions, constructors, parameters."""


def is_torch_symbol(name: str) -> bool:
    """Whether torch's libraries must define that name."""
    return _pattern("torch_symbol").search(name) is not None


def is_cuda_only(name: str) -> bool:
    """Whether only CUDA builds of torch define that name."""
    return _pattern("cuda_only").search(name) is not None


def is_torch_library(name: str) -> bool:
    """Whether that is a library of torch itself."""
    return _pattern("torch_libraries").search(name) is not None


def is_cuda_library(name: str) -> bool:
    """Whether that library is in CUDA builds of torch only."""
    return _pattern("cuda_libraries").search(name) is not None


@cache
def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(catalog.load("symbols")[key])


def string_abi(name: str) -> bool | None:
    """Whether a mangled name has C++11 strings in it (True), older ones (False) or none."""
    if _NEW_STRING in name or "B5cxx11" in name:
        return True
    return False if "Ss" in name and "Ss" in _without_identifiers(name) else None


def _without_identifiers(name: str) -> str:
    """A mangled name with a dot for each identifier: identifiers hold any letters."""
    kept = []
    place = 2 if name.startswith("_Z") else 0
    while place < len(name):
        match = _TOKEN.match(name, place)
        if match is None:
            kept.append(name[place])
            place += 1
            continue
        kept.append(".")
        place = match.end()
        if match["length"]:
            # A number of many digits is no length, and converting it would take long.
            place += int(match["length"]) if len(match["length"]) < 6 else len(name)
    return "".join(kept)


def cxx11_abi(torch_names: Iterable[str], other_names: Iterable[str] = ()) -> bool | None:
    """The string ABI of a binary, by what it asks of torch, else by what it asks of libstdc++."""
    for names in (torch_names, other_names):
        seen = [kind for kind in map(string_abi, names) if kind is not None]
        if seen:
            # Of two kinds in one binary, the rarer one comes from a library linked into it.
            return sum(seen) * 2 >= len(seen)
    return None


def generation(names: Iterable[str]) -> dict[str, Any] | None:
    """The range of torch versions whose headers ask for these names.

    Returns:
        ``first`` and ``last`` as "2.3" or None for an open end, and ``because``: the names that
        set the two ends. None where no name tells anything; ``first`` after ``last`` where parts
        of the binary were built for different versions.
    """
    first: tuple[Version, dict[str, str]] | None = None
    last: tuple[Version, dict[str, str]] | None = None
    for name in names:
        for row in meanings(name):
            reason = {"symbol": name, "meaning": row["meaning"]}
            if "first" in row and (first is None or version(row["first"]) > first[0]):
                first = (version(row["first"]), reason)
            if "last" in row and (last is None or version(row["last"]) < last[0]):
                last = (version(row["last"]), reason)
    if first is None and last is None:
        return None
    return {
        "first": _text(first[0]) if first else None,
        "last": _text(last[0]) if last else None,
        "because": [end[1] for end in (first, last) if end],
    }


def meanings(name: str) -> list[dict[str, str]]:
    """The rows of the catalogue that fit that name."""
    return [row for pattern, row in _rows() if pattern.search(name)]


@cache
def _rows() -> tuple[tuple[re.Pattern[str], dict[str, str]], ...]:
    return tuple(
        (re.compile(row["pattern"]), row) for row in catalog.load("symbols")["generations"]
    )


def version(text: str) -> Version:
    """Major and minor number of a version such as "2.7.1+cu128"."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _text(pair: Version) -> str:
    return f"{pair[0]}.{pair[1]}"


def in_range(found: dict[str, Any], torch_version: str) -> bool:
    """Whether a torch of that version is in the range of ``generation``."""
    asked = version(torch_version)
    return (found["first"] is None or version(found["first"]) <= asked) and (
        found["last"] is None or asked <= version(found["last"])
    )


def range_text(found: dict[str, Any]) -> str:
    """The range in words: "torch 2.3 to 2.7", "torch 2.2 or older"."""
    first, last = found["first"], found["last"]
    if first is None:
        return f"torch {last} or older"
    if last is None:
        return f"torch {first} or newer"
    if version(first) > version(last):
        return f"different versions of torch ({last} or older, and {first} or newer)"
    return f"torch {first}" if first == last else f"torch {first} to {last}"
