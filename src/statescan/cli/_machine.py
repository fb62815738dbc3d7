# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on: processor, system, versions, threads.

Only facts that a reader needs beside a number; judging an installation is the doctor's.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import statescan
from statescan.backends import native


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Facts by name, ready for JSON; of a GPU too where that is what is measured."""
    library = native.status().library
    on_gpu = device is not None and device.type == "cuda"
    return {
        "statescan": statescan.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpus": _usable_cpus(),
        "threads": torch.get_num_threads(),
        "native_isa": library.isa if library else None,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
    }


def summary(machine: dict[str, Any]) -> str:
    """The facts in one sentence."""
    gpu = f"{machine['gpu']}, CUDA {machine['cuda']}, " if machine["gpu"] else ""
    return (
        f"{gpu}statescan {machine['statescan']}, torch {machine['torch']}, "
        f"Python {machine['python']}, {machine['system']}, {machine['processor']}, "
        f"{machine['threads']} of {machine['cpus']} CPUs used"
    )


def _usable_cpus() -> int:
    """CPUs that this process may use, which containers and taskset limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    """Model name; platform.processor() is empty or "x86_64" on most Linux systems."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"
