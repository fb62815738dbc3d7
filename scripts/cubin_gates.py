# SPDX-License-Identifier: Apache-2.0
"""What a cubin must keep to: local memory, parameter size, ABI, and a size that grows on purpose.

How cubins are made is said in `build_cubins.py`, how they are read in `cubin_elf.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cubin_elf import Cubin

from statescan.backends.cuda import source, tables
from statescan.backends.cuda.cubins import MANIFEST
from statescan.backends.cuda.tables.base import Kernel

RECORD = Path(__file__).with_name("cubin_record.json")
"""By architecture and kernel: hash of its sources, bytes of its code, and bytes of local memory a
thread of the instances that have any, as last accepted; `--record` writes it."""

GROWTH = 1.10
"""A kernel may grow by this factor before somebody has to say so with `--record`."""

ABI_12, ABI_13 = (0x33, 7), (0x41, 8)
SINCE_ABI_13 = ("sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
"""Architectures that drivers before CUDA 13's form of cubin do not know anyway."""


def judge(kernel: Kernel, architecture: str, cubin: Cubin) -> list[str]:
    """What one cubin does against the rules."""
    found = cubin.kernels()
    where = f"{architecture} {kernel.stem}"
    wanted = ABI_13 if architecture in SINCE_ABI_13 else ABI_12
    problems = []
    if cubin.abi != wanted:
        problems.append(f"{where}: ELF OSABI and ABI version are {cubin.abi}, need {wanted}")
    expected = {kernel.symbol(instance) for instance in kernel.instances}
    if set(found) != expected:
        problems.append(f"{where}: kernels {sorted(set(found) ^ expected)} are not in both")
    for instance in kernel.instances:
        resources = found.get(kernel.symbol(instance))
        if resources is None:
            continue
        if resources.parameter_bytes != kernel.packer.size:
            problems.append(
                f"{where} {instance.suffix}: parameters take {resources.parameter_bytes} bytes, "
                f"Python packs {kernel.packer.size}"
            )
    return problems


def stems_of_other_sources(architectures: Sequence[str], stems: Sequence[str]) -> list[str]:
    """What the record says of sources that are no longer these; empty when it is up to date."""
    recorded = _recorded()
    return [
        f"{architecture} {stem}: {RECORD.name} is not of these sources"
        for architecture in architectures
        for stem in stems
        if recorded.get(architecture, {}).get(stem, {}).get("source") != _hash(stem)
    ]


def check(out: Path, architectures: Sequence[str], stems: Sequence[str], record: bool) -> list[str]:
    """Compare what lies in ``out`` with the record, or record it."""
    recorded = _recorded()
    problems = []
    for architecture in architectures:
        known = recorded.setdefault(architecture, {})
        manifest = json.loads((out / architecture / MANIFEST).read_text(encoding="utf-8"))
        for stem in stems:
            found = _entry(stem, manifest["kernels"][stem])
            if record:
                known[stem] = found
            else:
                problems += _against(f"{architecture} {stem}", found, known.get(stem))
    if record:
        ordered = {name: dict(sorted(rows.items())) for name, rows in sorted(recorded.items())}
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    elif problems:
        problems.append("what is meant to be so is recorded by scripts/build_cubins --record")
    return problems


def _against(where: str, found: dict[str, Any], known: dict[str, Any] | None) -> list[str]:
    if known is None:
        return [f"{where}: {found['bytes']} bytes, and not in {RECORD.name}"]
    problems = []
    if found["bytes"] > known["bytes"] * GROWTH:
        problems.append(f"{where}: {found['bytes']} bytes, recorded {known['bytes']}")
    for suffix, size in found["local"].items():
        allowed = known["local"].get(suffix, 0)
        if size > allowed:
            problems.append(
                f"{where} {suffix}: {size} bytes of local memory a thread, recorded {allowed}"
            )
    return problems


def _entry(stem: str, made: dict[str, Any]) -> dict[str, Any]:
    """What the record keeps of one kernel of a manifest."""
    local = {
        suffix: row["local_bytes"]
        for suffix, row in sorted(made["instances"].items())
        if row.get("local_bytes")
    }
    return {"source": _hash(stem), "bytes": made["bytes"], "local": local}


def _hash(stem: str) -> str:
    return source.unit_hash(tables.kernel(stem))[:16]


def _recorded() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, Any] = (
        json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    )
    return found
