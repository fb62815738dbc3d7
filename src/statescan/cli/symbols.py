# SPDX-License-Identifier: Apache-2.0
"""``statescan symbols FILE``: whether a compiled extension or a wheel fits here, unloaded.

Reading and judging are in ``doctor/symbols``; only options and output are here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statescan.cli import options, render

if TYPE_CHECKING:
    from statescan.doctor.model import Facts, Finding

_DETAILS = """\
Says which torch, CUDA, Python and CPU a binary was built for, where each library that it needs is
found, which symbols the installed torch lacks, and for which GPUs there is code in it. The file is
read and never loaded. Exit code 1 when it cannot work here.

examples:
  statescan symbols selective_scan_cuda.cpython-311-x86_64-linux-gnu.so
  statescan symbols mamba_ssm-2.2.4+cu12torch2.5cxx11abiFALSE-cp311-cp311-linux_x86_64.whl"""


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "symbols", execute),
        "Tell whether a compiled extension or a wheel fits here, without loading it.",
        _DETAILS,
    )
    parser.add_argument("file", metavar="FILE", help="an extension module (.so, .pyd) or a wheel")
    parser.add_argument(
        *("--torch",), metavar="DIR", help="the torch to compare with (default: the installed one)"
    )
    parser.add_argument(
        *("--facts",),
        metavar="FILE",
        help="judge for the machine of these facts, saved by `statescan doctor --json`",
    )
    options.add_json(parser)
    parser.add_argument(
        "--redact", action="store_true", help="hide home folders, user and host names"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.doctor.model import Severity
    from statescan.doctor.redact import redactor
    from statescan.doctor.shells import shell_of
    from statescan.doctor.symbols import text

    facts = _facts(args)
    kind, content, findings, verdict = _judged(args, facts)
    hide = redactor() if args.redact else lambda value: value
    if args.json:
        document = {
            "file": args.file,
            "kind": kind,
            "facts_from": args.facts,
            "verdict": verdict,
            "findings": [row.to_json() for row in findings],
            "binary": content if kind == "binary" else None,
            "wheel": content if kind == "wheel" else None,
        }
        render.document("symbols", hide(document))
    else:
        width = render.line_width()
        lines = (text.wheel_lines if kind == "wheel" else text.binary_lines)(content, width)
        shell = shell_of(facts.get("system.os", ""), facts.get("system.shell"))
        coloured = render.colour_wanted(sys.stdout)
        for line in [*lines, *text.answer_lines(findings, verdict, shell, width, coloured)]:
            render.say(hide(line))
        render.hints(_hints(content, facts))
    return int(any(row.severity is Severity.ERROR for row in findings))


def _facts(args: argparse.Namespace) -> Facts:
    """Those of the file, or of this machine; with another torch in them if one is given."""
    from statescan.doctor.model import Facts
    from statescan.doctor.symbols import torch_files

    if args.facts is None:
        from statescan.doctor.facts.gather import gather_static

        facts = gather_static()
    else:
        facts = Facts.read(Path(args.facts))
    if args.torch is not None:
        given = torch_files.facts(torch_files.locate(Path(args.torch)))
        facts = Facts({**{fact.name: fact for fact in facts}, **given})
    return facts


def _judged(
    args: argparse.Namespace, facts: Facts
) -> tuple[str, dict[str, Any], list[Finding], str]:
    """The kind of file, what was read of it, and what that means."""
    from statescan.doctor.symbols import judge, judge_wheel, report, wheel
    from statescan.doctor.symbols.binary import BinaryError, WrongKindError

    path, here = Path(args.file), args.facts is None
    libraries = facts.get("torch.libraries") if here or args.torch is not None else None
    is_wheel = path.suffix == ".whl"
    try:
        if is_wheel:
            content = wheel.inspect(path, libraries, look=here)
            found = judge_wheel.judge_wheel(content, facts)
            return "wheel", content, found, judge_wheel.verdict(content, found)
        content = report.read(path, libraries, look=here)
    except WrongKindError as error:
        raise options.UsageError(f"symbols: {error}") from error
    except BinaryError as error:
        content = report.damaged(path, str(error))
    found = judge.judge(content, facts)
    return "binary", content, found, judge.verdict(content, found)


def _hints(content: dict[str, Any], facts: Facts) -> list[str]:
    reports = content.get("binaries", [content])
    lines = []
    if any(
        row["status"] == "after-torch" for report in reports for row in report["libraries"] or ()
    ):
        lines.append("torch's libraries are found only after `import torch` in the same process")
    if any(report["libraries"] is None and report["needed"] for report in reports):
        lines.append(
            "libraries are looked for where the file is for Linux on the CPU of this machine, "
            "and no --facts are given"
        )
    if any(report["cuda_archs"]["cubin"] for report in reports) and not (
        facts.get("torch.devices") or facts.get("driver.gpus")
    ):
        lines.append("no GPU is known here, so its GPU code was compared with none")
    return lines
