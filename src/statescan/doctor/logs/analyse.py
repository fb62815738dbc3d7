# SPDX-License-Identifier: Apache-2.0
"""The answer about a log: its cause, the line that proves it, the fix, and what is not the cause.

Puts the stages together: scan, evidence, verdict, values, fix. No printing.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import BinaryIO

from statescan.doctor import catalog
from statescan.doctor.logs import endings
from statescan.doctor.logs.diagnosis import Diagnosis, Line, NotCause
from statescan.doctor.logs.evidence import Evidence
from statescan.doctor.logs.fitting import fit
from statescan.doctor.logs.fixes import fix_for
from statescan.doctor.logs.opinion import HARD, INFERRED, PLAIN
from statescan.doctor.logs.record import Hit, Log
from statescan.doctor.logs.scan import scan
from statescan.doctor.logs.values import collect, shell_of
from statescan.doctor.logs.verdict import Verdict, judge
from statescan.doctor.model import Command, Fix

_MOST_NOT_CAUSES = 8
_MOST_LINES = 4
_OFTEN_BLAMED = ("ninja-exit", "compiling-objects", "command-failed")
_INSTEAD = "the line shows {} instead"
_UNKNOWN_FIX = Fix(
    "Read that line first: nothing says that an install caused it. If the log is only a part, give"
    " the whole one to statescan log; if it is whole, open an issue at statescan with it.",
    (Command(("statescan", "doctor"), note="what of this machine belongs in the issue"),),
    safe=True,
    safety="Only looks.",
)
_INSTALLER = "the installer only repeats that a step of the build failed"


def analyse(stream: BinaryIO) -> Diagnosis:
    """Read a log and say what went wrong.

    Args:
        stream: Of bytes, in any encoding and of any length; it is read once, to its end.

    Returns:
        The cause, or ``success``, or ``log-truncated`` where the log does not hold the cause.
    """
    log = scan(stream)
    evidence = Evidence(log)
    verdict = judge(evidence)
    opinion = verdict.opinion
    values = collect(verdict, evidence)
    if any(attempt.command.startswith("uv ") for attempt in log.attempts) or evidence.has(
        "uv-change", "uv-building"
    ):
        values["installer"] = "uv"
    level = {HARD: "high", INFERRED: "medium"}.get(opinion.weight, "low")
    problem = catalog.problem(opinion.slug)
    if opinion.reason == endings.UNKNOWN.reason:
        problem = replace(problem, title="No cause known here fits this log")
    shell = "powershell" if problem.systems == ("windows",) else "bash"
    shell = shell_of(evidence, shell)
    return Diagnosis(
        root_cause=opinion.slug,
        problem=problem,
        summary=_sentence(problem.title, _quoted(verdict)),
        evidence=_lines(verdict),
        fix=_UNKNOWN_FIX
        if opinion.reason == endings.UNKNOWN.reason
        else fit(opinion.slug, fix_for(opinion.slug, values), values, shell != "bash"),
        confidence=level,
        reason=_reason(verdict, level),
        not_causes=_not_causes(verdict, log),
        values=values,
        shell=shell,
        lines=log.lines,
        encoding=log.encoding,
    )


def analyse_text(text: str) -> Diagnosis:
    """``analyse`` of text that is already decoded."""
    return analyse(io.BytesIO(text.encode("utf-8", errors="replace")))


def _quoted(verdict: Verdict) -> str:
    """The reason; of an unknown error the line itself."""
    hit = verdict.hit
    if verdict.opinion.reason != endings.UNKNOWN.reason or hit is None:
        return verdict.opinion.reason
    return f"the error is line {hit.number}, {_short(hit.text).rstrip('.')}"


def _sentence(title: str, reason: str) -> str:
    return f"{title}." if reason == PLAIN else f"{title}: {reason}."


def _reason(verdict: Verdict, level: str) -> str:
    """Why the answer is as sure as it is."""
    opinion = verdict.opinion
    if level == "high":
        return opinion.reason
    rivals = {
        view.opinion.slug
        for view in verdict.others
        if view.opinion.weight >= INFERRED and view.opinion.slug != opinion.slug
    }
    text = opinion.reason
    if level == "medium":
        text += "; no line says it outright"
    else:
        text += "; that is only a sign"
    return f"{text}; also possible: {', '.join(sorted(rivals))}" if rivals else text


def _lines(verdict: Verdict) -> tuple[Line, ...]:
    """The proving line, then lines of the same problem."""
    lines = []
    if verdict.opinion.proof is not None:
        lines.append(verdict.opinion.proof)
    if verdict.hit is not None:
        # The line with the error proves a problem; what explains it comes after it.
        lines.insert(0, verdict.hit)
    lines += [
        view.hit
        for view in verdict.others
        if view.opinion.slug == verdict.opinion.slug and view.attempt is verdict.attempt
    ]
    found: dict[int, Line] = {}
    for hit in lines:
        found.setdefault(hit.number, Line(hit.number, _shown(hit)))
    return tuple(found.values())[:_MOST_LINES]


def _shown(hit: Hit) -> str:
    """A line and, where it goes on, the next one."""
    text = hit.text.strip()
    if hit.id == "cuda-mismatch" and hit.follow and "needed" not in hit.values:
        return f"{text} {hit.follow[0].strip()}"
    return text


def _not_causes(verdict: Verdict, log: Log) -> tuple[NotCause, ...]:
    """What looks like the cause: other problems first, then noise and consequences."""
    rows = [*_other_problems(verdict), *_said_by_lines(verdict, log)]
    return tuple(rows[:_MOST_NOT_CAUSES])


def _other_problems(verdict: Verdict) -> list[NotCause]:
    problems = catalog.problems()
    numbers = [verdict.hit.number] if verdict.hit is not None else []
    rows: dict[str, NotCause] = {}
    same = [view for view in verdict.others if view.opinion.slug == verdict.opinion.slug]
    for opinion, lines in [
        (verdict.opinion, tuple(numbers)),
        *((view.opinion, (view.hit.number,)) for view in same if view.attempt is verdict.attempt),
    ]:
        for slug in opinion.instead_of:
            if slug in problems and slug != opinion.slug:
                reason = _INSTEAD.format(opinion.slug)
                rows.setdefault(slug, NotCause(problems[slug].title, reason, lines, slug))
    for view in verdict.others:
        slug = view.opinion.slug
        if slug == verdict.opinion.slug or slug in rows:
            continue
        places = [row.hit.number for row in verdict.others if row.opinion.slug == slug]
        rows[slug] = NotCause(
            problems[slug].title,
            _why_not(view.attempt is verdict.attempt, verdict),
            tuple(places[:_MOST_LINES]),
            slug,
        )
    return list(rows.values())


def _why_not(same_attempt: bool, verdict: Verdict) -> str:
    if not same_attempt:
        return "that was in another attempt of this session than the one that counts"
    if verdict.opinion.slug == "success":
        return "the attempt succeeded in spite of it"
    return "it belongs to a later stage, or follows from the cause"


def _said_by_lines(verdict: Verdict, log: Log) -> list[NotCause]:
    """Noise and consequences, a row for each kind of line; the installer's own words in one row."""
    proving = verdict.hit.number if verdict.hit is not None else 0
    found: dict[str, list[Hit]] = {}
    for kind in ("noise", "consequence"):
        for attempt in log.attempts:
            for hit in attempt.of_kind(kind):
                told_apart = kind == "noise" or hit.id in _OFTEN_BLAMED
                if hit.number != proving:
                    found.setdefault(hit.id if told_apart else "installer", []).append(hit)
    if verdict.opinion.slug == "log-truncated":
        # There the consequences are the evidence.
        found = {name: hits for name, hits in found.items() if hits[0].signature.kind == "noise"}
    return [
        NotCause(
            _short(hits[0].text),
            _INSTALLER if name == "installer" else hits[0].signature.meaning,
            tuple(dict.fromkeys(hit.number for hit in hits))[:_MOST_LINES],
        )
        for name, hits in found.items()
    ]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else text[:87] + "..."
