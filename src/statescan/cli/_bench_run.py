# SPDX-License-Identifier: Apache-2.0
"""Times an op in every version: the naive algorithm, each usable backend, each importable peer.

All versions of a row run in turns, after their gates. Nothing is printed here (``bench``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from statescan.cli import render
from statescan.cli._bench_peers import peers_of
from statescan.cli._gate import check_peer, check_workload
from statescan.cli._roofline import Ceilings, floor_ms
from statescan.cli._timing import Timing, time_in_turns
from statescan.cli._workloads import Call, make_workload, run
from statescan.dispatch import all_backends, backend_named
from statescan.errors import BackendUnavailableError

SIZES_OF = {
    "selective_scan": ("batch", "dim", "seqlen", "dstate"),
    "selective_state_update": ("batch", "dim", "dstate"),
    "causal_conv1d": ("batch", "dim", "seqlen", "width"),
    "causal_conv1d_update": ("batch", "dim", "width"),
    "mamba_inner": ("batch", "dim", "seqlen", "dstate", "width"),
}
"""The sizes that each op has."""

_OTHERS = {"cpu": "cuda", "cuda": "cpu"}
"""By kind of device, the backend whose kernels are for the other kind."""

_TINY = {"batch": 1, "dim": 2, "seqlen": 2, "dstate": 2, "width": 2}


@dataclass
class Findings:
    """Everything that a run of the command found, as rows for JSON.

    Attributes:
        gates: Verdicts: op or model, backend, passed, error.
        peers: Peers asked for: name, op, version, timed, reason.
        refused: Backends that do not run something: backend, op, reason.
        timings: One row a version: op, direction or mode, version, kind, ms, spread, samples.
        rows: The fields of ``benchmarks/results``: each backend beside each other version.
    """

    gates: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(gate["passed"] for gate in self.gates)


def chosen_backends(
    names: Sequence[str] | None, findings: Findings, device_type: str = "cpu"
) -> list[str]:
    """The backends to time: those named, or all that are usable, in the order of asking."""
    if names:
        for name in names:
            if name != "auto":
                backend_named(name, "--backend")
        return list(dict.fromkeys(names))
    usable = []
    for backend in all_backends():
        if not backend.automatic or backend.name == _OTHERS[device_type]:
            continue
        available = backend.availability()
        if available.ok:
            usable.append(backend.name)
        elif not available.limit:
            # What a machine is not made for (no GPU) is for `statescan backends` to list.
            findings.refused.append(
                {"backend": backend.name, "op": None, "reason": available.reason}
            )
    return usable


def bench_op(
    op: str,
    sizes: Mapping[str, int],
    dtype_name: str,
    *,
    backends: Sequence[str],
    only: str | None,
    with_peers: bool,
    forced: bool,
    seconds: float,
    findings: Findings,
    device: torch.device,
    ceilings: Ceilings | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Fill ``findings``, and yield the timings of each direction as soon as they are there.

    Args:
        op, sizes, dtype_name: What to call.
        backends: Names to time.
        only: One direction, or None for all.
        with_peers: Whether to look for other packages.
        forced: Whether the backends were named: then a refusal is an error, not a remark.
        seconds: For each row of versions.
        findings: Receives gates, peers, refusals, timings and rows.
        device: Where to run.
        ceilings: What the device can do at most, for floors; None where nobody measured it.
    """
    dtype = getattr(torch, dtype_name)
    workload = make_workload(op, sizes, dtype, device)
    calls: dict[str, Call] = {"naive": workload.version("naive")}
    kinds = {"naive": "peer"}
    for name in _willing(op, dtype, backends, forced, findings, device):
        render.status(f"checking {op} on {name}")
        gate = check_workload(op, sizes, dtype_name, name, device)
        findings.gates.append(gate)
        if gate["passed"]:
            calls[gate["backend"]] = workload.version(gate["backend"])
            kinds[gate["backend"]] = "backend"
    if "backend" in kinds.values() and with_peers:
        for name, call in _peers(op, sizes, dtype_name, findings, device):
            calls[name], kinds[name] = call, "peer"
    render.status()
    if "backend" not in kinds.values():
        return
    for direction in workload.directions:
        if only not in (None, direction):
            continue
        render.status(f"timing {op} {direction}")
        works = {n: partial(run, call, workload.inputs, direction) for n, call in calls.items()}
        found = time_in_turns(works, seconds, device=device)
        render.status()
        base = {"op": op, "direction": direction, **{n: sizes[n] for n in SIZES_OF[op]}}
        base |= {"layout": "channel-first", "dtype": dtype_name}
        if ceilings is not None:
            base["floor_ms"] = floor_ms(workload, sizes, direction, ceilings)
        timings = [_timing(base, name, kinds[name], timing) for name, timing in found.items()]
        for timing in timings:
            timing["times_naive"] = found["naive"].median * 1e3 / timing["ms"]
        findings.timings += timings
        findings.rows += pair_rows(base, timings)
        yield timings


def _timing(base: Mapping[str, Any], name: str, kind: str, timing: Timing) -> dict[str, Any]:
    return {
        **base,
        "version": name,
        "kind": kind,
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "samples": timing.samples,
    }


def pair_rows(base: Mapping[str, Any], timings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each backend beside each other version."""
    return [
        {
            **base,
            "backend": ours["version"],
            "statescan_ms": ours["ms"],
            "spread": ours["spread"],
            "samples": ours["samples"],
            "peer": peer["version"],
            "peer_ms": peer["ms"],
            "peer_spread": peer["spread"],
            "peer_samples": peer["samples"],
        }
        for ours in timings
        if ours["kind"] == "backend"
        for peer in timings
        if peer is not ours
    ]


def _willing(
    op: str,
    dtype: torch.dtype,
    backends: Sequence[str],
    forced: bool,
    findings: Findings,
    device: torch.device,
) -> list[str]:
    """The backends that run this op in this dtype; the others are noted with their reason."""
    tiny = make_workload(op, _TINY, dtype, device)
    willing = []
    for name in backends:
        try:
            run(tiny.version(name), {n: t.clone() for n, t in tiny.inputs.items()}, "fwd")
        except BackendUnavailableError as error:
            if forced:
                raise
            reason = " ".join(str(error).splitlines()[1:2]) or str(error)
            findings.refused.append({"backend": name, "op": op, "reason": reason})
            continue
        except Exception:  # noqa: BLE001, a crash is the gate's to judge and to show
            render.status(f"{name} fails at {op}")
        willing.append(name)
    return willing


def _peers(
    op: str, sizes: Mapping[str, int], dtype_name: str, findings: Findings, device: torch.device
) -> Iterator[tuple[str, Call]]:
    """The peers that can be imported and compute the same; the others with their reason."""
    for peer in peers_of(op, device.type):
        render.status(f"checking {peer.name}")
        call, reason = peer.load()
        reason = f"not importable: {reason}" if call is None else ""
        if call is not None:
            reason = check_peer(op, sizes, dtype_name, call, device)
        row = {"peer": peer.name, "op": op, "package": peer.package, "version": peer.version()}
        findings.peers.append(row | {"timed": not reason, "reason": reason})
        if call is not None and not reason:
            yield peer.name, call
