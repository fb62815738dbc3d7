# SPDX-License-Identifier: Apache-2.0
"""Decides which line of a log shows its cause: the last attempt, then the earliest stage in it.

What single lines mean is in the rules; what to do about the cause, in ``fixes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from statescan.doctor import catalog
from statescan.doctor.logs import (
    endings,
    rules_compiler,
    rules_install,
    rules_load,
    rules_modules,
    rules_run,
    rules_toolkit,
)
from statescan.doctor.logs.evidence import Evidence
from statescan.doctor.logs.opinion import HARD, INFERRED, PLAIN, RULES, SIGN, Opinion, Scene
from statescan.doctor.logs.record import Attempt, Hit

RULE_MODULES = (
    rules_compiler,
    rules_install,
    rules_load,
    rules_modules,
    rules_run,
    rules_toolkit,
)
"""Importing them registers their rules."""

_LEFT_BEHIND = ("ext-not-built", "cc1d-missing", "build-deps-missing")
"""What an install that failed before leaves behind."""


@dataclass(frozen=True)
class View:
    """A line of an attempt with what it means."""

    attempt: Attempt
    hit: Hit
    opinion: Opinion

    @property
    def order(self) -> tuple[int, int]:
        """Of two errors the one of the earlier stage is the cause, then the earlier line."""
        return _layers()[self.opinion.slug], self.hit.number


@dataclass(frozen=True)
class Verdict:
    """The cause, and what else was considered.

    Attributes:
        opinion: Of the line that shows it.
        hit: That line; None where it is about the log as a whole.
        attempt: Which attempt counts; None for a log without any.
        others: The views that lost, of all attempts.
    """

    opinion: Opinion
    hit: Hit | None
    attempt: Attempt | None
    others: tuple[View, ...] = ()


@cache
def _layers() -> dict[str, int]:
    """The place of each problem's stage in the order of an install."""
    return {
        slug: catalog.LAYERS.index(problem.layer) for slug, problem in catalog.problems().items()
    }


def judge(evidence: Evidence) -> Verdict:
    """The cause that a log shows."""
    log = evidence.log
    views = {id(attempt): _views(attempt, evidence) for attempt in log.attempts}
    everything = tuple(view for rows in views.values() for view in rows)
    attempt = _counting(log.attempts, views)
    if attempt is not None:
        strong = [view for view in views[id(attempt)] if view.opinion.weight >= INFERRED]
        if strong:
            best = _best(_on_this_machine(strong, evidence))
            return _verdict(best, everything)
        later = endings.unknown_after_success(log, attempt)
        if later is not None:
            return Verdict(*later, others=everything)
        if endings.succeeded(attempt) and not _later_sign(attempt, everything):
            return _after_success(attempt, evidence, everything)
    return _without_errors(evidence, attempt, everything)


def _verdict(best: View, everything: tuple[View, ...]) -> Verdict:
    others = tuple(view for view in everything if view is not best)
    return Verdict(best.opinion, best.hit, best.attempt, others)


def _views(attempt: Attempt, evidence: Evidence) -> list[View]:
    """What the lines of an attempt mean; what a success came after is no cause."""
    success = endings.success_line(attempt) if endings.succeeded(attempt) else 0
    views = []
    for hit in attempt.of_kind("cause", "hint"):
        opinion = _opinion(Scene(hit, attempt, evidence))
        if opinion is None:
            continue
        lasting = opinion.slug in ("torch-changed-by-pip", "gpu-arch-not-in-torch")
        if success > hit.number and not lasting:
            continue
        views.append(View(attempt, hit, opinion))
    return views


def _opinion(scene: Scene) -> Opinion | None:
    signature = scene.hit.signature
    if signature.rule:
        return RULES[signature.rule](scene)
    weight = HARD if signature.kind == "cause" else SIGN
    return Opinion(signature.slug, weight, PLAIN, signature.instead_of)


def _counting(attempts: list[Attempt], views: dict[int, list[View]]) -> Attempt | None:
    """The attempt whose outcome counts: the last that failed or succeeded.

    A module that is missing after an install that failed is what the install left behind.
    """
    decided = [attempt for attempt in attempts if _outcome(attempt, views[id(attempt)])]
    if not decided:
        return None
    last = decided[-1]
    rows = views[id(last)]
    only_left_behind = rows and all(view.opinion.slug in _LEFT_BEHIND for view in rows)
    if only_left_behind and last.kind != "install":
        for earlier in reversed(decided[:-1]):
            if endings.succeeded(earlier):
                break
            if endings.failed(earlier) or any(
                view.opinion.weight == HARD and view.opinion.slug not in _LEFT_BEHIND
                for view in views[id(earlier)]
            ):
                return earlier
    return last


def _outcome(attempt: Attempt, rows: list[View]) -> str:
    """ "failed", "succeeded", or "" for one that tells nothing."""
    if any(view.opinion.weight >= INFERRED for view in rows):
        return "failed"
    if attempt.kind == "probe":
        return ""
    if endings.succeeded(attempt):
        return "succeeded"
    return "failed" if endings.failed(attempt) else ""


def _on_this_machine(views: list[View], evidence: Evidence) -> list[View]:
    """On a Mac every failure has the same cause, whatever stage it comes up in."""
    if evidence.macos is None:
        return views
    exempt = ("shell-redirect", "macos-unsupported", "wheel-download-failed", "disk-full")
    return [
        view
        if view.opinion.slug in exempt
        else View(
            view.attempt,
            view.hit,
            Opinion(
                *("macos-unsupported", INFERRED),
                "the machine is a Mac, which these packages do not support",
                (view.opinion.slug, *view.opinion.instead_of),
            ),
        )
        for view in views
    ]


def _best(views: Iterable[View]) -> View:
    """The view that explains the others, else the earliest stage, else the earliest line."""
    rows = list(views)
    explained = {
        loser
        for view in rows
        for loser in catalog.load("patterns")["explains"].get(view.opinion.slug, ())
    }
    kept = [view for view in rows if view.opinion.slug not in explained] or rows
    first = min(kept, key=lambda view: (*view.order, -view.opinion.weight))
    same = [view for view in kept if view.opinion.slug == first.opinion.slug]
    return min(same, key=lambda view: (-view.opinion.weight, view.hit.number))


def _later_sign(attempt: Attempt, everything: tuple[View, ...]) -> bool:
    """Whether an error shows after the success, which no signature is sure of."""
    return any(
        view.hit.number > attempt.first
        and view.hit.number > endings.success_line(attempt)
        and view.opinion.slug in ("ext-not-built", "gpu-arch-not-in-torch")
        for view in everything
        if view.opinion.weight == SIGN
    )


def _after_success(attempt: Attempt, evidence: Evidence, everything: tuple[View, ...]) -> Verdict:
    """A success, unless it replaced torch on the way."""
    changed = rules_load.torch_changed(evidence, attempt.last or 1 << 60)
    line = endings.success_hit(attempt)
    if changed is not None and attempt.first <= changed.number:
        opinion = Opinion(
            *("torch-changed-by-pip", INFERRED),
            f"the install replaced torch {changed.values['needed']} by {changed.values['found']}",
            ("success",),
            changed.values,
        )
        return Verdict(opinion, changed, attempt, everything)
    about = line is not None and "package" in line.values
    opinion = Opinion(
        "success",
        HARD if about else INFERRED,
        "the installer says so, and no error comes after it",
    )
    return Verdict(opinion, line, attempt, everything)


def _without_errors(
    evidence: Evidence, attempt: Attempt | None, everything: tuple[View, ...]
) -> Verdict:
    """No line shows a cause for sure: what the end of the log and its signs tell."""
    failed = attempt is not None and endings.failed(attempt)
    signs = [view for view in everything if view.opinion.weight == SIGN]
    redirect = endings.redirected(evidence)
    if redirect is not None:
        return Verdict(*redirect, others=everything)
    relevant = [
        view for view in signs if not failed or view.hit.number <= (attempt.last if attempt else 0)
    ]
    if relevant:
        best = _best(_on_this_machine(relevant, evidence))
        return _verdict(best, everything)
    if failed and evidence.macos is not None:
        opinion = Opinion(
            "macos-unsupported",
            INFERRED,
            "the machine is a Mac, which these packages do not support",
        )
        return Verdict(opinion, evidence.macos, attempt, everything)
    ending = endings.unfinished(evidence, attempt)
    if ending is not None:
        return Verdict(*ending, others=everything)
    return Verdict(*endings.nothing_known(evidence, attempt), others=everything)
