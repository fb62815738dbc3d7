# SPDX-License-Identifier: Apache-2.0
"""The gate before a time: outputs and every gradient against float64, beside the original's.

A row is judged twice: with few rows and channels against the sequential reference, and at its
own sizes against the torch backend in float64, which is judged by the test suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_bench.calls import OPTIONS, Call, Inputs, make_inputs, our_call, results_of
from gpu_bench.rows import TORCH_NAMES, UPDATES, Row
from statescan import reference
from statescan.testing import tolerance

LARGEST = {"batch": 2, "dim": 64, "nheads": 4, "seqlen": 333}
"""Sizes of a reduced row: the reference walks the tokens one by one."""

PEER_LIMIT = 0.05
"""An original may round as it likes; beyond this it computes something else."""


@dataclass(frozen=True)
class Judged:
    """One result.

    Attributes:
        name: out, d<argument> or the state.
        error, peer_error: Of statescan and of the original, None without one.
        allowed: For statescan.
    """

    name: str
    error: float
    peer_error: float | None
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        peer = "" if self.peer_error is None else f", the original's {self.peer_error:.2e}"
        return f"{self.name}: error {self.error:.2e}, allowed {self.allowed:.2e}{peer}"


def reduced(row: Row) -> Row:
    """The row with few rows, channels and tokens."""
    sizes = {name: min(size, LARGEST.get(name, size)) for name, size in row.sizes.items()}
    return replace(row, sizes=sizes)


def judge(
    row: Row, backend: str, peer: Call | None, device: str, *, at_full_size: bool
) -> list[Judged]:
    """Every result of a row, or of its reduced form."""
    row = row if at_full_size else reduced(row)
    inputs = make_inputs(row, device)
    exact = _exact(row, inputs, at_full_size)
    ours = results_of(row, our_call(row.op, backend), inputs)
    theirs = None if peer is None else results_of(row, peer, inputs)
    judged = []
    for name, truth in exact.items():
        peer_error = None if theirs is None else relative_error(theirs[name], truth)
        allowed = _allowed(row, name, ours[name], truth, peer_error)
        judged.append(Judged(name, relative_error(ours[name], truth), peer_error, allowed))
    return judged


def wrong_peer(judged: list[Judged]) -> str:
    """Why the original must not be timed, "" when it computes the same."""
    for item in judged:
        if item.peer_error is not None and not item.peer_error <= PEER_LIMIT:
            return f"wrong: {item.name} has error {item.peer_error:.1e}"
    return ""


def relative_error(result: Tensor, exact: Tensor) -> float:
    """As ``statescan.testing.error``, computed where the tensors are; infinite with NaN.

    The larger of the error of the norm and the largest error over the largest value.
    """
    difference = (result.double() - exact).abs_()
    largest, norm = exact.abs().max(), exact.norm()
    if not bool(largest > 0):
        return float(difference.max())
    found = torch.maximum(difference.max() / largest, difference.norm() / norm)
    return float(found) if bool(found.isfinite()) else math.inf


def _exact(row: Row, inputs: Inputs, at_full_size: bool) -> Inputs:
    """The results in float64, from the inputs as rounded."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    if at_full_size:
        return results_of(row, our_call(row.op, "torch"), wide)
    plain: Callable[..., Tensor] = getattr(reference, f"{row.op}_ref")
    return results_of(row, lambda **given: plain(**given, **OPTIONS[row.op]), wide)


def _allowed(row: Row, name: str, result: Tensor, exact: Tensor, peer_error: float | None) -> float:
    """No worse than the original, up to 1.05 times, or than rounding the exact result.

    A float32 result may have twice the original's error, or 1e-6. Without an original the
    table of ``statescan.testing`` decides.
    """
    if peer_error is None:
        activations = getattr(torch, TORCH_NAMES[row.dtype])
        gradient = name.startswith("d") and row.op not in UPDATES
        allowed = tolerance(row.op, activations, result.dtype, gradient=gradient)
    else:
        allowed = (2.0 if result.dtype == torch.float32 else 1.05) * peer_error
    if result.dtype == torch.float32:
        return max(allowed, 1e-6)
    return max(allowed, 1.05 * relative_error(exact.to(result.dtype), exact))
