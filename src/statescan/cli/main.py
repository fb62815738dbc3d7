# SPDX-License-Identifier: Apache-2.0
"""The ``statescan`` program: its parser, and how errors become messages and exit codes.

What a command does is in the module of its name. Exit codes: 0 fine, 1 an error or a failed
verdict, 2 a mistake on the command line, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import statescan
from statescan.cli import (
    backends,
    bench,
    build,
    doctor,
    explain,
    generate,
    log,
    options,
    plan,
    quickstart,
    render,
    run,
    symbols,
    train,
    write,
)
from statescan.errors import ArgumentError, StatescanError

COMMANDS = (
    quickstart,
    backends,
    explain,
    doctor,
    log,
    symbols,
    plan,
    build,
    write,
    bench,
    train,
    generate,
    run,
)

FAILURE, USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141

_DESCRIPTION = """\
Mamba kernels and models that install anywhere PyTorch does.

New here? `statescan quickstart` checks this installation and writes some text.
"""
_EPILOG = "`statescan COMMAND --help` explains each command. Data goes to stdout, talk to stderr."


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; building it imports nothing beyond the standard library."""
    parser = argparse.ArgumentParser(
        prog="statescan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"statescan {statescan.__version__}")
    options.add_verbose(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in COMMANDS:
        module.configure_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code and raises nothing that a user can cause."""
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    render.prepare_streams()
    # torch says this at import where NumPy is absent; statescan does not use it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if options.verbose(args):
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    try:
        return _execute(args)
    except KeyboardInterrupt:
        render.talk("\ninterrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; without a target that would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _execute(args: argparse.Namespace) -> int:
    try:
        code: int = args.execute(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        raise
    except (StatescanError, ImportError, OSError) as error:
        if options.verbose(args):
            traceback.print_exc()
        sys.stdout.flush()
        render.error(_message(error))
        return USAGE if _is_usage(error) else FAILURE


def _is_usage(error: Exception) -> bool:
    """A wrong option value; the subclasses of ArgumentError are about tensors, not options."""
    return type(error) in (ArgumentError, options.UsageError)


def _message(error: Exception) -> str:
    if isinstance(error, StatescanError):
        return str(error)
    if isinstance(error, ImportError) and (error.name or "").startswith("statescan"):
        return (
            f"a part of statescan is missing or damaged: {error}.\n"
            "Every file of the package must be of one version.\n"
            "Install it again: pip install --force-reinstall --no-deps statescan"
        )
    if isinstance(error, ImportError):
        return (
            f"an import failed: {error}.\n"
            "statescan needs a PyTorch of at least 2.4 that imports in this Python "
            f"({sys.executable}).\n"
            "Run the command again with --verbose to see where it failed."
        )
    return f"{type(error).__name__}: {error}"
