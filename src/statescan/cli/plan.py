# SPDX-License-Identifier: Apache-2.0
"""``statescan plan PACKAGE``: the ordered ways to a working package on this or a saved machine.

Planning is in ``doctor/plan``; only options and output are here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from statescan.cli import options, render

if TYPE_CHECKING:
    from statescan.doctor.model import Facts

PACKAGES = ("statescan", "mamba-ssm", "causal-conv1d")
SHELLS = ("bash", "powershell", "cmd")


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "plan", execute),
        "Print the ways to a working package on this machine, the safest first.",
        "Each way is a list of commands for your shell, marked safe or unsafe, and each way that\n"
        "does not lead there is named with its reason. Nothing is run or changed.\n"
        "Exit code 1 when no way leads there.\n\n"
        "examples:\n"
        "  statescan plan mamba-ssm\n"
        "  statescan plan causal-conv1d --facts other-machine.json --shell powershell",
    )
    parser.add_argument("package", choices=PACKAGES, metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument(
        *("--facts",),
        metavar="FILE",
        help="plan for the machine of these facts, saved by `statescan doctor --json`",
    )
    parser.add_argument(
        *("--shell",), choices=SHELLS, help="write commands for it (default: the one in use)"
    )
    options.add_json(parser)
    parser.add_argument(
        "--redact", action="store_true", help="hide home folders, user and host names"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.doctor import checks
    from statescan.doctor.plan import planner
    from statescan.doctor.redact import redactor
    from statescan.doctor.render import plan as text
    from statescan.doctor.shells import shell_of

    facts = _facts(args)
    plan = planner.make(args.package, facts, checks.run(facts, args.package))
    shell = args.shell or shell_of(facts.get("system.os", ""), facts.get("system.shell"))
    hide = redactor() if args.redact else lambda value: value
    if args.json:
        document = {"facts_from": args.facts, "shell": shell, **plan.to_json()}
        render.document("plan", hide(document))
    else:
        for line in text.lines(plan, shell, render.line_width()):
            render.say(hide(line))
    return 0 if plan.ways else 1


def _facts(args: argparse.Namespace) -> Facts:
    from statescan.doctor.model import Facts

    if args.facts:
        return Facts.read(Path(args.facts))
    from statescan.doctor.facts.gather import gather

    render.status("looking at this machine")
    found: Facts = gather(smoke=False)
    render.status()
    return found
