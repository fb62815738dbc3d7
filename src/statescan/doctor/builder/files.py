# SPDX-License-Identifier: Apache-2.0
"""Files of a build: its folder, its log, and the source package unpacked.

What is run in them is not known here.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

TAIL_LINES, TAIL_BYTES = 12, 8192
"""How much of the log's end an outcome holds."""


def unpacked(archive: Path, folder: Path) -> Path | None:
    """Unpack a source package; its one top folder, None when it is damaged."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive) as opened:
            root = folder.resolve()
            members = [
                row
                for row in opened.getmembers()
                if (row.isfile() or row.isdir())
                and (root / row.name).resolve().is_relative_to(root)
            ]
            if hasattr(tarfile, "data_filter"):
                opened.extractall(folder, members, filter="data")
            else:
                opened.extractall(folder, members)
    except (tarfile.TarError, OSError, EOFError):
        return None
    found = [entry for entry in folder.iterdir() if (entry / "setup.py").is_file()]
    return found[0] if found else None


def tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log that are not empty."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = stream.read().decode("utf-8", errors="replace")
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-TAIL_LINES:]


def append(log: Path, text: str) -> None:
    """Add lines of our own to the log."""
    with log.open("a", encoding="utf-8") as sink:
        sink.write(text)


def fresh_folder(folder: Path) -> Path:
    """That folder, or one with a number behind its name if it exists."""
    number = 1
    found = folder
    while found.exists() and any(found.iterdir()):
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found
