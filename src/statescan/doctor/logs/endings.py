# SPDX-License-Identifier: Apache-2.0
"""How attempts end: with success, with only consequences of an error, unfinished, or cut off.

What an error line means is in the rules.
"""

from __future__ import annotations

import re

from statescan.doctor.logs import commands
from statescan.doctor.logs.evidence import Evidence
from statescan.doctor.logs.opinion import HARD, INFERRED, SIGN, Opinion
from statescan.doctor.logs.record import Attempt, Hit, Log
from statescan.doctor.logs.signatures import signatures

Ending = tuple[Opinion, "Hit | None", "Attempt | None"]

_UNFINISHED = re.compile(
    r"(?:Building wheels? for [\w.\[\] -]{1,60}(?:\([\w. ]{1,20}\))?\s?"
    r"(?:\.\.\.|: started|: still running\.{0,3}|\.\.\. still running\.{0,3})\s?[-\\|/]?"
    r"|Building wheel for [^\n]{1,60} still running\.{3}"
    r"|Running setup\.py install for [\w.-]{1,40}\s?(?:\.\.\.|: started)\s?[-\\|/]?"
    r"|(?:[^\w\n]{0,6}\s?)?Building (?:mamba-ssm|causal-conv1d)[ =@]\S{0,60}"
    r"|[^\w\n]{0,6}\s?Preparing packages\.\.\. \(\d+/\d+\)"
    r"|[•-] Installing (?:mamba-ssm|causal-conv1d) \([^)\n]{1,30}\): "
    r"(?:Installing|Preparing|Building)\S{0,6}"
    r"|Installing pip dependencies:? ?(?:\.\.\.)?[\\/| -]{0,12})\s{0,4}$"
)
_COMPILING = re.compile(
    r"^\[\d{1,4}/\d{1,4}\] |ptxas info|bytes stack frame|Allowing ninja|Compiling objects"
    r"|Emitting ninja|nvcc\b.{1,2000}-gencode|^building '\w+' extension"
)
_CHILD = re.compile(r"(?:#\d+ [\d.]+ |\d{4}-\S+Z )? {6}(?=\S| {4}\d)")
"""The indentation that pip gives to the output of a build that failed."""

_STOPPED = re.compile(
    r"KeyboardInterrupt|Operation cancelled by user|operation was canceled"
    r"|exceeded the maximum execution time|\^C|Aborted|took longer than|TIME LIMIT|cancelled"
)


UNKNOWN = Opinion(*("log-truncated", SIGN), "an error is in the log that is of no kind known here")


def success_hit(attempt: Attempt) -> Hit | None:
    """The line of an attempt that says that it succeeded; the most telling one."""
    rows = list(attempt.of_kind("success"))
    about = [hit for hit in rows if "package" in hit.values]
    if about:
        return about[-1]
    return rows[-1] if rows and commands_about(attempt) else None


def commands_about(attempt: Attempt) -> bool:
    """Whether the attempt is about the packages, or does not show its command."""
    return (
        not attempt.command
        or commands.is_about_modules(attempt.command)
        or (
            attempt.kind == "install"
            and bool(re.search(r"-r |setup\.py|env (?:create|update)|sync|build", attempt.command))
        )
    )


def success_line(attempt: Attempt) -> int:
    """Number of the last line that says success; 0 without one."""
    rows = [hit.number for hit in attempt.of_kind("success") if hit is success_hit(attempt)]
    return max(rows, default=0)


def succeeded(attempt: Attempt) -> bool:
    """Whether the attempt ended well."""
    line = success_line(attempt)
    late = [hit for hit in attempt.of_kind("consequence") if hit.number > line]
    return line > 0 and not late


def failed(attempt: Attempt) -> bool:
    """Whether the attempt ended badly, whatever the reason."""
    line = success_line(attempt)
    return any(hit.number > line for hit in attempt.of_kind("consequence"))


def redirected(evidence: Evidence) -> Ending | None:
    """A command whose requirement lost its bound to the shell."""
    for attempt in reversed(evidence.log.attempts):
        lost = commands.redirect(attempt.command)
        if lost:
            opinion = Opinion(
                *("shell-redirect", HARD),
                "an unquoted > or < in a requirement is taken by the shell, which sends the output"
                " to a file",
                ("build-slow-not-stuck",),
                {"found": lost["found"], "file": lost["file"], "package": lost["package"]},
            )
            return opinion, command_hit(attempt), attempt
    return None


def command_hit(attempt: Attempt) -> Hit:
    """The line of an attempt's command, as a hit."""
    prompt = next(row for row in signatures() if row.id == "prompt")
    return Hit(prompt, attempt.first, attempt.command, {})


def unfinished(evidence: Evidence, attempt: Attempt | None) -> Ending | None:
    """A log that ends in the middle of a build: still at work, or cut off."""
    log = evidence.log
    if not log.tail:
        return None
    last = log.attempts[-1]
    cut = cut_off(last)
    if cut is not None:
        return cut
    stopped = any(_STOPPED.search(text) for _, text in log.tail)
    for number, text in reversed(log.tail):
        if _STOPPED.search(text) or re.match(r"\s*(?:Traceback|File |\^|note:|$)", text):
            continue
        plain = text.strip()
        if _UNFINISHED.search(plain):
            return _slow(number, plain, HARD, last), _line_hit(number, plain), last
        bare = all(hit.signature.kind in ("noise", "consequence") for hit in last.hits)
        if _COMPILING.search(plain) and (bare or _CHILD.match(text)):
            return _cut_in_child(), _line_hit(number, plain), last
        if _COMPILING.search(plain) and not (attempt and failed(attempt)):
            return _slow(number, plain, INFERRED, last), _line_hit(number, plain), last
        if not stopped:
            break
    building = [hit for hit in last.of("building-wheel", "uv-building") if _open(hit, last)]
    if building and not failed(last) and success_line(last) < building[-1].number:
        return _slow(0, "", INFERRED, last), building[-1], last
    return _waiting_for_wheel(evidence, last)


def _cut_in_child() -> Opinion:
    return Opinion(
        *("log-truncated", INFERRED),
        "the log holds lines from the middle of a build and neither its beginning nor its end",
    )


def _slow(number: int, text: str, weight: int, attempt: Attempt) -> Opinion:
    return Opinion(
        *("build-slow-not-stuck", weight),
        "the log ends while the wheel is being built, and no line reports an error",
    )


def _line_hit(number: int, text: str) -> Hit:
    building = next(row for row in signatures() if row.id == "building-wheel")
    return Hit(building, number, text[:400], {})


def _open(hit: Hit, attempt: Attempt) -> bool:
    """Whether a build has started and nothing says that it ended."""
    state = hit.values.get("state", "")
    if re.search(r"done|error|finished", state):
        return False
    package = hit.values.get("package", "")
    return not any(
        row.number > hit.number
        and row.values.get("package", "").replace("_", "-") == package.replace("_", "-")
        for row in attempt.of("created-wheel", "uv-built", "building-wheel")
        if re.search(r"done|error|finished", row.values.get("state", "done"))
    )


def _waiting_for_wheel(evidence: Evidence, attempt: Attempt) -> Ending | None:
    """The last line is the address of a wheel: the download does not answer."""
    number, _ = evidence.log.tail[-1]
    guess = next(attempt.of("guessing"), None)
    if guess is not None and guess.number == number:
        opinion = Opinion(
            *("wheel-download-failed", SIGN), "the log ends at the address that setup.py downloads"
        )
        return opinion, guess, attempt
    return None


def cut_off(attempt: Attempt) -> Ending | None:
    """An installer's frame that announces more lines than there are."""
    first, end = attempt.box
    if not first or end or attempt.announced is None:
        return None
    present = attempt.last - first
    if present >= attempt.announced:
        return None
    opinion = Opinion(
        *("log-truncated", HARD),
        f"{attempt.announced} lines of output are announced and {present} are there",
        values={"needed": str(attempt.announced), "found": str(present)},
    )
    return opinion, _line_hit(first, f"[{attempt.announced} lines of output]"), attempt


def nothing_known(evidence: Evidence, attempt: Attempt | None) -> Ending:
    """A log without a cause: empty, only consequences, an unknown error, or nothing wrong."""
    log = evidence.log
    if not log.words:
        return Opinion("log-truncated", HARD, "the log is empty"), None, None
    consequences = [hit for one in log.attempts for hit in one.of_kind("consequence")]
    explained = {hit.number for hit in consequences}
    unknown = [
        hit
        for one in log.attempts
        for hit in one.of_kind("unknown")
        if hit.number not in explained and not (attempt and hit.number < success_line(attempt))
    ]
    if unknown and not consequences:
        return UNKNOWN, unknown[0], attempt
    if consequences:
        opinion = Opinion(
            *("log-truncated", HARD if not unknown else SIGN),
            "only consequences of an error are in the log, and the error itself is above it"
            if not unknown
            else "besides consequences only an error of no kind known here is in the log",
        )
        return opinion, (unknown or consequences)[0], attempt
    return _quiet(evidence)


def unknown_after_success(log: Log, attempt: Attempt) -> Ending | None:
    """An exception of no kind known here after an install that succeeded."""
    success = success_line(attempt)
    if not succeeded(attempt):
        return None
    for one in log.attempts:
        if one.kind == "probe":
            continue
        for hit in one.of_kind("unknown"):
            if hit.number > success and re.search(r"\b\w+(?:Error|Exception): ", hit.text):
                return UNKNOWN, hit, one
    return None


def _quiet(evidence: Evidence) -> Ending:
    """Neither an error nor a word of success."""
    log = evidence.log
    for attempt in reversed(log.attempts):
        if attempt.kind == "run" and commands.is_about_modules(attempt.command):
            opinion = Opinion("success", SIGN, "a command ran and nothing complains after it")
            return opinion, command_hit(attempt), attempt
        line = success_hit(attempt) or next(attempt.of_kind("success"), None)
        if line is not None:
            return Opinion("success", SIGN, "a step succeeded and nothing complains"), line, attempt
    return (
        Opinion(
            "log-truncated", SIGN, "there is neither an error nor a word of success in the log"
        ),
        None,
        None,
    )
