# SPDX-License-Identifier: Apache-2.0
"""``statescan bench``: every usable backend against the naive algorithm and other packages.

What is timed is ``_bench_run``'s and ``_bench_model``'s, plots and pages ``_bench_report``'s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statescan.backends.base import ALL_OPS
from statescan.cli import options, render

if TYPE_CHECKING:
    import torch

    from statescan.cli._bench_run import Findings
    from statescan.cli._roofline import Ceilings

DEFAULT_SIZES = {"batch": 1, "dim": 1536, "seqlen": 512, "dstate": 16, "width": 4}
MODEL = "model"
_WIDTHS = (22, 7, 18, 14, 9)
_OP_HEADERS = ("op", "way", "version", "ms", "speed")
_FLOOR = "of floor"
_MODEL_HEADERS = ("model", "way", "version", "tokens/s", "ms/token")
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "bench", execute, "Time ops and a model, on CPU or GPU, against other ways."),
        "Each row is one version: the naive algorithm, every usable backend, and every peer that\n"
        "can be imported (mamba_ssm, causal_conv1d, mambapy, transformers); the others are named\n"
        "with the reason. All versions run in turns in one process. Times are medians, the spread\n"
        "is half the distance between the quartiles, and speed is against the naive algorithm.\n\n"
        "Before any time is taken, all cases of the op, and every version at the chosen sizes,\n"
        "are compared with the float64 reference: a wrong result has no speed, and the exit code\n"
        "is 1 if it is ours.\n\n"
        "At the default sizes the naive backward takes a minute or more for each of two ops;\n"
        "--direction fwd leaves it out.\n\n"
        "A time without a spread is a single call.\n\n"
        "With --device cuda the peers are the originals' kernels, times are those of queued calls\n"
        "from an idle GPU to an idle GPU, and each op has its floor: every byte moved once at the\n"
        "speed of a copy, measured at the start, every exponential once at that unit's speed.",
    )
    parser.add_argument(
        *("ops",),
        nargs="*",
        metavar="OP",
        help=f"{', '.join(ALL_OPS)}, or {MODEL} (default: all)",
    )
    for name, size in DEFAULT_SIZES.items():
        parser.add_argument(
            f"--{name}",
            type=options.positive_int,
            default=size,
            metavar="N",
            help=f"of the ops (default: {size})",
        )
    _add_what(parser)
    options.add_threads(parser)
    _add_output(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--device",),
        default="cpu",
        metavar="NAME",
        help="cpu, cuda, or one of several as cuda:1 (default: cpu)",
    )
    parser.add_argument(
        *("--dtype",),
        type=options.dtype_name,
        default="float32",
        metavar="NAME",
        help="of activations and of the model: float32, bfloat16, float16, float64 "
        "(default: float32)",
    )
    parser.add_argument(
        *("--direction",),
        choices=("fwd", "fwd_bwd"),
        help="only forward, or only forward + backward, of the ops (default: both)",
    )
    parser.add_argument(
        *("--backend",),
        action="append",
        metavar="NAME",
        help="backend to time, may be repeated (default: every usable one)",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave out the packages of others")
    parser.add_argument(
        *("--model",),
        choices=("embedded", "130m"),
        default="embedded",
        help="the built-in model, or the sizes of Mamba-130M with random weights "
        "(default: embedded)",
    )
    for name, size in (("prefill", 512), ("decode", 64)):
        parser.add_argument(
            f"--{name}",
            type=options.positive_int,
            default=size,
            metavar="N",
            help=f"tokens that the model {'reads' if name == 'prefill' else 'writes'} "
            f"(default: {size})",
        )
    parser.add_argument(
        *("--seconds",),
        type=float,
        default=2.0,
        metavar="S",
        help="time for each group of rows; 3 samples at least, unless one takes long (default: 2)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)
    parser.add_argument(
        "--plot", metavar="FILE", help=f"write the bars as {', '.join(_PLOT_SUFFIXES)}"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one page with tables, plots, machine and versions"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    names = _chosen(args.ops)
    _check_files(args)
    options.set_threads(args.threads)
    device = options.torch_device(args.device)
    from statescan.cli._bench_run import Findings, chosen_backends
    from statescan.cli._machine import describe_machine, summary

    machine = describe_machine(device)
    findings = Findings()
    backends = chosen_backends(args.backend, findings, device.type)
    ceilings = _ceilings(device, names)
    if not args.json:
        render.wrap(summary(machine))
        render.say(", ".join([args.dtype, *[f"{n} {getattr(args, n)}" for n in DEFAULT_SIZES]]))
    table: render.GrowingTable | None = None
    for position, name in enumerate(names):
        if not args.json and (table is None or name == MODEL):
            render.say()
            table = _table(name == MODEL, ceilings is not None)
        gates = len(findings.gates)
        for timings in _timings(name, args, backends, findings, device, ceilings):
            if table is not None:
                _add_rows(table, timings)
        if table is not None:
            for gate in findings.gates[gates:]:
                if not gate["passed"]:
                    floor = ("-",) if ceilings is not None and name != MODEL else ()
                    table.add(name, "-", gate["backend"], "FAILED", "-", *floor)
        render.status(f"{position + 1} of {len(names)} done")
    render.status()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    document = {"passed": findings.passed, "date": date, "machine": machine, **vars(findings)}
    if args.json:
        render.document("bench", document)
    _write_files(args, document)
    _remarks(findings)
    return 0 if findings.passed else 1


def _ceilings(device: torch.device, names: list[str]) -> Ceilings | None:
    """Of a GPU; nobody needs them where only the model is timed."""
    if device.type != "cuda" or names == [MODEL]:
        return None
    from statescan.cli._roofline import measure_ceilings

    return measure_ceilings(device)


def _table(of_model: bool, with_floor: bool) -> render.GrowingTable:
    headers = _MODEL_HEADERS if of_model else _OP_HEADERS
    if with_floor and not of_model:
        return render.GrowingTable((*headers, _FLOOR), (*_WIDTHS, 9), right=(3, 4, 5))
    return render.GrowingTable(headers, _WIDTHS, right=(3, 4))


def _chosen(names: list[str]) -> list[str]:
    known = [*ALL_OPS, MODEL]
    for name in names:
        if name not in known:
            raise options.UsageError(
                f"bench: {name!r} is not an op.\n"
                f"It must be one of: {', '.join(known)}.\n"
                "Leave the ops out to time all of them."
            )
    # The model comes last, whatever the order given: its table has other columns.
    return [name for name in known if name in names or not names]


def _check_files(args: argparse.Namespace) -> None:
    """Refuse what could not be written before minutes of measuring."""
    if args.plot and Path(args.plot).suffix not in _PLOT_SUFFIXES:
        raise options.UsageError(
            f"--plot {args.plot}: the name must end in one of {', '.join(_PLOT_SUFFIXES)}.\n"
            "The ending says which format to write.\n"
            "For tables and plots in one page use --html FILE."
        )
    for option, name in (("--plot", args.plot), ("--html", args.html)):
        if name and not Path(name).resolve().parent.is_dir():
            raise options.UsageError(
                f"{option} {name}: its folder does not exist.\n"
                "It must be a file name in a folder that exists.\n"
                f"Make {Path(name).resolve().parent} first."
            )
    if args.plot or args.html:
        from statescan.cli._bench_report import import_figure

        import_figure()


def _timings(
    name: str,
    args: argparse.Namespace,
    backends: list[str],
    findings: Findings,
    device: torch.device,
    ceilings: Ceilings | None,
) -> Iterator[list[dict[str, Any]]]:
    common: dict[str, Any] = {
        "backends": backends,
        "with_peers": not args.no_peers,
        "forced": bool(args.backend),
        "seconds": args.seconds,
        "findings": findings,
        "device": device,
    }
    if name == MODEL:
        from statescan.cli._bench_model import bench_model

        yield from bench_model(
            args.model, args.dtype, prefill=args.prefill, decode=args.decode, **common
        )
    else:
        from statescan.cli._bench_run import bench_op

        sizes = {size: getattr(args, size) for size in DEFAULT_SIZES}
        given = common | {"ceilings": ceilings}
        yield from bench_op(name, sizes, args.dtype, only=args.direction, **given)


def _write_files(args: argparse.Namespace, document: dict[str, Any]) -> None:
    if not (args.plot or args.html):
        return
    from statescan.cli._bench_report import write_html, write_plot

    if not document["timings"]:
        render.talk("nothing was timed, so no plot and no page was written")
        return
    for path, write in ((args.plot, write_plot), (args.html, write_html)):
        if path:
            write(document, Path(path))
            render.talk(f"wrote {path}")


def _remarks(findings: Findings) -> None:
    """What was not timed, and why; once for each reason."""
    lines = [
        f"{row['backend']} does not run {row['op'] or 'here'}: {row['reason']}"
        for row in findings.refused
    ]
    lines += [f"{row['peer']}: {row['reason']}" for row in findings.peers if not row["timed"]]
    for line in dict.fromkeys(lines):
        render.talk(f"not timed: {line}")
    for gate in findings.gates:
        if not gate["passed"]:
            render.error(f"{gate['op']} on {gate['backend']} was not timed: {gate['error']}")


def _add_rows(table: render.GrowingTable, timings: list[dict[str, Any]]) -> None:
    for number, row in enumerate(timings):
        if row["op"] == MODEL:
            way = "prefill" if row["mode"] == "prefill" else "decode"
            value = _shown(row["tokens_per_s"], row)
            last = render.figure(row["ms"] / row["tokens"])
            first = row["name"]
        else:
            first, way = row["op"], row["direction"].replace("_", "+")
            value, last = _shown(row["ms"], row), f"{render.figure(row['times_naive'])}x"
        # The group's name stands once, so that groups can be told apart at a glance.
        heads = (first, way) if number == 0 else ("", "")
        floor = (f"{row['ms'] / row['floor_ms']:.2f}x",) if "floor_ms" in row else ()
        table.add(*heads, row["version"], value, last, *floor)


def _shown(value: float, row: dict[str, Any]) -> str:
    text = f"{value:.4f}" if value < 0.1 else render.figure(value)
    return f"{text} ±{row['spread']:.0%}" if row["samples"] > 1 else text
