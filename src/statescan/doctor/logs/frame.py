# SPDX-License-Identifier: Apache-2.0
"""Takes off what installers, builders and CI systems put in front of each line.

Only the text of one line is looked at; no signature is anchored to the raw line.
"""

from __future__ import annotations

import re

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|\s?[+-]\d\d:?\d\d)?"
_PREFIX = re.compile(
    rf"""(?:
      \#\d{{1,4}}\s(?:\d{{1,5}}\.\d{{1,3}}\s)?            # BuildKit
    | =>\s(?:=>\s)?\#\s                                    # BuildKit on a terminal
    | \[?{_STAMP}\]?\s(?:\[?(?:INFO|DEBUG)\]?:?\s|(?:stdout|stderr)\s[FP]\s)?   # CI, loggers, pods
    | \[?\d\d:\d\d:\d\d(?:[.,]\d{{1,6}})?\]?\s
    | [\w.-]{{1,40}}\s{{1,20}}\|\s                         # compose, pods
    | \[(?:stdout|stderr|pip|uv|INFO|ERROR|WARNING|\d{{1,3}})\]:?\s
    | \d{{1,5}}\.\d{{2,3}}\s(?=\s|[A-Za-z(\[×╰│/])         # BuildKit's summary
    )""",
    re.VERBOSE,
)
_COLOURS = re.compile(r"\[(?:\d{1,3};){0,6}\d{0,3}m")
_BOX = re.compile(r"^(?:[\s|│┃?�]|\\u25\d\d|鈹\S?)*")


def unframed(text: str) -> str:
    """The line as the tool wrote it, without indentation."""
    if "m" in text and "[" in text:
        # Colours whose escape character was lost when the text was copied.
        text = _COLOURS.sub("", text)
    for _ in range(3):
        match = _PREFIX.match(text.lstrip())
        if match is None:
            break
        text = text.lstrip()[match.end() :]
    return text[_BOX.match(text).end() :].rstrip()  # type: ignore[union-attr]
