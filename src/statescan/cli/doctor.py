# SPDX-License-Identifier: Apache-2.0
"""``statescan doctor``: what is wrong on this machine for statescan and the originals, and the fix.

Facts, checks and texts are in ``doctor``; only options and output are here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statescan.cli import options, render

if TYPE_CHECKING:
    from statescan.doctor.checks import Check, Report
    from statescan.doctor.model import Facts

_PACKAGES = ("mamba-ssm", "causal-conv1d", "statescan")
_DETAILS = """\
Looks at the system, Python, torch, driver, toolkits, compilers and compiled modules, and judges
them for one question: does the package work here, or could it be installed? Without --for that is
statescan, and mamba-ssm and causal-conv1d where they are installed. Nothing is changed. Exit code 1
when there is an error, with --strict also when there is a warning.

examples:
  statescan doctor                      is anything wrong here?
  statescan doctor --for mamba-ssm      could mamba-ssm be installed, or why does it not work?
  statescan doctor gpu TK101            only these areas, ids or codes
  statescan doctor --json > facts.json  to judge elsewhere with --facts facts.json"""


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "doctor", execute),
        "Find out what is wrong with this machine's Mamba packages, and how to mend it.",
        _DETAILS,
    )
    parser.add_argument(
        "check", nargs="*", metavar="CHECK", help="a code, id or area of --list (default: all)"
    )
    parser.add_argument(
        *("--for",),
        dest="package",
        choices=_PACKAGES,
        metavar="PACKAGE",
        help=f"judge for this one: {', '.join(_PACKAGES)}",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--list", action="store_true", help="list the checks and run none")
    shown.add_argument(
        "--matrix",
        action="store_true",
        help="show which Python, torch, CUDA and GCC each release wants, and those that are here",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 for warnings too")
    parser.add_argument(
        "--facts", metavar="FILE", help="judge facts that `statescan doctor --json` saved"
    )
    parser.add_argument(
        "--no-import",
        action="store_true",
        help="read files only: import nothing and compute nothing in a child process",
    )
    options.add_json(parser)
    parser.add_argument(
        "--redact", action="store_true", help="hide home folders, user and host names"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.doctor import checks
    from statescan.doctor.redact import redactor

    hide = redactor() if args.redact else lambda value: value
    if args.list:
        return _list(args, checks.select(args.check))
    # A mistake in a name is told before seconds are spent on probes.
    checks.select(args.check)
    facts = _facts(args)
    if args.matrix:
        return _matrix(args, facts, hide)
    report = checks.examine(facts, args.package, args.check)
    failed = _failed(report, args.strict)
    if args.json:
        render.document("doctor", hide(_document(args, report, failed)))
    else:
        _print(report, hide)
        render.hints(map(hide, _hints(report)))
    return int(failed)


def _facts(args: argparse.Namespace) -> Facts:
    from statescan.doctor.model import Facts

    if args.facts is not None:
        return Facts.read(Path(args.facts))
    from statescan.doctor.facts import gather

    if args.no_import or args.matrix:
        return gather.gather_static()
    render.status("looking at this machine, and importing torch in a child process ...")
    try:
        return gather.gather()
    finally:
        render.status()


def _failed(report: Report, strict: bool) -> bool:
    from statescan.doctor.model import Severity

    wrong = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
    return any(row.severity in wrong for row in report.findings)


def _document(args: argparse.Namespace, report: Report, failed: bool) -> dict[str, Any]:
    from statescan.doctor.checks import states
    from statescan.doctor.model import Severity

    counts = {one: sum(row.severity is one for row in report.findings) for one in Severity}
    return {
        "kind": "report",
        "for": args.package,
        "judged": list(report.question.judged),
        "facts_from": args.facts,
        "strict": args.strict,
        "ok": not failed,
        "counts": {one.value: count for one, count in counts.items()},
        "findings": [row.to_json() for row in report.findings],
        "packages": states.rows(report.question),
        "checks": [
            {**_check(row.check), "status": row.status, "reason": row.reason}
            for row in report.results
        ],
        "facts": report.question.facts.to_json(),
    }


def _check(row: Check) -> dict[str, Any]:
    return {
        "name": row.name,
        "area": row.area,
        "codes": list(row.codes),
        "ids": list(row.slugs),
        "packages": list(row.packages),
        "about": row.about,
    }


def _print(report: Report, hide: Callable[[Any], Any]) -> None:
    from statescan.doctor.checks import states
    from statescan.doctor.render import doctor as text

    width, coloured = render.line_width(), render.colour_wanted(sys.stdout)
    for line in text.lines(report, width, coloured):
        render.say(hide(line))
    rows = states.rows(report.question)
    if any(row["name"] != "statescan" for row in rows):
        render.say()
        columns = ("name", "installed", "importable", "loaded", "usable")
        titles = ("package", *columns[1:])
        render.table(titles, [[row[column] for column in columns] for row in rows])
    for line in text.finding_blocks(report, width, coloured):
        render.say(hide(line))
    for line in text.unknown_lines(report.question.facts, width):
        render.say(hide(line))
    render.say()
    render.say(text.summary(report))


def _hints(report: Report) -> list[str]:
    """What to do next."""
    wanted = list(
        dict.fromkeys(
            package
            for row in report.findings
            for package in row.packages
            if package != "statescan" and package in report.question.judged
        )
    )
    lines = []
    if wanted:
        first = report.question.asked if report.question.asked in wanted else wanted[0]
        lines.append(f"`statescan plan {first}` puts the way to a working one in order")
    if report.findings:
        lines.append(f"`statescan explain {report.findings[0].problem.code}` tells more")
    facts, question = report.question.facts, report.question
    silent = facts.get("driver.library") and not facts.get("driver.gpus")
    if silent and "nvidia-ml-py" not in facts.get("packages.installed", {}):
        lines.append("`pip install 'statescan[doctor]'` lets it ask the NVIDIA driver by NVML")
    if not report.findings and question.asked is None and question.judged == ("statescan",):
        lines.append("`statescan doctor --for mamba-ssm` judges whether that could be installed")
    return lines


def _list(args: argparse.Namespace, rows: tuple[Check, ...]) -> int:
    from statescan.doctor.checks import AREAS
    from statescan.doctor.render import doctor as text

    if args.json:
        render.document("doctor", {"kind": "list", "checks": [_check(row) for row in rows]})
        return 0
    for area, about in AREAS.items():
        mine = [row for row in rows if row.area == area]
        if mine:
            render.heading(f"{area}: {about}")
            render.table(text.CHECK_TITLES, text.check_rows(mine))
    return 0


def _matrix(args: argparse.Namespace, facts: Facts, hide: Callable[[Any], Any]) -> int:
    from statescan.doctor.checks import matrix
    from statescan.doctor.render import doctor as text

    content = matrix.build(facts, args.package)
    if args.json:
        about = {"kind": "matrix", "for": args.package, "facts_from": args.facts}
        render.document("doctor", hide({**about, **content}))
        return 0
    render.table(("package", "needs", "least", "best", "here", ""), text.package_cells(content))
    for name, cells in text.release_cells(content).items():
        render.heading(f"Releases of {name} (least to best)")
        render.table(text.RELEASE_TITLES, cells)
    render.say()
    for note in content["notes"]:
        render.wrap(note)
    return 0
