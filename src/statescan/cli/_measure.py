# SPDX-License-Identifier: Apache-2.0
"""Speed and peak memory of one call, each in a child process so that peaks cannot mix.

The parent's half is ``measure``; ``main`` is what the child runs. Tables are ``quickstart``'s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

TIMEOUT_SECONDS = 180
_WARM_UP_SEQLEN = 16

# The parent's sys.path is handed over as it is: -m would put the current folder first, and with
# it any torch.py that happens to lie there.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from statescan.cli import _measure; _measure.main()"
)


@dataclass(frozen=True)
class Spec:
    """What the child measures.

    Attributes:
        op, sizes, dtype, direction: See ``_workloads``.
        version: "naive" or the name of a backend.
        threads: CPU threads, 0 for torch's choice.
        seconds: Time to spend on repetitions.
    """

    op: str
    sizes: dict[str, int]
    dtype: str
    direction: str
    version: str
    threads: int = 0
    seconds: float = 1.5


def measure(spec: Spec) -> dict[str, Any]:
    """Run a child: seconds, spread, samples, peak_bytes, and error (None, or why there is none)."""
    command = [sys.executable, "-c", _BOOT, json.dumps(asdict(spec)), *sys.path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return _failed(f"it took more than {TIMEOUT_SECONDS} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        # A negative code is a signal; out of memory usually ends as one, without any message.
        return _failed(f"the child process ended with code {done.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _failed(reason: str) -> dict[str, Any]:
    return {"seconds": None, "spread": None, "samples": 0, "peak_bytes": None, "error": reason}


def main() -> None:
    """The child: one Spec as JSON in, one result as JSON out."""
    spec = Spec(**json.loads(sys.argv[1]))
    try:
        result = run_here(spec)
    except Exception as error:  # noqa: BLE001, the parent shows it in its table
        result = _failed(f"{type(error).__name__}: {error}".splitlines()[0])
    print(json.dumps(result))


def run_here(spec: Spec) -> dict[str, Any]:
    """Measure in this process, which should have done nothing else."""
    import torch

    from statescan.cli._memory import PeakGrowth
    from statescan.cli._timing import summarise
    from statescan.cli._workloads import make_workload, run

    if spec.threads:
        torch.set_num_threads(spec.threads)
    dtype = getattr(torch, spec.dtype)
    small = make_workload(spec.op, {**spec.sizes, "seqlen": _WARM_UP_SEQLEN}, dtype)
    run(small.version(spec.version), small.inputs, spec.direction)
    workload = make_workload(spec.op, spec.sizes, dtype)
    call = workload.version(spec.version)
    growth = PeakGrowth()
    samples: list[float] = []
    begin = time.perf_counter()
    while not samples or time.perf_counter() - begin < spec.seconds:
        start = time.perf_counter()
        run(call, workload.inputs, spec.direction)
        samples.append(time.perf_counter() - start)
    timing = summarise(samples[1:] or samples)
    return {
        "seconds": timing.median,
        "spread": timing.spread,
        "samples": timing.samples,
        "peak_bytes": growth.read(),
        "error": None,
    }
