# SPDX-License-Identifier: Apache-2.0
"""Options, value types and input reading that several commands share.

No printing (``render``) and no command of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statescan.errors import ArgumentError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float64": "float64",
    "fp64": "float64",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
"""Accepted spellings of dtypes, and torch's names for them."""

MOST_THREADS = 1024
"""More would end the process inside the threading library, with nothing said by us."""

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse has no public name for it."""


class UsageError(ArgumentError):
    """The command line asks for something that does not fit together; exit code 2."""


def add_command(
    subparsers: Subparsers,
    name: str,
    execute: Callable[[argparse.Namespace], int],
    summary: str,
    details: str = "",
) -> argparse.ArgumentParser:
    """A command's parser, with the options that every command has."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}\n\n{details}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(execute=execute)
    add_verbose(parser)
    return parser


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """``--verbose``, accepted before and after the command's name."""
    parser.add_argument(
        *("-v", "--verbose"),
        action="store_true",
        # A default would overwrite what was given before the command's name.
        default=argparse.SUPPRESS,
        help="log decisions, and show tracebacks of errors",
    )


def verbose(args: argparse.Namespace) -> bool:
    """Whether ``--verbose`` was given."""
    return bool(getattr(args, "verbose", False))


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument(
        *("--device",),
        default="auto",
        metavar="NAME",
        help="cpu, cuda, cuda:1, ... (default: CUDA where there is a GPU, else the CPU)",
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """``--threads``."""
    parser.add_argument(
        *("--threads",),
        type=thread_count,
        metavar="N",
        help="CPU threads (default: torch's choice)",
    )


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def natural_int(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def thread_count(text: str) -> int:
    """A number of threads that a process can have."""
    count = _integer(text, 1)
    if count > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{count} is more than {MOST_THREADS}")
    return count


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from error
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def dtype_name(text: str) -> str:
    """torch's name of a dtype, from any accepted spelling."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[text]


def user_text(text: str) -> str:
    """An argument as typed; bytes that are not UTF-8 become U+FFFD instead of lone surrogates."""
    return os.fsencode(text).decode("utf-8", errors="replace")


def read_text(path: str, what: str) -> str:
    """Content of a file, or of stdin for "-"; bytes that are not UTF-8 become U+FFFD."""
    if path == "-":
        return sys.stdin.buffer.read().decode("utf-8", errors="replace")
    try:
        return Path(path).read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"{what}: {path!r} cannot be read: {error.strerror or error}.\n"
            "It must be the path of a readable file.\n"
            "Check the spelling and where the command runs."
        ) from error


def torch_device(name: str) -> torch.device:
    """The device of that name, refused here if this torch or machine does not have it."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        # Reading a value back refuses devices without values, such as meta.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"--device {name}: this torch ({torch.__version__}) cannot use it: {reason}\n"
            "It must be a device such as cpu, or cuda where there is one.\n"
            "Leave --device out, or give cpu."
        ) from error
    return device


def set_threads(count: int | None) -> None:
    """Apply ``--threads``."""
    if count is not None:
        import torch

        torch.set_num_threads(count)
