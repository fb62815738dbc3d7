# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on, and the file of JSON lines that results are added to.

Which rows there are is in ``rows``; the page made from the lines is ``report.py``'s.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import statescan
from statescan.cli._bench_peers import installed_version

FOLDER = Path(__file__).resolve().parents[1] / "results"


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """gpu, driver, versions, date, commit."""
    versions: dict[str, str | None] = {"statescan": statescan.__version__}
    versions["torch"] = torch.__version__
    for package in ("mamba_ssm", "causal_conv1d", "triton"):
        versions[package] = installed_version(package)
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": driver_version() if on_gpu else None,
        "versions": versions | {"cuda": torch.version.cuda},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit or head_commit(),
    }


def driver_version() -> str | None:
    """Of NVIDIA's driver, as the kernel module or its tool tells."""
    told = Path("/proc/driver/nvidia/version")
    if told.is_file():
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", told.read_text(encoding="utf-8"))
        if found:
            return found[0]
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def head_commit() -> str | None:
    """Of this checkout, marked where the sources differ from it; None without git."""
    folder = str(FOLDER)
    commit = _output("git", "-C", folder, "rev-parse", "--short", "HEAD")
    if commit and _output("git", "-C", folder, "status", "--porcelain", "--", ":/src"):
        return f"{commit}+changes"
    return commit


def _output(*command: str) -> str | None:
    """The first line that a command prints; None if it cannot run, fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return lines[0].strip() if lines else None


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one line at once, so that a run that is stopped keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, empty where there is none."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
