# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the doctor: one for each problem, their index, and the advice on the web.

Everything that they say is data of ``src/statescan/doctor/catalog``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from markdown_parts import NOTE, table

from statescan.doctor import advice as tips
from statescan.doctor import catalog, shells
from statescan.doctor.advice import Advice
from statescan.doctor.model import Command, Problem
from statescan.doctor.render import problem as pages

FOLDER = "docs/checks"
INDEX_LEAD = """
Everything that `statescan doctor` and `statescan log` can find, by the stages of an install. Each
page says what one sees, what causes it, what to type and whether that is safe, what is not the
cause, and which advice not to follow. `statescan explain TK101` prints a page in the terminal, for
your shell.

Where two errors are in one log, the one of the earlier stage is the cause. The stages in their
order: {stages}.

What is recommended on the web for these packages, and what is true of it, is on the page
[advice](advice.md).
"""
ADVICE_LEAD = """
Commands and tips that guides on the web give for mamba-ssm and causal-conv1d: whether they work,
since when, and what to type instead. `statescan explain "sudo pip"` finds an entry by its words.

"""
EXAMPLE_NOTE = (
    "Versions and folders are examples; `statescan doctor` prints the commands for a machine.\n"
)
_LANGUAGES = {"bash": "bash", "powershell": "powershell", "cmd": "bat"}
_NAMES = {"bash": "bash", "powershell": "PowerShell", "cmd": "cmd"}


def files() -> dict[str, str]:
    """Every page by its path."""
    made = {f"{FOLDER}/README.md": index_page(), f"{FOLDER}/advice.md": advice_page()}
    for problem in catalog.problems().values():
        made[f"{FOLDER}/{problem.code}.md"] = problem_page(problem)
    return made


def index_page() -> str:
    """All problems by area."""
    lead = INDEX_LEAD.format(stages=", ".join(catalog.LAYERS))
    parts = ["# Problems by code\n\n" + NOTE + lead]
    for area, known in pages.by_area().items():
        rows = [(f"[{row.code}]({row.code}.md)", f"`{row.slug}`", row.title) for row in known]
        if rows:
            header = ("code", "name", "problem")
            parts.append(f"\n## {pages.AREAS[area]}\n\n" + table(header, rows))
    return "".join(parts)


def problem_page(problem: Problem) -> str:
    """The page of one problem."""
    fix = catalog.fill(problem.fix, {})
    safe = "The fix is safe" if fix.safe else "Take care"
    parts = [f"# {problem.code}: {problem.title}", NOTE.strip(), problem.what]
    parts.append(
        f"Name: `{problem.slug}`. Severity: {problem.severity.value}. "
        f"Stage of an install: {problem.layer}."
    )
    parts += ["## Why", problem.why, "## Example", _block("text", problem.example)]
    parts += ["## Fix", fix.text, *_steps(problem.fix.commands, problem.systems)]
    parts.append(f"{safe}: {fix.safety[0].lower()}{fix.safety[1:]}")
    parts += _listed("What is not the cause", problem.looks_like)
    parts += _listed("What not to follow", problem.wrong_advice)
    parts += _listed("Reports", map(_report, problem.references))
    parts.append("[All problems](README.md)")
    return "\n\n".join(parts) + "\n"


def advice_page() -> str:
    """Every piece of advice: a table of all, then each with what to type instead."""
    known = tips.entries().values()
    rows = [(f"[{row.code}](#{row.code.lower()})", _code(row.advice), row.verdict) for row in known]
    verdicts = "\n".join(f"- {name}: {meaning}" for name, meaning in tips.VERDICTS.items())
    lead = "# Advice found on the web\n\n" + NOTE + ADVICE_LEAD + verdicts + "\n\n"
    entries = "\n\n".join(_entry(row) for row in known)
    return lead + table(("code", "advice", "verdict"), rows) + "\n" + entries + "\n"


def _entry(advice: Advice) -> str:
    parts = [f"### {advice.code}", f"{_code(advice.advice)}"]
    parts.append(f"**{advice.verdict}**, since: {advice.since}. {advice.why}")
    parts.append("Instead:")
    steps = tips.commands(advice, {})
    parts.append(_block("bash", (line for step in steps for line in shells.lines(step, "bash"))))
    if advice.references:
        parts.append("Reports: " + ", ".join(map(_report, advice.references)))
    return "\n\n".join(parts)


def _steps(commands: Sequence[Command], systems: Sequence[str]) -> Iterator[str]:
    """A block for each shell of these systems; shells that write the same share one."""
    if not commands:
        return
    of_windows = not systems or "windows" in systems
    wanted = ["bash"] if not systems or set(systems) & {"linux", "macos"} else []
    wanted += ["powershell", "cmd"] if of_windows else []
    blocks: dict[tuple[str, ...], list[str]] = {}
    for shell in wanted:
        steps = catalog.fill_commands(commands, pages.example_values(shell))
        lines = tuple(line for step in steps for line in shells.lines(step, shell))
        blocks.setdefault(lines, []).append(shell)
    for lines, names in blocks.items():
        if len(blocks) > 1 or wanted != ["bash"]:
            yield " and ".join(_NAMES[name] for name in names) + ":"
        yield _block(_LANGUAGES[names[0]], lines)
    yield EXAMPLE_NOTE.strip()


def _block(language: str, lines: Iterable[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _listed(title: str, items: Iterable[str]) -> list[str]:
    lines = [f"- {item}" for item in items]
    return [f"## {title}", "\n".join(lines)] if lines else []


def _report(reference: str) -> str:
    url = pages.report_url(reference)
    return f"[{reference}]({url})" if url else reference


def _code(text: str) -> str:
    """Advice in code style, unless it is a sentence that has code inside."""
    return text if "`" in text else f"`{text}`"
