# SPDX-License-Identifier: Apache-2.0
"""Writes ``tests/doctor/machines/*.json``: the facts of broken and healthy machines, each whole.

Run this module after a change: ``PYTHONPATH=src:tests python -m helpers.make_machines``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers import machines_build, machines_gpu, machines_use
from helpers.machine_parts import MACHINES

from statescan.doctor.facts.names import NAMES
from statescan.doctor.model import Fact, Facts

REGISTERED = (machines_build, machines_gpu, machines_use)
"""Importing them fills ``MACHINES``."""

FOLDER = Path(__file__).resolve().parents[1] / "doctor" / "machines"

SOURCES = {
    "system": "platform module, /proc and /etc/os-release",
    "python": "sys and sysconfig",
    "packages": "metadata in site-packages",
    "torch": "torch/version.py and its libraries",
    "driver": "libcuda and NVML",
    "toolkit": "PATH, CUDA_HOME and the usual folders",
    "compiler": "PATH",
    "libraries": "folders of the loader",
    "extensions": "files, and a child process",
    "environment": "environment variables",
    "caches": "cache folders",
    "statescan": "metadata, and a child process",
}


def facts(values: Mapping[str, Any]) -> Facts:
    """The facts of these values, with the usual sources."""
    assert set(values) <= set(NAMES), set(values) - set(NAMES)
    return Facts(
        {
            name: Fact(name, copy.deepcopy(value), SOURCES[name.partition(".")[0]])
            for name, value in values.items()
        }
    )


def text(name: str) -> str:
    """The content of a machine's file."""
    return json.dumps(facts(MACHINES[name]()).to_json(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every file, and remove those of machines that are no more."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.stem not in MACHINES:
            path.unlink()
    for name in MACHINES:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
