# SPDX-License-Identifier: Apache-2.0
"""``statescan log FILE``: the cause of a failed install, build or import, from its output.

Reading and judging are in ``doctor/logs``; only options and output are here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from statescan.cli import options, render

if TYPE_CHECKING:
    from statescan.doctor.logs.diagnosis import Diagnosis

_DETAILS = """\
Reads the output of pip, uv, conda, poetry, setup.py, ninja, compilers, docker build or Python, in
any encoding, and tells the cause, the line that proves it, what to type, and what only looks like
the cause. Exit code 0 when everything in it worked, 1 otherwise.

examples:
  pip install mamba-ssm --no-build-isolation -v 2>&1 | statescan log -
  statescan log build.log --json"""


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "log", execute),
        "Tell the cause of a failed install or import from its output.",
        _DETAILS,
    )
    parser.add_argument("file", metavar="FILE", help='a log, or "-" for standard input')
    options.add_json(parser)
    parser.add_argument(
        "--redact", action="store_true", help="hide home folders, user and host names"
    )
    parser.add_argument(
        *("--shell",),
        choices=("bash", "powershell", "cmd"),
        help="write the commands for this shell (default: the one that the log shows)",
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.doctor import shells
    from statescan.doctor.logs import show
    from statescan.doctor.redact import redactor

    diagnosis = _diagnosis(args.file)
    shell = args.shell or diagnosis.shell
    hide = redactor() if args.redact else lambda value: value
    if args.json:
        content = {**diagnosis.to_json(), "file": args.file, "shell": shell}
        content["fix"]["lines"] = [
            line for step in diagnosis.fix.commands for line in shells.lines(step, shell)
        ]
        render.document("log", hide(content))
    else:
        coloured = render.colour_wanted(sys.stdout)
        for line in show.lines(diagnosis, shell, render.line_width(), coloured):
            render.say(hide(line))
    return 0 if diagnosis.root_cause == "success" else 1


def _diagnosis(path: str) -> Diagnosis:
    from statescan.doctor.logs.analyse import analyse

    if path == "-":
        return analyse(sys.stdin.buffer)
    try:
        with _opened(path) as stream:
            return analyse(stream)
    except OSError as error:
        raise options.UsageError(
            f"log: {path!r} cannot be read: {error.strerror or error}.\n"
            "It must be a readable file with the output of an install, a build or a program.\n"
            'Check the path, or give "-" and pipe the output in.'
        ) from error


def _opened(path: str) -> BinaryIO:
    return Path(path).open("rb")
