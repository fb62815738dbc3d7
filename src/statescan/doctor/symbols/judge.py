# SPDX-License-Identifier: Apache-2.0
"""Judges what was read of a binary against the facts of a machine, in findings and in one sentence.

Nothing is read from this machine: reports and facts may come from another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statescan.doctor.model import Facts, Finding, Severity
from statescan.doctor.symbols import gpu_code, judge_libraries, judge_torch
from statescan.doctor.symbols.findings import file_name, finding, status
from statescan.doctor.symbols.lookup import missing_symbols

__all__ = ["judge", "missing_symbols", "verdict"]

_SYSTEMS = {"elf": "linux", "pe": "windows", "macho": "macos"}
_SYSTEM_NAMES = {"linux": "Linux", "windows": "Windows", "macos": "macOS"}
_SAME_MACHINE = {"amd64": "x86_64", "arm64": "aarch64", "i686": "i386", "x86": "i386"}


def judge(report: Mapping[str, Any], facts: Facts) -> list[Finding]:
    """What is wrong with a binary on the machine of these facts; the first finding is the cause."""
    if report.get("problem"):
        return [finding("binary-damaged", report, report["problem"], [])]
    wrong_place = _other_system(report, facts) or _other_machine(report, facts)
    wrong_place = wrong_place or _other_python(report, facts)
    # What is for another interpreter or CPU is never loaded here, so nothing else about it matters.
    if wrong_place:
        return [wrong_place]
    no_cuda = judge_torch.cuda_build(report, facts)
    found = [
        judge_libraries.glibc(report, facts),
        judge_libraries.libstdcxx(report, facts),
        no_cuda,
        None if no_cuda else judge_torch.cudart(report, facts),
        judge_libraries.libraries(report, facts),
        judge_torch.string_abi(report, facts),
        judge_torch.version(report, facts),
        judge_libraries.other_symbols(report),
        _gpu_code(report, facts),
    ]
    return [row for row in found if row is not None]


def _same(machine: str) -> str:
    return _SAME_MACHINE.get(machine.lower(), machine.lower())


def _other_system(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    made_for, here = _SYSTEMS.get(report["format"]), facts.get("system.os")
    if made_for is None or here is None or made_for == here:
        return None
    summary = (
        f"{file_name(report)} is a binary of {_SYSTEM_NAMES[made_for]}, "
        f"and this system is {_SYSTEM_NAMES.get(here, here)}."
    )
    return finding("wheel-tag-mismatch", report, summary, [f"file format: {report['format']}"])


def _other_machine(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    here = facts.get("system.machine")
    machines = [_same(name) for name in str(report["machine"]).split("+") if name]
    if here is None or not machines or _same(here) in machines:
        return None
    summary = f"{file_name(report)} is for {report['machine']}, and this machine is {here}."
    return finding(
        "wheel-wrong-cpu-arch", report, summary, [f"CPU of the file: {report['machine']}"]
    )


def _other_python(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    tag, here = report.get("python_tag"), facts.get("python.tag")
    if tag is None or here is None or tag == here:
        return None
    if tag == "abi3" and here.startswith("cp") and not here.endswith("t"):
        return None
    summary = (
        f"{file_name(report)} is for Python {tag}, and this Python is {here}, which ignores it."
    )
    return finding("wheel-tag-mismatch", report, summary, [f"tag in the file's name: {tag}"])


def _gpu_code(report: Mapping[str, Any], facts: Facts) -> Finding | None:
    archs = report["cuda_archs"]
    devices = gpu_code.of_machine(facts.get("torch.devices") or facts.get("driver.gpus", ()))
    held = [*archs.get("cubin", ()), *archs.get("ptx", ())]
    lost = [(name, number) for name, number in devices if gpu_code.runs_on(archs, number) is None]
    if not held or not lost:
        return None
    name, number = lost[0]
    capability = f"{number[0]}.{number[1]}"
    summary = (
        f"{file_name(report)} has no code for the {name} (compute capability {capability}); "
        f"it has {', '.join(held)}."
    )
    evidence = [f"{gpu}: compute capability {major}.{minor}" for gpu, (major, minor) in lost]
    # With another GPU that it runs on, the machine is of use still.
    severity = Severity.ERROR if len(lost) == len(devices) else Severity.WARNING
    values = {"sm": f"{number[0]}{number[1]}", "needed": capability, "found": ", ".join(held)}
    return finding("gpu-arch-not-in-binary", report, summary, evidence, severity, values=values)


def verdict(report: Mapping[str, Any], findings: Sequence[Finding]) -> str:
    """The answer in one sentence."""
    errors = [row for row in findings if row.severity is Severity.ERROR]
    if errors:
        return errors[0].summary
    name = file_name(report)
    if findings:
        return f"{name} loads, but: {findings[0].summary}"
    if report.get("libraries") is None and report.get("missing") is None:
        return f"{name}: nothing that the facts tell speaks against it."
    first = " after `import torch`" if status(report, "after-torch") else ""
    return f"{name} loads here{first}: every library and symbol that it needs is there."
