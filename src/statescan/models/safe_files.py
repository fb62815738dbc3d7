# SPDX-License-Identifier: Apache-2.0
"""Reading files that somebody else wrote: regular files of bounded size, and reasons on one line.

What the files mean is decided by the modules that call this one.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from statescan.errors import CheckpointError

MAX_JSON_BYTES = 16 * 2**20
"""An index of 100 000 tensors takes 10 MiB; as Python objects JSON takes twenty times its size."""

_MAX_REASON = 300


def one_line(text: object) -> str:
    """A text from outside as it may stand in an error: one line, printable, not endless."""
    words = " ".join(str(text).split())
    printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in words)
    return printable if len(printable) <= _MAX_REASON else printable[:_MAX_REASON] + "..."


def reason(error: BaseException) -> str:
    """What an exception says, or its class where it says nothing."""
    if isinstance(error, OSError) and error.strerror:
        # Without the path, which the messages here name themselves.
        return one_line(error.strerror)
    return one_line(error) or type(error).__name__


def exists(path: Path) -> bool:
    """Whether there is something of that name, broken links included."""
    try:
        path.lstat()
    except (OSError, ValueError):
        # A ValueError is what a name with a zero byte gives.
        return False
    return True


def check_regular(path: Path) -> int:
    """Size of a regular file; refuses folders, pipes and devices, which could block or never end.

    Links are followed: the hub's cache consists of them.
    """
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    size = check_regular(path)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} has {size} bytes; {MAX_JSON_BYTES} are the most that is read as JSON"
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        # A RecursionError is what deep nesting gives, a ValueError a number of 5000 digits.
        raise CheckpointError(f"{path} is not valid JSON: {reason(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values
