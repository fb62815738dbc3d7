# SPDX-License-Identifier: Apache-2.0
"""Times statescan's ops on a GPU beside the originals, mamba-ssm and causal-conv1d, in one run.

    python benchmarks/gpu_peers.py                       every row
    python benchmarks/gpu_peers.py --rows scan,conv1     some: names, or how names begin
    python benchmarks/gpu_peers.py --quick               small checks and few samples

Each row is judged before it is timed (``gpu_bench/gate.py``); the exit code is 1 if a result of
statescan is wrong. Medians and spreads are those of samples taken in turns; a backward is timed
alone, its graph retained. Rows are added to ``benchmarks/results/gpu_ops.jsonl`` as they come;
``benchmarks/report.py`` makes a page of that file.

Without an original the script says how to get it and times statescan alone. With ``--device cpu``
reduced rows run on the torch backend, which shows only that the script works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_bench import gate, memory, results, rows, timing
from gpu_bench.calls import HOW_TO_GET, Call, Inputs, make_cotangent, make_inputs, our_call, peer_of
from gpu_bench.rows import CEILINGS, Row

L2_BYTES = 60 * 2**20
"""Smaller inputs are copied until a round over them leaves this cache at least four times."""
MOST_SETS = 16

OURS, PEER = "statescan", "peer"


def main(arguments: list[str] | None = None) -> int:
    """Run the rows asked for; the exit code."""
    args = _parse(arguments)
    try:
        chosen, with_memory = rows.chosen(args.rows.replace(",", " ").split())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    device = torch.device(args.device)
    problem = _unusable(args.backend, device)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    if device.type != "cuda":
        chosen, with_memory = [gate.reduced(row) for row in chosen], False
    about = results.environment(device, args.commit)
    print(f"{about['gpu'] or 'CPU'}, backend {args.backend}, {about['versions']}")
    peers = _load_peers({row.op for row in chosen} if args.peers else set())
    failed = []
    for row in chosen:
        reason = _run_row(row, args, device, peers.get(row.op), about)
        if reason:
            failed.append(f"{row.name}: {reason}")
            print(f"{row.name:9} WRONG, not timed: {reason}")
    if with_memory:
        _run_memory(args, about)
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", metavar="NAMES", help="separated by commas")
    parser.add_argument("--quick", action="store_true", help="no check at full size, few samples")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row and direction")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="(default: cuda, and torch with --device cpu)")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--commit", help="measured commit, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "gpu_ops.jsonl")
    args = parser.parse_args(arguments)
    if args.backend is None:
        args.backend = "torch" if torch.device(args.device).type == "cpu" else "cuda"
    if args.quick:
        args.seconds = min(args.seconds, 0.1)
    return args


def _unusable(backend: str, device: torch.device) -> str:
    """Why nothing can be timed, "" if it can."""
    from statescan.dispatch import all_backends

    if device.type == "cuda" and not torch.cuda.is_available():
        return (
            "torch finds no CUDA device here.\n"
            "Run this on a machine with one, or with --device cpu to see that the script works."
        )
    found = {each.name: each for each in all_backends()}
    if backend not in found:
        return f"there is no backend {backend!r}; there are {', '.join(found)}."
    available = found[backend].availability()
    return "" if available.ok else f"backend {backend} cannot run here: {available.reason}"


def _load_peers(ops: set[str]) -> dict[str, Call]:
    """The originals that can be imported; the others are named, once for each package."""
    found, missing = {}, {}
    for op in sorted(ops):
        peer = peer_of(op)
        call, reason = peer.load()
        if call is None:
            missing[peer.package] = reason
        else:
            found[op] = call
    for package, reason in missing.items():
        print(
            f"without {package} ({reason}): statescan is timed alone.\n"
            f"  To have it: {HOW_TO_GET[package]}"
        )
    return found


def _run_row(
    row: Row,
    args: argparse.Namespace,
    device: torch.device,
    peer: Call | None,
    about: dict[str, Any],
) -> str:
    """Judge, time and write one row; what is wrong with statescan's results, or ""."""
    errors: dict[str, float] = {}
    for at_full_size in (False,) if args.quick or device.type != "cuda" else (False, True):
        judged = gate.judge(row, args.backend, peer, str(device), at_full_size=at_full_size)
        wrong = [str(item) for item in judged if not item.passed]
        if wrong:
            return "; ".join(wrong)
        problem = gate.wrong_peer(judged)
        if problem:
            print(f"{row.name:9} the original is not timed: {problem}")
            peer = None
        errors = {item.name: item.error for item in judged}
    calls = {OURS: our_call(row.op, args.backend)} | ({} if peer is None else {PEER: peer})
    sets = _input_sets(row, device)
    for direction in row.directions:
        versions = {n: [_work(row, call, made, direction) for made in sets]
                    for n, call in calls.items()}  # fmt: skip
        line = rows.describe(row) | {"direction": direction, "backend": args.backend}
        line |= {"row": row.name, **_timed(row, versions, device, args.seconds)}
        line |= {"errors": errors, **about}
        results.append(args.out, line)
        _show(row, line)
    return ""


def _input_sets(row: Row, device: torch.device) -> list[Inputs]:
    """Inputs that together are too large for the cache of the device, as a model's layers are."""
    first = make_inputs(row, device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    wanted = -(-4 * L2_BYTES // size) if device.type == "cuda" else 1
    others = range(1, min(MOST_SETS, wanted))
    return [first, *(make_inputs(row, device, seed) for seed in others)]


def _work(row: Row, call: Call, inputs: Inputs, direction: str) -> Callable[[], object]:
    if direction == "fwd":

        def forward() -> object:
            with torch.no_grad():
                return call(**inputs)

        return forward
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = call(**leaves)
    wanted, cotangent = tuple(leaves.values()), make_cotangent(row, out)

    def backward() -> object:
        return torch.autograd.grad(out, wanted, cotangent, retain_graph=True)

    return backward


def _timed(
    row: Row, versions: timing.Versions, device: torch.device, seconds: float
) -> dict[str, Any]:
    """The fields of a result that were measured."""
    found = timing.time_in_turns(versions, device, seconds)
    ours, peer = found[OURS], found.get(PEER)
    # Of updates the device alone: their time as a user sees it is the host's.
    kind = "device_ms" if row.op in rows.UPDATES else "ms"
    mine = "device_ms" if row.op in rows.UPDATES else "statescan_ms"
    line: dict[str, Any] = {mine: ours.median, "spread": ours.spread, "samples": ours.samples}
    line |= {f"peer_{kind}": peer and peer.median, "peer_spread": peer and peer.spread}
    if row.op in rows.UPDATES:
        host = timing.host_us(versions, device)
        line |= {"host_us": host[OURS], "peer_host_us": host.get(PEER)}
    return line


def _run_memory(args: argparse.Namespace, about: dict[str, Any]) -> None:
    """Peak growth of forward and backward of the first row."""
    row = rows.ROWS[0]
    ours, reason = memory.grow(row.name, args.backend, args.device)
    if ours is None:
        print(f"memory    not measured: {reason}")
        return
    theirs, reason = memory.grow(row.name, PEER, args.device) if args.peers else (None, "left out")
    line = rows.describe(row) | {"direction": "fwd_bwd", "backend": args.backend, "row": "memory"}
    results.append(args.out, line | {"peak_mib": ours, "peer_peak_mib": theirs} | about)
    peer = f"{theirs:.0f} MiB" if theirs is not None else f"not measured: {reason}"
    print(f"memory    fwd + bwd of {row.name}: {ours:.0f} MiB over the inputs, original {peer}")


def _show(row: Row, line: dict[str, Any]) -> None:
    """One line of the table on the terminal."""
    direction = line["direction"]
    update = row.op in rows.UPDATES
    mine = line["device_ms" if update else "statescan_ms"]
    theirs = line["peer_device_ms" if update else "peer_ms"]
    text = f"{row.name:9} {direction}  {mine:8.4f} ms ±{line['spread']:.0%}"
    if theirs is not None:
        text += f"  original {theirs:8.4f} ({theirs / mine:.2f}x)"
    ceilings = CEILINGS.get(line["gpu"])
    if ceilings is not None:
        text += f"  floor {row.floor_ms(direction, ceilings):.4f}"
    target = row.targets.get("device_ms" if update else direction)
    if target is not None and ceilings is not None:
        text += f"  target {target:g} {'ok' if mine <= target else 'MISSED'}"
    if update:
        text += f"  host {line['host_us']:.1f} us"
        if line["peer_host_us"] is not None:
            text += f", original {line['peer_host_us']:.1f}"
        if ceilings is not None:
            text += f"  target {row.targets['host_us']:g}"
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
