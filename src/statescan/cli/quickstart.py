# SPDX-License-Identifier: Apache-2.0
"""``statescan quickstart``: does this installation work, how fast is it, and what does it write.

Each part is computed elsewhere (backends, _checks, _measure, generation); here they are shown.
"""

from __future__ import annotations

import argparse
from typing import Any

from statescan.backends.base import ALL_OPS
from statescan.cli import backends, options, render
from statescan.errors import StatescanError

SIZES = {"batch": 1, "dim": 768, "seqlen": 2048, "dstate": 16, "width": 4}
DTYPES = ("float32", "bfloat16")
DEFAULT_PROMPT = "In the beginning God created"
NEW_TOKENS = 240
TEMPERATURE, SEED = 0.5, 2
LONGEST_PROMPT = 4096
"""Bytes of a prompt that are read, from its end: more would only cost time here."""


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "quickstart", execute, "Check this installation and write some text."),
        "Lists the backends, compares every op on each usable one with the float64 reference,\n"
        "measures speed and memory against the naive algorithm, and continues a prompt with the\n"
        "built-in model. Takes less than a minute on two cores. Exit code 1 if any verdict fails.",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help=f'default: "{DEFAULT_PROMPT}"')
    prompts.add_argument("--file", metavar="FILE", help="continue the end of this file's text")
    options.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    prompt = _prompt(args)
    shown = not args.json
    from statescan.cli._machine import describe_machine, summary

    machine = describe_machine()
    rows, native = backends.backend_rows(), backends.native_row()
    if shown:
        render.wrap(summary(machine))
        render.heading("Backends")
        backends.print_backends(rows, native)
    fault = backends.environment_fault(rows)
    if fault:
        # Every later part would fail with this one cause, once for each row.
        raise options.UsageError(fault)
    usable = [row for row in rows if row["usable"]]
    checks = _run_checks([row["backend"] for row in usable])
    if shown:
        _print_checks(checks)
    speed = _measure_speed([row["backend"] for row in usable if row["automatic"]], checks)
    if shown:
        _print_speed(speed)
    text = _write_text(prompt, shown)
    failures = _failures(checks, speed, text)
    if shown:
        _conclude(failures)
    else:
        render.document(
            "quickstart",
            {"passed": not failures, "machine": machine, "backends": rows}
            | {"native_library": native, "checks": checks}
            | {"speed": {"sizes": SIZES, "dtype": "float32", "rows": speed}, "generation": text},
        )
    return 1 if failures else 0


def _prompt(args: argparse.Namespace) -> str:
    """The text to continue, read before anything takes time."""
    prompt = DEFAULT_PROMPT
    if args.file is not None:
        prompt = options.read_text(args.file, "--file")
    elif args.prompt is not None:
        prompt = options.user_text(args.prompt)
    if not prompt:
        raise options.UsageError(
            "quickstart: the prompt is empty.\n"
            "It must hold at least one character.\n"
            "Give some words, or leave --prompt and --file out."
        )
    data = prompt.encode("utf-8")
    return data[-LONGEST_PROMPT:].decode("utf-8", errors="ignore")


def _run_checks(names: list[str]) -> list[dict[str, Any]]:
    from statescan.cli._checks import QUICK_CASES, check_op

    rows = []
    for op in ALL_OPS:
        for name in names:
            for dtype in DTYPES:
                render.status(f"checking {op} on {name} in {dtype}")
                rows.append(check_op(op, name, dtype, QUICK_CASES[op]))
    render.status()
    return rows


def _print_checks(checks: list[dict[str, Any]]) -> None:
    render.heading("Correctness: outputs and gradients against the float64 reference")
    cells = []
    for row in checks:
        numbers = (
            "-" if row[key] is None else f"{row[key]:.1e}" for key in ("worst_error", "tolerance")
        )
        verdict = "ok" if row["passed"] else "FAILED"
        cells.append((row["op"], row["backend"], row["dtype"], *numbers, verdict))
    headers = ("op", "backend", "dtype", "worst error", "allowed", "verdict")
    render.table(headers, cells, right=(3, 4))


def _measure_speed(names: list[str], checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from statescan.cli._measure import Spec, measure

    wrong = {r["backend"] for r in checks if r["op"] == "selective_scan" and not r["passed"]}
    plan = [("naive", "fwd"), *[(name, way) for name in names for way in ("fwd", "fwd_bwd")]]
    rows = []
    for version, direction in plan:
        render.status(f"measuring {version} {direction}")
        row: dict[str, Any] = {"version": version, "direction": direction}
        if version in wrong:
            row |= {"samples_per_s": None, "peak_bytes": None}
            row["error"] = "not measured: its results are wrong, see above"
        else:
            result = measure(Spec("selective_scan", SIZES, "float32", direction, version))
            seconds = result["seconds"]
            row["samples_per_s"] = SIZES["batch"] / seconds if seconds else None
            row |= {key: result[key] for key in ("spread", "peak_bytes", "error")}
        rows.append(row)
    render.status()
    return rows


def _print_speed(rows: list[dict[str, Any]]) -> None:
    sizes = ", ".join(f"{name} {SIZES[name]}" for name in ("batch", "dim", "seqlen", "dstate"))
    render.heading(f"Speed of selective_scan: {sizes}, float32")
    words = {"fwd": "forward", "fwd_bwd": "forward + backward"}
    cells = []
    for row in rows:
        version = "naive algorithm" if row["version"] == "naive" else f"backend {row['version']}"
        rate = row["samples_per_s"]
        shown = "-" if rate is None else render.figure(rate)
        note = row["error"] or ""
        cells.append(
            (version, words[row["direction"]], shown, render.size(row["peak_bytes"]), note)
        )
    headers = ["", "", "samples/s", "peak memory", ""]
    render.table(headers, cells, right=(2, 3))
    render.say()
    render.wrap(
        "Each row ran in a process of its own; peak memory is the growth once the inputs exist. "
        "The naive algorithm stores (batch, dim, seqlen, dstate) and walks time."
    )


def _write_text(prompt: str, shown: bool) -> dict[str, Any]:
    """Continue the prompt; what is missing becomes a row with the reason."""
    if shown:
        render.heading(f"Text of the built-in model: {NEW_TOKENS} bytes after the prompt")
    pieces: list[str] = []
    result: dict[str, Any] = {"prompt": prompt, "temperature": TEMPERATURE, "seed": SEED}
    error = None
    try:
        from statescan.generation import SamplingConfig, stream
        from statescan.models import load_embedded

        model, tokenizer = load_embedded()
        sampling = SamplingConfig(temperature=TEMPERATURE, seed=SEED)
        if shown:
            render.stream(prompt)
        for piece in stream(model, tokenizer, prompt, NEW_TOKENS, sampling=sampling):
            pieces.append(piece)
            if shown:
                render.stream(piece)
    except Exception as reason:  # noqa: BLE001, whatever fails here is a verdict like the others
        error = str(reason) if isinstance(reason, StatescanError) else repr(reason)
    if shown and pieces:
        render.say()
    if shown and error:
        # Not wrapped, so that a command in the message can be copied.
        render.say(f"FAILED: {error}")
    return result | {"text": "".join(pieces), "error": error}


def _failures(
    checks: list[dict[str, Any]], speed: list[dict[str, Any]], text: dict[str, Any]
) -> list[str]:
    """One line for each verdict that does not hold."""
    failed = [
        f"{row['op']} on {row['backend']} in {row['dtype']}: {row['error']}"
        for row in checks
        if not row["passed"]
    ]
    failed += [
        f"speed of {row['version']} {row['direction']}: {row['error']}"
        for row in speed
        if row["error"]
    ]
    return failed + ([f"text: {text['error']}"] if text["error"] else [])


def _conclude(failures: list[str]) -> None:
    render.say()
    if failures:
        render.say(f"{len(failures)} verdicts FAILED." if failures[1:] else "1 verdict FAILED.")
    else:
        render.say("All verdicts hold.")
    for line in failures:
        render.error(line)
    if not failures:
        render.hints(
            [
                'statescan generate --prompt "..." writes more',
                "statescan train --text FILE --out DIR learns your own text",
            ]
        )
