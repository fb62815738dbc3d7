# SPDX-License-Identifier: Apache-2.0
"""Verdicts on ops and backends as rows: the worst error against the float64 reference.

Cases, tolerances and the comparison itself are ``testing``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from statescan.testing.cases import get_case
from statescan.testing.runner import Verdict, run_op

QUICK_CASES: dict[str, tuple[str, ...]] = {
    "selective_scan": (
        *("usual", "all_options", "several_chunks", "two_groups", "seq_idx"),
        *("cu_seqlens_reverse", "complex_all"),
    ),
    "selective_state_update": ("usual", "rollback_slots", "headed_groups", "complex"),
    "causal_conv1d": ("all_options", "width_9", "channel_last", "seq_idx", "cu_seqlens_reverse"),
    "causal_conv1d_update": ("bias_silu", "ring_several", "rollback_slots"),
    "mamba_inner": ("usual", "norms", "seq_idx", "cu_seqlens", "constant_B_C"),
}
"""For a check within seconds: each kind of option at least once."""


def check_op(
    op: str,
    backend: str,
    dtype_name: str,
    names: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Run cases of an op, all or those named; a crash is a failed verdict, not the end."""
    cases = None if names is None else [get_case(op, name) for name in names]
    row: dict[str, Any] = {"op": op, "backend": backend, "dtype": dtype_name}
    try:
        verdict = run_op(op, getattr(torch, dtype_name), device, backend, cases=cases)
    except Exception as error:  # noqa: BLE001, whatever a broken kernel raises belongs in the table
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return row | _numbers(None) | {"passed": False, "error": reason}
    return row | _numbers(verdict) | {"passed": verdict.passed, "error": _error(verdict)}


def _numbers(verdict: Verdict | None) -> dict[str, Any]:
    worst = verdict.worst if verdict else None
    return {
        "cases": verdict.num_cases if verdict else 0,
        "refused": [name for name, _ in verdict.refused] if verdict else [],
        "worst_error": worst.error if worst else None,
        "tolerance": worst.tolerance if worst else None,
        "worst_case": verdict.worst_case if verdict else None,
        "worst_result": worst.name if worst else None,
    }


def _error(verdict: Verdict) -> str | None:
    if verdict.passed:
        return None
    if verdict.worst is None:
        return f"every case was refused: {verdict.refused[0][1]}" if verdict.refused else "no case"
    return f"case {verdict.worst_case}, {verdict.worst.name}: {verdict.worst.detail}"
