# SPDX-License-Identifier: Apache-2.0
"""Growth of a GPU's memory over the inputs, each version in a process of its own.

``grow`` is the parent's half; the child runs ``main``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from gpu_bench.calls import make_cotangent, make_inputs, our_call, peer_of
from gpu_bench.rows import ROWS

TIMEOUT_SECONDS = 300
MIB = 2**20
_BOOT = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); "
    "from gpu_bench import memory; memory.main(*sys.argv[2:])"
)


def grow(row_name: str, version: str, device: str) -> tuple[float | None, str]:
    """MiB by which forward and backward grow beyond what is there before; or None and why.

    Args:
        row_name: The row to run.
        version: Name of a backend, or "peer".
        device: A CUDA device.
    """
    # The parent's path as it is, so that the child finds the same packages.
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    command = [sys.executable, "-c", _BOOT, path, row_name, version, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"it took more than {TIMEOUT_SECONDS} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return None, f"the child process ended with code {done.returncode}: {lines[-1]}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def main(row_name: str, version: str, device_name: str) -> None:
    """The child: one number on its last line."""
    row = next(row for row in ROWS if row.name == row_name)
    device = torch.device(device_name)
    if version == "peer":
        call, reason = peer_of(row.op).load()
        if call is None:
            raise SystemExit(reason)
    else:
        call = our_call(row.op, version)
    made = make_inputs(row, device)
    inputs = {name: tensor.requires_grad_() for name, tensor in made.items()}
    cotangent = make_cotangent(row, inputs["x"].detach())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = call(**inputs)
    # Bound to a name: gradients are held as a training step holds them.
    gradients = torch.autograd.grad(out, tuple(inputs.values()), cotangent)
    torch.cuda.synchronize(device)
    grown = torch.cuda.max_memory_allocated(device) - before
    del gradients
    print(json.dumps(grown / MIB))
