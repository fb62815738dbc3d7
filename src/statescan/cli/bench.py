# SPDX-License-Identifier: Apache-2.0
"""``statescan bench``: ops against the naive algorithm in one run, after a correctness gate.

Inputs are ``_workloads``', timing is ``_timing``'s, the gate is ``_gate``'s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from statescan.backends.base import ALL_OPS
from statescan.cli import options, render

DEFAULT_SIZES = {"batch": 1, "dim": 1536, "seqlen": 512, "dstate": 16, "width": 4}
_HEADERS = ("op", "way", "backend", "statescan ms", "naive ms", "ratio")
_WIDTHS = (22, 7, 9, 13, 13, 6)
_SIZES_OF = {
    "selective_scan": ("batch", "dim", "seqlen", "dstate"),
    "selective_state_update": ("batch", "dim", "dstate"),
    "causal_conv1d": ("batch", "dim", "seqlen", "width"),
    "causal_conv1d_update": ("batch", "dim", "width"),
    "mamba_inner": ("batch", "dim", "seqlen", "dstate", "width"),
}


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "bench", execute, "Time ops against the naive algorithm on the CPU."),
        "Medians, both versions in turns in one process; the spread is half the distance between\n"
        "the quartiles, and the ratio is naive over statescan. Before any time is taken, all\n"
        "cases of the op, and both versions at the chosen sizes, are compared with the float64\n"
        "reference: a wrong result has no speed, and the exit code is 1.\n\n"
        "At the default sizes the naive backward takes a minute or more for each of two ops;\n"
        "--direction fwd leaves it out.\n\n"
        "A time without a spread is a single call.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"{', '.join(ALL_OPS)} (default: all)")
    for name, size in DEFAULT_SIZES.items():
        parser.add_argument(
            f"--{name}",
            type=options.positive_int,
            default=size,
            metavar="N",
            help=f"(default: {size})",
        )
    parser.add_argument(
        *("--dtype",),
        type=options.dtype_name,
        default="float32",
        metavar="NAME",
        help="of the activations: float32, bfloat16, float16, float64 (default: float32)",
    )
    parser.add_argument(
        *("--direction",),
        choices=("fwd", "fwd_bwd"),
        help="only forward, or only forward + backward (default: both)",
    )
    parser.add_argument(
        "--backend", default="auto", metavar="NAME", help="backend to time (default: auto)"
    )
    parser.add_argument(
        *("--seconds",),
        type=float,
        default=2.0,
        metavar="S",
        help="time for each row; 3 samples at least, unless one takes long (default: 2)",
    )
    options.add_threads(parser)
    options.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    names = _chosen_ops(args.ops)
    options.set_threads(args.threads)
    from statescan.cli._machine import describe_machine, summary

    machine = describe_machine()
    table = None
    if not args.json:
        render.wrap(summary(machine))
        render.say(", ".join([args.dtype, *[f"{n} {getattr(args, n)}" for n in DEFAULT_SIZES]]))
        render.say()
        table = render.GrowingTable(_HEADERS, _WIDTHS, right=(3, 4, 5))
    gates: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for op in names:
        for item in _bench_op(op, args):
            (rows if "direction" in item else gates).append(item)
            if table is not None and "direction" in item:
                table.add(*_cells(item))
        if table is not None and not gates[-1]["passed"]:
            table.add(op, "-", gates[-1]["backend"], "FAILED", "-", "-")
    passed = all(gate["passed"] for gate in gates)
    if args.json:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        render.document(
            "bench",
            {"passed": passed, "date": date, "machine": machine, "gates": gates, "rows": rows},
        )
    for gate in gates:
        if not gate["passed"]:
            render.error(f"{gate['op']} was not timed: {gate['error']}")
    return 0 if passed else 1


def _chosen_ops(names: list[str]) -> list[str]:
    for name in names:
        if name not in ALL_OPS:
            raise options.UsageError(
                f"bench: {name!r} is not an op.\n"
                f"It must be one of: {', '.join(ALL_OPS)}.\n"
                "Leave the ops out to time all of them."
            )
    return list(dict.fromkeys(names)) or list(ALL_OPS)


def _bench_op(op: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The gate's verdict on an op, then its rows if it passed."""
    import torch

    from statescan.cli._gate import check_workload
    from statescan.cli._timing import time_in_turns
    from statescan.cli._workloads import make_workload, run

    sizes = {name: getattr(args, name) for name in DEFAULT_SIZES}
    render.status(f"checking {op}")
    gate = check_workload(op, sizes, args.dtype, args.backend)
    render.status()
    yield gate
    if not gate["passed"]:
        return
    workload = make_workload(op, sizes, getattr(torch, args.dtype))
    for direction in workload.directions:
        if args.direction not in (None, direction):
            continue
        render.status(f"timing {op} {direction}")
        works = {
            name: partial(run, workload.version(version), workload.inputs, direction)
            for name, version in (("naive", "naive"), ("statescan", args.backend))
        }
        timings = time_in_turns(works, args.seconds)
        render.status()
        ours, peer = timings["statescan"], timings["naive"]
        yield (
            {"op": op, "direction": direction, **{n: sizes[n] for n in _SIZES_OF[op]}}
            | {"layout": "channel-first", "dtype": args.dtype, "backend": gate["backend"]}
            | {"statescan_ms": ours.median * 1e3, "spread": ours.spread, "samples": ours.samples}
            | {"peer": "naive", "peer_ms": peer.median * 1e3}
            | {"peer_spread": peer.spread, "peer_samples": peer.samples}
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["op"],
        row["direction"].replace("_", "+"),
        row["backend"],
        _shown(row["statescan_ms"], row["spread"], row["samples"]),
        _shown(row["peer_ms"], row["peer_spread"], row["peer_samples"]),
        f"{render.figure(row['peer_ms'] / row['statescan_ms'])}x",
    )


def _shown(milliseconds: float, spread: float, samples: int) -> str:
    value = f"{milliseconds:.4f}" if milliseconds < 0.1 else render.figure(milliseconds)
    return f"{value} ±{spread:.0%}" if samples > 1 else value
