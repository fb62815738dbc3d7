# SPDX-License-Identifier: Apache-2.0
"""``statescan run``: a script or module in which ``mamba_ssm`` and ``causal_conv1d`` are statescan.

The serving itself is ``compat.aliases``'s work.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from statescan.cli import options, render


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "run", execute),
        "Run a Python script with mamba_ssm and causal_conv1d served by statescan.",
        "The script runs as `python SCRIPT` would run it, unchanged: its imports of mamba_ssm,\n"
        "causal_conv1d, selective_scan_cuda and causal_conv1d_cuda find statescan. Its exit\n"
        "status is the command's.\n\n"
        "example: statescan run train.py --epochs 3\n"
        "         statescan run -m package.module",
    )
    parser.usage = "statescan run [--force] [--quiet] [-m] SCRIPT [ARGUMENT ...]"
    parser.add_argument(
        *("--force",),
        action="store_true",
        help="serve the names also where a working original is installed",
    )
    parser.add_argument(
        *("-q", "--quiet"), action="store_true", help="do not say what is served, on stderr"
    )
    parser.add_argument(
        *("-m",), dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.compat import install

    if not args.module and not os.path.exists(args.script):  # noqa: PTH110  (a path as typed)
        raise options.UsageError(
            f"run: {options.user_text(args.script)!r} does not exist.\n"
            "It must be a Python file, a folder or archive with __main__.py, or with -m a module.\n"
            "Check the path; options of statescan come before it."
        )
    served = install(force=args.force)
    if not args.quiet:
        render.talk(str(served))
    sys.argv = [args.script, *args.arguments]
    if args.module:
        sys.path[0] = os.getcwd()  # noqa: PTH109  (the text that python -m puts there)
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(args.script))  # noqa: PTH100, PTH120
        runpy.run_path(args.script, run_name="__main__")
    return 0
