# SPDX-License-Identifier: Apache-2.0
"""``statescan write KIND``: files for an environment that works, from facts or from a target.

What they say is decided in ``doctor.generate``; here the input is read and the file is put down.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statescan.cli import options, render

if TYPE_CHECKING:
    from statescan.doctor.generate.choices import Choices
    from statescan.doctor.generate.matrix import ImpossibleTarget
    from statescan.doctor.generate.target import Target

KINDS = {
    "lock": "a version for every package that is known, for pip's -c",
    "requirements": "the least that must be pinned, for pip's -r",
    "conda": "an environment.yml",
    "dockerfile": "an image in two stages: no compiler in the last one, no root",
    "compose": "a compose.yaml for that image, with the GPU",
    "ci": "a GitHub Actions workflow: the import, and a smoke test",
}
PACKAGES = ("statescan", "mamba-ssm", "causal-conv1d")


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    kinds = "\n".join(f"  {kind:13} {text}" for kind, text in KINDS.items())
    parser = options.add_command(
        *(subparsers, "write", execute, "Write a lock, Dockerfile, CI workflow, ... that works."),
        f"{kinds}\n\n"
        "Versions are pinned, each with a comment that says why. The same input gives the same\n"
        "bytes. Nothing is written without --output. Exit code 1 when no such environment exists;\n"
        "the message then names the nearest one.\n\n"
        'example: statescan write dockerfile --for mamba-ssm --target "cuda=12.8 torch=2.7"',
    )
    parser.add_argument("kind", choices=tuple(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        *("--for",),
        dest="package",
        choices=PACKAGES,
        default="statescan",
        metavar="PKG",
        help=f"{', '.join(PACKAGES)} (default: statescan)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--facts", metavar="FILE", help="facts that `statescan doctor --json` saved (default: here)"
    )
    source.add_argument(
        "--target",
        metavar="TEXT",
        help="KEY=VALUE words, with cuda, torch, python, os, machine, gpu as KEY",
    )
    parser.add_argument("--output", metavar="FILE", help="write this file instead of printing")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    options.add_json(parser)
    parser.add_argument(
        "--redact", action="store_true", help="take user, host and home folder out of the result"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.doctor import generate
    from statescan.doctor.generate.choices import choose
    from statescan.doctor.generate.matrix import ImpossibleTarget
    from statescan.doctor.redact import redactor

    path = _output_path(args)
    redact = redactor() if args.redact else _unchanged
    target = _target(args)
    try:
        choices = choose(args.kind, args.package, target)
    except ImpossibleTarget as refusal:
        if not args.json:
            raise
        render.document("write", redact(_refused(args, target, refusal)))
        render.error(str(refusal))
        return 1
    text = redact(generate.WRITERS[args.kind](choices))
    if path is not None:
        put(path, text, args.force)
    if args.json:
        render.document("write", redact(_document(args, choices, text, path)))
    elif path is None:
        render.stream(text)
    else:
        for line in _told(args, choices, path):
            render.talk(redact(line))
    return 0


def put(path: Path, text: str, force: bool) -> None:
    """Write a whole file or nothing; an existing one is replaced only when that is asked for."""
    # A link stays a link: the file that it points to is replaced.
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(text.encode("utf-8"))
        if force:
            if path.exists():
                shutil.copymode(path, draft)
            draft.replace(path)
        else:
            _put_new(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _put_new(draft: Path, path: Path) -> None:
    """Give the draft its name, unless a file has taken that name meanwhile."""
    try:
        os.link(draft, path)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError:
        # Some file systems have no hard links.
        if path.exists():
            raise _exists(path) from None
        draft.replace(path)


def _output_path(args: argparse.Namespace) -> Path | None:
    """Where to write, refused before any work is done."""
    if args.output is None:
        if args.force:
            raise options.UsageError(
                "write: --force is given without --output.\n"
                "It allows to replace the file that --output names.\n"
                "Leave it out, or add --output FILE."
            )
        return None
    path = Path(args.output)
    if path.is_dir() or not path.parent.is_dir():
        raise options.UsageError(
            f"write: --output {args.output!r} cannot be a file.\n"
            "It must name a file in a folder that exists.\n"
            "Make the folder first, or name another file."
        )
    if path.exists() and not args.force:
        raise _exists(path)
    return path


def _exists(path: Path) -> options.UsageError:
    return options.UsageError(
        f"write: {str(path)!r} exists and was left as it is.\n"
        "A file is replaced only when that is asked for.\n"
        "Add --force, or name another file."
    )


def _target(args: argparse.Namespace) -> Target:
    from statescan.doctor.generate import target
    from statescan.doctor.model import Facts

    if args.target is not None:
        return target.parse(args.target)
    if args.facts is not None:
        return target.from_facts(Facts.read(Path(args.facts)))
    from statescan.doctor.facts import gather

    render.status("looking at this machine")
    facts = gather.gather_static()
    render.status()
    return target.from_facts(facts)


def _document(
    args: argparse.Namespace, choices: Choices, text: str, path: Path | None
) -> dict[str, Any]:
    from statescan.doctor import generate
    from statescan.doctor.generate import steps

    file = generate.FILES[args.kind] if path is None else str(path)
    commands = [*steps.use(args.kind, choices, file), *steps.after(args.kind, choices)]
    return {
        "kind": args.kind,
        "package": args.package,
        "possible": True,
        "target": choices.target.text(),
        "choices": [{"name": row.name, "value": row.value, "why": row.why} for row in choices.rows],
        "notes": list(choices.notes),
        "file_name": generate.FILES[args.kind],
        "text": text,
        "written": None if path is None else str(path),
        "steps": [command.to_json() for command in commands],
        "refusal": None,
    }


def _refused(args: argparse.Namespace, target: Target, refusal: ImpossibleTarget) -> dict[str, Any]:
    from statescan.doctor import generate

    return {
        "kind": args.kind,
        "package": args.package,
        "possible": False,
        "target": target.text(),
        "choices": [],
        "notes": [],
        "file_name": generate.FILES[args.kind],
        "text": None,
        "written": None,
        "steps": [],
        "refusal": {
            "reason": refusal.reason,
            "needed": refusal.needed,
            "nearest": refusal.nearest,
        },
    }


def _told(args: argparse.Namespace, choices: Choices, path: Path) -> list[str]:
    """What was written, and what to type next."""
    from statescan.doctor import shells
    from statescan.doctor.generate import steps

    lines = [f"wrote {path}", *(f"note: {note}" for note in choices.notes)]
    commands = [*steps.use(args.kind, choices, str(path)), *steps.after(args.kind, choices)]
    if commands:
        lines.append("next:")
    return lines + [f"  {line}" for command in commands for line in shells.lines(command, "bash")]


def _unchanged(value: Any) -> Any:
    return value
