# SPDX-License-Identifier: Apache-2.0
"""The least time of a call on a GPU: its bytes at copy speed, its exponentials at theirs.

The speed of a copy is measured on the spot; the exponential unit's follows from the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from statescan.cli._timing import time_in_turns
from statescan.cli._workloads import UPDATES, Workload

_COPIED = 2**28
"""Bytes: several times the largest cache, so that memory is what limits the copy."""
_PER_CLOCK = 16
"""Results of the exponential unit of one multiprocessor, compute capability 7.0 to 12.1."""


@dataclass(frozen=True)
class Ceilings:
    """What one GPU can do at most.

    Attributes:
        copy: Bytes a second, read and written, of a copy on the device.
        exponentials: Results a second; 0 where torch does not tell the clock.
    """

    copy: float
    exponentials: float


def measure_ceilings(device: torch.device) -> Ceilings:
    """Of this GPU, now; takes a tenth of a second and half a GiB."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_in_turns({"copy": lambda: target.copy_(source)}, 0.1, device=device)["copy"]
    properties: Any = torch.cuda.get_device_properties(device)
    clock = 1e3 * getattr(properties, "clock_rate", 0)
    rate = _PER_CLOCK * clock * properties.multi_processor_count
    return Ceilings(2 * _COPIED / timing.median, rate)


def floor_ms(
    workload: Workload, sizes: Mapping[str, int], direction: str, ceilings: Ceilings
) -> float:
    """The larger of two times; matrix products of mamba_inner are not counted.

    Each tensor given is read once and the output written once; a state is also written. A backward
    reads what is given and the gradient of the output, and writes a gradient for each tensor given.
    """
    given = sum(t.numel() * t.element_size() for t in workload.inputs.values())
    out = _output_bytes(workload)
    states = sum(
        t.numel() * t.element_size() for n, t in workload.inputs.items() if n.endswith("_state")
    )
    moved = given + out + states
    if direction == "fwd_bwd":
        moved += 2 * given + out
    bytes_ms = 1e3 * moved / ceilings.copy
    exponentials = _exponentials(workload.op, sizes, direction)
    return max(bytes_ms, 1e3 * exponentials / ceilings.exponentials if ceilings.exponentials else 0)


def _output_bytes(workload: Workload) -> int:
    if workload.op == "mamba_inner":
        like = workload.inputs["xz"]
        rows = workload.inputs["out_proj_weight"].shape[0]
        return like.shape[0] * like.shape[2] * rows * like.element_size()
    like = workload.inputs["x"]
    return like.numel() * like.element_size()


def _exponentials(op: str, sizes: Mapping[str, int], direction: str) -> int:
    """One a state and token, and about four for softplus and silu; a backward makes states anew."""
    if op.startswith("causal_conv1d"):
        return 0
    tokens = sizes["batch"] * sizes["dim"] * (1 if op in UPDATES else sizes["seqlen"])
    forward = tokens * (sizes["dstate"] + 4)
    return forward if direction == "fwd" else forward + tokens * (2 * sizes["dstate"] + 8)
