# SPDX-License-Identifier: Apache-2.0
"""Text of a build: what will be done, why it was refused, what came of it."""

from __future__ import annotations

from statescan.doctor.builder.model import DONE, FAILED, PLANNED, SKIPPED, Outcome, Setup, Stage
from statescan.doctor.builder.progress import clock
from statescan.doctor.logs import show
from statescan.doctor.model import Command
from statescan.doctor.render import text

_WORDS = {DONE: "[ok]", FAILED: "[failed]", SKIPPED: "[skipped]", PLANNED: "[planned]"}
_COLOURS = {DONE: "32", FAILED: "31", SKIPPED: "33", PLANNED: "36"}
_WIDEST = max(map(len, _WORDS.values()))


def head_lines(setup: Setup, width: int) -> list[str]:
    """What is built, for what, with which toolkit."""
    release, targets = setup.release, setup.targets
    lines = [f"{release.package} {release.version}"]
    names = ", ".join(targets.names)
    what = f"{names} ({targets.why})" if names else targets.why
    lines += text.paragraph(what, width, "  ", "GPU code: ")
    lines += text.paragraph(setup.toolkit or "none with an nvcc", width, "  ", "toolkit:  ")
    for note in () if setup.findings else setup.environment.notes:
        lines += text.paragraph(note, width, "  ", "- ")
    if not release.exact:
        note = "This release is not in the list of known ones; it is treated like the nearest."
        lines += text.paragraph(note, width, "  ", "- ")
    return lines


def stage_lines(stage: Stage, width: int, coloured: bool) -> list[str]:
    """One stage: mark, title, time and what came of it."""
    word = _WORDS[stage.status]
    took = f", {clock(stage.seconds)}" if stage.seconds >= 1 else ""
    note = f" ({stage.note})" if stage.note else ""
    label = f"{word.ljust(_WIDEST)} "
    rows = text.paragraph(f"{stage.title}{took}{note}", width, "", label)
    if not coloured:
        return rows
    painted = f"\033[{_COLOURS[stage.status]}m{word}\033[0m"
    return [painted + rows[0][len(word) :], *rows[1:]]


def planned_lines(outcome: Outcome, shell: str, width: int, coloured: bool) -> list[str]:
    """A dry run: the environment and every command, as one could type them."""
    setup = outcome.setup
    lines = [*head_lines(setup, width), ""]
    lines += _warnings(setup, shell, width, coloured)
    lines += ["The environment:", *text.commands([_environment(setup)], shell, "  "), ""]
    for stage in outcome.stages:
        lines += stage_lines(stage, width, coloured)
        lines += text.commands(stage.commands, shell, "    ")
    lines.append("")
    if setup.targets.codes:
        note = (
            f"{setup.folder / 'nvcc'} is a small program that this build writes: it calls the real "
            f"nvcc for {', '.join(setup.targets.names)} instead of every GPU of the release."
        )
        lines += text.paragraph(note, width)
    end = "Nothing was done: without --dry-run these commands are run."
    return [*lines, *text.paragraph(end, width)]


def refused_lines(outcome: Outcome, shell: str, width: int, coloured: bool) -> list[str]:
    """Why a build does not start, with the fixes."""
    setup = outcome.setup
    lines = [*head_lines(setup, width), ""]
    for finding in setup.findings:
        lines += [*text.finding_lines(finding, shell, width, coloured), ""]
    count = len(setup.findings)
    what = "this problem" if count == 1 else f"these {count} problems"
    end = f"Refused before anything was started: with {what} the build cannot succeed. "
    end += "After the fix run the same command again."
    return [*lines, *text.paragraph(end, width)]


def ended_lines(outcome: Outcome, shell: str, width: int, coloured: bool) -> list[str]:
    """What came of a build: the stages, the cause of a failure, and where the files are."""
    lines: list[str] = []
    for stage in outcome.stages:
        lines += stage_lines(stage, width, coloured)
    lines.append("")
    if outcome.retried:
        lines += text.paragraph(f"Second attempt with {outcome.retried}.", width)
    lines += _cause(outcome, shell, width, coloured)
    lines += text.paragraph(_verdict(outcome), width)
    if outcome.wheel:
        lines += text.paragraph(str(outcome.wheel), width, "", "wheel: ")
    return [*lines, *text.paragraph(str(outcome.setup.log), width, "", "log:   ")]


def _cause(outcome: Outcome, shell: str, width: int, coloured: bool) -> list[str]:
    """Why it failed; where that is not recognised, the end of the log."""
    if outcome.diagnosis is None:
        return []
    if outcome.diagnosis.root_cause not in ("log-truncated", "success"):
        return [*show.lines(outcome.diagnosis, shell, width, coloured), ""]
    # The whole output is there: asking for more of it would lead nowhere.
    lines = ["The cause is of no kind that is known here. The output ended with:"]
    return [*lines, *(f"  | {line}" for line in outcome.tail), ""]


def _verdict(outcome: Outcome) -> str:
    release = outcome.setup.release
    named = f"{release.package} {release.version}"
    if outcome.status == "interrupted":
        return f"Interrupted: {named} was not installed, and nothing of the build runs any more."
    if outcome.status == "failed":
        failed = next((row.name for row in outcome.stages if row.status == FAILED), "")
        if failed in ("import", "smoke"):
            return f"{named} was built and installed, and does not work."
        return f"{named} was not built, and nothing was installed."
    smoke = next((row for row in outcome.stages if row.name == "smoke"), None)
    if smoke is not None and smoke.status == DONE:
        return f"{named} is installed, imports, and computes right."
    return f"{named} is installed and imports; its results were not compared, for lack of a GPU."


def _environment(setup: Setup) -> Command:
    values = dict(setup.environment.set)
    prepend = {"PATH": values.pop("PATH")} if "PATH" in values else {}
    return Command(set=values, prepend=prepend)


def _warnings(setup: Setup, shell: str, width: int, coloured: bool) -> list[str]:
    lines: list[str] = []
    for finding in setup.warnings:
        lines += [*text.finding_lines(finding, shell, width, coloured), ""]
    return lines
