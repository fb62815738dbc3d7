# SPDX-License-Identifier: Apache-2.0
"""The gate before a benchmark: no number is printed for a call that is wrong.

Small cases are judged by ``testing``; here the very workload is judged as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from statescan.cli._checks import check_op
from statescan.cli._workloads import UPDATES, Call, Workload, make_workload, run
from statescan.testing.compare import error
from statescan.testing.tolerances import tolerance

_STATES = {"selective_state_update": "ssm_state", "causal_conv1d_update": "conv_state"}
_LONGEST = 128
"""Tokens of the workload that are judged; the reference walks them one by one in float64."""

_NAIVE_LIMIT = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
"""The naive algorithm rounds as it likes; it must only be the same computation."""


def check_workload(
    op: str,
    sizes: Mapping[str, int],
    dtype_name: str,
    backend: str,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """One row: op, backend that runs it, passed, error."""
    dtype = getattr(torch, dtype_name)
    row = check_op(op, backend, dtype_name, device=device)
    judged = {**sizes, "seqlen": min(sizes["seqlen"], _LONGEST)}
    workload = make_workload(op, judged, dtype, device)
    row["backend"] = _runs_on(workload, backend)
    if not row["passed"]:
        return row
    for direction in workload.directions:
        problem = _compare(workload, direction, dtype, dtype_name, backend)
        if problem:
            return row | {"passed": False, "error": problem}
    return row


def check_peer(
    op: str,
    sizes: Mapping[str, int],
    dtype_name: str,
    call: Call,
    device: torch.device | str = "cpu",
) -> str:
    """Why another package's call must not be timed, "" when it computes the same."""
    judged = {**sizes, "seqlen": min(sizes["seqlen"], _LONGEST)}
    workload = make_workload(op, judged, getattr(torch, dtype_name), device)
    for direction in workload.directions:
        exact = _results(workload.in_double(), "reference", direction)
        try:
            found = _results(workload, call, direction)
        except Exception as failure:  # noqa: BLE001, foreign code: its failure is the reason shown
            lines = str(failure).strip().splitlines() or [""]
            return f"fails: {type(failure).__name__}: {lines[0]}"
        for name, truth in exact.items():
            off = error(found[name], truth)
            if not off <= _NAIVE_LIMIT[dtype_name]:
                return f"wrong: {name} has error {off:.1e}"
    return ""


def _compare(
    workload: Workload, direction: str, dtype: torch.dtype, dtype_name: str, backend: str
) -> str:
    """What is wrong at the benchmark's sizes, "" when nothing is."""
    exact = _results(workload.in_double(), "reference", direction)
    peer = _results(workload, "naive", direction)
    ours = _results(workload, backend, direction)
    for name, truth in exact.items():
        peer_error, our_error = error(peer[name], truth), error(ours[name], truth)
        if not peer_error <= _NAIVE_LIMIT[dtype_name]:
            return f"the naive algorithm is wrong at these sizes: {name} has error {peer_error:.1e}"
        # Sums grow with the sizes, and so does rounding: the table of small cases, or twice
        # what plain arithmetic in the same dtype has here.
        table = tolerance(workload.op, dtype, ours[name].dtype, gradient=name.startswith("d"))
        allowed = max(table, 2 * peer_error)
        if not our_error <= allowed:
            return f"{name} at these sizes has error {our_error:.1e}, allowed is {allowed:.1e}"
    return ""


def _results(workload: Workload, version: str | Call, direction: str) -> dict[str, Tensor]:
    """Results of one call on copies of the inputs, with the state that it updated."""
    inputs = {name: tensor.clone() for name, tensor in workload.inputs.items()}
    call = workload.version(version) if isinstance(version, str) else version
    results = run(call, inputs, direction)
    if workload.op in UPDATES:
        results[_STATES[workload.op]] = inputs[_STATES[workload.op]]
    return results


def _runs_on(workload: Workload, backend: str) -> str:
    """Name of the backend that ``backend=`` means here."""
    from statescan.ops import explain

    asked = explain(workload.op, **workload.inputs, **workload.options, backend=backend)
    return asked.chosen or backend
