# SPDX-License-Identifier: Apache-2.0
"""``statescan build PACKAGE``: the original's own source build, checked, watched and proved.

The build is in ``doctor/builder``; only options and output are here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statescan import settings
from statescan.cli import options, render

if TYPE_CHECKING:
    from statescan.doctor.builder.model import Outcome, Setup, Stage
    from statescan.doctor.builder.progress import State
    from statescan.doctor.model import Facts

PACKAGES = ("mamba-ssm", "causal-conv1d")
INTERRUPTED = 130

_DETAILS = """\
Checks this machine first and refuses, with the fix, what cannot succeed. Then it fetches the source
package, compiles it for the GPUs of this machine (or --arch), installs the wheel, imports it, and
compares its results with plain torch where there is a GPU. torch is never changed. The whole output
is kept in a log; a failure is explained as by `statescan log`, and tried once more where that is
safe. Variables that you set (MAX_JOBS, CUDA_HOME, MAMBA_FORCE_BUILD, ...) stay as they are.
Exit code 0 when it is built, 1 when it was refused or failed.

examples:
  statescan build causal-conv1d --dry-run
  statescan build mamba-ssm --version 2.3.1
  statescan build causal-conv1d --arch sm_90      on a machine without the GPU"""


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "build", execute),
        "Build one of the originals from source, with checks before and a proof after.",
        _DETAILS,
    )
    parser.add_argument("package", choices=PACKAGES, metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument(
        "--version", default="", metavar="V", help="a release (default: the newest that fits)"
    )
    parser.add_argument(
        *("--arch",),
        action="append",
        default=[],
        metavar="SM",
        help="GPU code to make, such as sm_90 (default: the GPUs of this machine)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the environment and the commands only"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="work here (default: in the cache folder)"
    )
    parser.add_argument(
        *("--facts",),
        metavar="FILE",
        help="with --dry-run: judge the machine of these facts, saved by `statescan doctor --json`",
    )
    options.add_json(parser)
    parser.add_argument(
        "--redact", action="store_true", help="hide home folders, user and host names"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.doctor.builder import before, files, pipeline, stages
    from statescan.doctor.builder.model import Outcome
    from statescan.doctor.redact import redactor

    _checked(args)
    hide: Callable[[Any], Any] = redactor() if args.redact else lambda value: value
    facts = _facts(args)
    request = before.Request(args.package, args.version, tuple(args.arch))
    folder = files.fresh_folder(args.folder or _folder(args.package))
    python = str(facts.get("python.executable") if args.facts else sys.executable)
    setup = before.prepare(request, facts, folder, python)
    if setup.findings:
        outcome = Outcome("refused", setup, ())
    elif args.dry_run:
        outcome = Outcome("planned", setup, stages.plan(setup, facts, python))
    else:
        watcher = _Watcher(setup, hide)
        outcome = pipeline.run(setup, facts, python, dict(os.environ), watcher)
        watcher.clear()
    _show(outcome, facts, args, hide)
    if outcome.status == "interrupted":
        return INTERRUPTED
    return 0 if outcome.status in ("built", "planned") else 1


def _checked(args: argparse.Namespace) -> None:
    if args.facts and not args.dry_run:
        raise options.UsageError(
            f"--facts {args.facts}: a build runs on this machine, whatever the file says.\n"
            "With the facts of another machine only --dry-run makes sense.\n"
            "Add --dry-run, or leave --facts out."
        )
    if args.folder and args.folder.exists() and not args.folder.is_dir():
        raise options.UsageError(
            f"--folder {args.folder}: that is a file.\n"
            "It must be a folder, or a path where one can be made.\nName another one."
        )


def _folder(package: str) -> Path:
    """A folder for this build alone, so that no log is ever written over."""
    return settings.cache_dir() / "builds" / f"{package}-{time.strftime('%Y%m%d-%H%M%S')}"


def _facts(args: argparse.Namespace) -> Facts:
    from statescan.doctor.model import Facts

    if args.facts:
        return Facts.read(Path(args.facts))
    from statescan.doctor.facts.gather import gather

    render.status("looking at this machine")
    found: Facts = gather(smoke=False)
    render.status()
    return found


def _show(
    outcome: Outcome, facts: Facts, args: argparse.Namespace, hide: Callable[[Any], Any]
) -> None:
    from statescan.doctor.render import build as text
    from statescan.doctor.shells import shell_of

    if args.json:
        render.document("build", hide(outcome.to_json()))
        return
    shell = shell_of(facts.get("system.os", ""), facts.get("system.shell"))
    write = {"refused": text.refused_lines, "planned": text.planned_lines}
    lines = write.get(outcome.status, text.ended_lines)
    coloured = render.colour_wanted(sys.stdout)
    for line in lines(outcome, shell, render.line_width(), coloured):
        render.say(hide(line))


class _Watcher:
    """Talks about a build while it goes on: one changing line in a terminal, else lines."""

    def __init__(self, setup: Setup, hide: Callable[[Any], Any]) -> None:
        from statescan.doctor.render import build as text

        self._text, self._hide = text, hide
        self._said: tuple[object, ...] = ()
        self._terminal = sys.stderr.isatty()
        for line in text.head_lines(setup, render.line_width()):
            render.talk(hide(line))
        render.talk(hide(f"  log:      {setup.log}"))
        render.talk()

    def stage(self, stage: Stage) -> None:
        """A stage starts, is skipped, or has ended."""
        from statescan.doctor.builder.model import PLANNED

        self.clear()
        if stage.status != PLANNED:
            coloured = render.colour_wanted(sys.stderr)
            for line in self._text.stage_lines(stage, render.line_width(), coloured):
                render.talk(self._hide(line))
        elif self._terminal:
            render.status(f"{stage.title} ...")
        else:
            render.talk(f"{stage.title} ...")

    def compiling(self, state: State) -> None:
        """The compilation goes on."""
        if self._terminal:
            render.status(state.text())
        elif self._said != (state.done, state.total, state.running):
            self._said = (state.done, state.total, state.running)
            render.talk(f"  {state.text()}")

    def note(self, text: str) -> None:
        """Something worth telling."""
        self.clear()
        render.talk(self._hide(f"note: {text}"))

    def clear(self) -> None:
        """Take the changing line away."""
        if self._terminal:
            render.status()
