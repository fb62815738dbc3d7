# SPDX-License-Identifier: Apache-2.0
"""The half of ``statescan explain`` that prints pages of the doctor's catalogue.

What the pages say is data of ``doctor/catalog``, and how they look is in ``doctor/render``.
"""

from __future__ import annotations

import argparse
import difflib
import sys

from statescan.backends.base import ALL_OPS
from statescan.cli import options, render
from statescan.doctor import advice as tips
from statescan.doctor import catalog, shells
from statescan.doctor.advice import Advice
from statescan.doctor.model import Problem
from statescan.doctor.render import problem as pages

_EXAMPLES_HINT = (
    "versions and paths here are examples; `statescan doctor` prints those of this machine"
)


def execute(args: argparse.Namespace) -> int:
    """Print the page of a code, or with --list all codes."""
    if args.list:
        return _list(args.json)
    found = find(args.op)
    shell = shells.shell_of("windows" if sys.platform == "win32" else "linux", args.shell)
    if args.json:
        if isinstance(found, Problem):
            render.document("explain", {"problem": pages.problem_json(found, shell)})
        else:
            render.document("explain", {"advice": found.to_json()})
        return 0
    width = render.line_width()
    if isinstance(found, Problem):
        lines = pages.problem_lines(found, shell, width)
    else:
        lines = pages.advice_lines(found, shell, width)
    for line in lines:
        render.say(line)
    render.hints([_EXAMPLES_HINT])
    return 0


def find(name: str) -> Problem | Advice:
    """The problem or the advice of that code or name, or the one advice that says so."""
    try:
        return catalog.problem(name)
    except KeyError:
        pass
    known = tips.entries()
    if name.upper() in known:
        return known[name.upper()]
    said = tips.search(name)
    # The whole text of one entry may be a part of others.
    if len(said) == 1 or (said and said[0].advice.lower() == name.lower()):
        return said[0]
    near = _near(name) + [f"{row.code} ({row.advice})" for row in said[:5]]
    raise options.UsageError(
        f"explain: {name!r} is no op, no code of the doctor and no advice that it knows.\n"
        + (f"Near it are: {', '.join(near)}.\n" if near else "Nothing that is known is near it.\n")
        + "`statescan explain --list` lists all codes."
    )


def _near(name: str) -> list[str]:
    problems = catalog.problems()
    names = {row.code.lower(): row.code for row in problems.values()}
    names |= {code.lower(): code for code in tips.entries()}
    names |= {other: other for other in (*problems, *ALL_OPS)}
    wanted = name.lower().replace("_", "-")
    inside = [shown for other, shown in names.items() if wanted and wanted in other]
    close = [names[other] for other in difflib.get_close_matches(wanted, names, 5, 0.6)]
    return list(dict.fromkeys([*inside, *close]))[:5]


def _list(as_json: bool) -> int:
    if as_json:
        problems = [
            {"code": row.code, "id": row.slug, "title": row.title, "area": pages.area(row.code)}
            for row in catalog.problems().values()
        ]
        advice = [
            {"code": row.code, "advice": row.advice, "verdict": row.verdict}
            for row in tips.entries().values()
        ]
        render.document("explain", {"problems": problems, "advice_entries": advice})
        return 0
    for line in pages.code_lines(render.line_width()):
        render.say(line)
    return 0
