# SPDX-License-Identifier: Apache-2.0
"""Writes the text that the embedded model learned: the King James Bible, public domain.

Needs the program `bible` of Debian's packages bible-kjv and bible-kjv-text (4.38):

    python scripts/kjv_corpus.py kjv.txt

One verse a line without its number, an empty line between chapters.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

SHA256 = "6b40e3f13a6cf83937165995b4868d7eb1f429d0c96ddb8574bea5544101a914"
_VERSE = re.compile(r"^(?P<chapter>[0-9]?[A-Za-z]+ ?\d+):\d* (?P<words>.*)$")


def plain_text(verses: str) -> str:
    """The words of numbered verses, with an empty line where a chapter begins."""
    lines: list[str] = []
    chapter = ""
    for verse in verses.splitlines():
        match = _VERSE.match(verse)
        if match is None:
            continue
        if chapter and match["chapter"] != chapter:
            lines.append("")
        chapter = match["chapter"]
        lines.append(match["words"].strip())
    return "\n".join(lines) + "\n"


def main(target: Path) -> int:
    """Write the text and compare its hash with that of the text the model was trained on."""
    command = ["bible", "-f", "Ge1:1-Re22:21"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    text = plain_text(printed.decode("latin-1")).encode("utf-8")
    target.write_bytes(text)
    found = hashlib.sha256(text).hexdigest()
    print(f"{target}: {len(text)} bytes, SHA-256 {found}")
    if found != SHA256:
        print("this is not the text of the embedded model's card", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
