# SPDX-License-Identifier: Apache-2.0
"""Judges a wheel against the facts of a machine: its tags and build fields, then its binaries.

The rules for tags are those of pip, as far as Linux, Windows and macOS of these packages go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statescan.doctor.model import Facts, Finding, Severity
from statescan.doctor.symbols import generation
from statescan.doctor.symbols.findings import finding, numbers
from statescan.doctor.symbols.judge import judge

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "i686": "x86"}
_CLAUSE = re.compile(r"^\s*(>=|<=|==|!=|~=|>|<)\s*([\d.]+)(\.\*)?\s*$")


def judge_wheel(wheel: Mapping[str, Any], facts: Facts) -> list[Finding]:
    """What is wrong with a wheel on the machine of these facts; the first finding is the cause."""
    tags = _tags(wheel, facts)
    # pip refuses it, or Python ignores what is in it: nothing else about it matters here.
    if tags:
        return [tags]
    found = [_python(wheel, facts), _renamed(wheel), *_fields(wheel, facts)]
    for report in wheel["binaries"]:
        found += judge({**report, "distribution": wheel["distribution"]}, facts)
    kept: dict[str, Finding] = {}
    for row in found:
        # Field and binary say the same thing twice; the first one stays.
        if row is not None:
            kept.setdefault(row.problem.slug, row)
    return sorted(kept.values(), key=lambda row: list(Severity).index(row.severity))


def _file(wheel: Mapping[str, Any]) -> str:
    return re.split(r"[\\/]", str(wheel["path"]))[-1]


def _tags(wheel: Mapping[str, Any], facts: Facts) -> Finding | None:
    """Why no tag of the wheel's name fits; None when one does."""
    tags = [tag.split("-") for tag in wheel["tags"]]
    here = facts.get("python.tag")
    if here is not None:
        fitting = [tag for tag in tags if _python_fits(tag[0], tag[1], here)]
        if not fitting:
            wanted = ", ".join(sorted({f"{tag[0]}-{tag[1]}" for tag in tags})[:4])
            summary = f"{_file(wheel)} is for Python {wanted}, and this Python is {here}."
            return finding("wheel-tag-mismatch", wheel, summary, [f"tags: {_shown(tags)}"])
        tags = fitting
    return _platform(wheel, [tag[2] for tag in tags], facts)


def _shown(tags: Iterable[Sequence[str]]) -> str:
    return ", ".join(["-".join(tag) for tag in tags][:4])


def _python_fits(python: str, abi: str, here: str) -> bool:
    free_threaded, plain = here.endswith("t"), here.removesuffix("t")
    if python in ("py3", f"py{plain[2:]}", "py3" + plain[3:]) and abi == "none":
        return True
    if abi == "abi3":
        return not free_threaded and numbers(python[3:]) <= numbers(plain[3:])
    return python == plain and abi in (here, "none")


def _platform(wheel: Mapping[str, Any], platforms: Sequence[str], facts: Facts) -> Finding | None:
    system, machine = facts.get("system.os"), facts.get("system.machine")
    if "any" in platforms or system is None or machine is None:
        return None
    here = _MACHINES.get(machine, machine)
    same_system = [name for name in platforms if _system(name) == system]
    evidence = [f"platforms in the name: {', '.join(platforms[:4])}"]
    if not same_system:
        summary = f"{_file(wheel)} is for {platforms[0]}, and this system is {system} on {machine}."
        return finding("wheel-tag-mismatch", wheel, summary, evidence)
    same_machine = [name for name in same_system if here in _machines(name)]
    if not same_machine:
        summary = f"{_file(wheel)} is for {same_system[0]}, and this machine is {machine}."
        return finding("wheel-wrong-cpu-arch", wheel, summary, evidence)
    libc = facts.get("system.libc")
    if not isinstance(libc, Mapping) or any(_libc_fits(name, libc) for name in same_machine):
        return None
    have = f"{libc.get('kind')} {libc.get('version')}"
    summary = f"{_file(wheel)} is for {same_machine[0]}, and this system has {have}."
    slug = "glibc-too-old" if "manylinux" in same_machine[0] else "wheel-tag-mismatch"
    values = {"needed": same_machine[0], "found": str(libc.get("version") or "")}
    return finding(slug, wheel, summary, evidence, values=values)


def _system(platform: str) -> str:
    if platform.startswith("win"):
        return "windows"
    return "macos" if platform.startswith("macosx") else "linux"


def _machines(platform: str) -> tuple[str, ...]:
    if platform.endswith("universal2"):
        return ("x86_64", "aarch64")
    if platform == "win32":
        return ("x86",)
    match = re.search(r"(x86_64|amd64|aarch64|arm64|i686|ppc64le|s390x|armv7l|riscv64)$", platform)
    return (_MACHINES.get(match[1], match[1]),) if match else (platform,)


def _libc_fits(platform: str, libc: Mapping[str, Any]) -> bool:
    """Whether the C library is of the kind and as new as the platform's name asks."""
    kind, have = libc.get("kind"), numbers(str(libc.get("version") or ""))
    if platform.startswith("musllinux"):
        return kind == "musl"
    if not platform.startswith("manylinux"):
        # A plain `linux_x86_64` promises nothing, and pip takes it everywhere.
        return True
    old = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    match = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    asked = (int(match[1]), int(match[2])) if match else old.get(platform.split("_")[0], (0, 0))
    return kind == "glibc" and have >= asked


def _python(wheel: Mapping[str, Any], facts: Facts) -> Finding | None:
    wanted, here = str(wheel["requires_python"]), facts.get("python.version")
    if not wanted or here is None or _satisfies(here, wanted):
        return None
    summary = f"{_file(wheel)} needs Python {wanted}, and this Python is {here}."
    values = {"needed": wanted, "found": here}
    return finding(
        "python-version-unsupported", wheel, summary, [f"Requires-Python: {wanted}"], values=values
    )


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a Python version fits; a clause of unknown form does not speak against it."""
    have = numbers(version)
    for clause in wanted.split(","):
        match = _CLAUSE.match(clause)
        if match is None:
            continue
        sign, bound = match[1], numbers(match[2])
        size = len(bound)
        # Without its trailing parts, 3.11.7 equals 3.11 only where the clause ends in a star.
        short = have[:size] if match[3] or sign == "~=" else (*have, 0, 0)[: max(size, len(have))]
        full = bound if match[3] or sign == "~=" else (*bound, 0, 0)[: max(size, len(have))]
        fits = {
            ">=": short >= full,
            "<=": short <= full,
            ">": short > full,
            "<": short < full,
            "==": short == full,
            "!=": short != full,
            "~=": short[:-1] == full[:-1] and have >= bound,
        }[sign]
        if not fits:
            return False
    return True


def _renamed(wheel: Mapping[str, Any]) -> Finding | None:
    inside, outside = set(wheel["wheel_tags"]), set(wheel["tags"])
    if not inside or inside == outside or inside & outside:
        return None
    summary = (
        f"{_file(wheel)} was renamed: it was built as {sorted(inside)[0]}, "
        f"and its name says {sorted(outside)[0]}."
    )
    evidence = [f"tags in its WHEEL file: {', '.join(sorted(inside)[:4])}"]
    return finding("wheel-tag-mismatch", wheel, summary, evidence, Severity.WARNING)


def _fields(wheel: Mapping[str, Any], facts: Facts) -> list[Finding]:
    """The build fields of the originals' names against the installed torch."""
    version = facts.get("torch.version")
    if not version:
        return []
    found = []
    cuda, abi = facts.get("torch.cuda"), facts.get("torch.cxx11_abi")
    toolkit = re.match(r"cu(\d{2})", wheel["toolkit"])
    if toolkit and not cuda and not facts.get("torch.hip"):
        summary = f"{_file(wheel)} needs a CUDA build of torch, and torch {version} is none."
        found.append(finding("torch-is-cpu-only", wheel, summary, [f"field {wheel['toolkit']}"]))
    elif toolkit and cuda and toolkit[1] != cuda.split(".")[0]:
        summary = (
            f"{_file(wheel)} is for CUDA {toolkit[1]}, and torch {version} is for CUDA {cuda}."
        )
        values = {"needed": toolkit[1], "found": cuda, "cuda": cuda}
        evidence = [f"field {wheel['toolkit']}"]
        found.append(finding("cudart-missing", wheel, summary, evidence, values=values))
    built = wheel["cxx11_abi"]
    if built is not None and abi is not None and built != abi:
        words = {True: "TRUE", False: "FALSE"}
        summary = (
            f"{_file(wheel)} is for cxx11abi{words[built]}, "
            f"and torch {version} has cxx11abi{words[abi]}."
        )
        values = {"needed": words[built], "found": words[abi]}
        evidence = [f"field cxx11abi{words[built]}"]
        found.append(finding("cxx11-abi-mismatch", wheel, summary, evidence, values=values))
    asked = generation.version(wheel["torch"]) if wheel["torch"] else None
    # Names for NVIDIA's containers have the container's year and month where torch's version was.
    if asked and asked[0] < 20 and asked != generation.version(version):
        summary = f"{_file(wheel)} is for torch {wheel['torch']}, and torch {version} is installed."
        values = {"torch": version.split("+")[0], "found": version, "needed": wheel["torch"]}
        evidence = [f"field torch{wheel['torch']}"]
        found.append(finding("torch-abi-mismatch", wheel, summary, evidence, values=values))
    return found


def verdict(wheel: Mapping[str, Any], findings: Sequence[Finding]) -> str:
    """The answer in one sentence."""
    errors = [row for row in findings if row.severity is Severity.ERROR]
    if errors:
        return errors[0].summary
    if findings:
        return f"{_file(wheel)} can be installed, but: {findings[0].summary}"
    count = len(wheel["binaries"])
    if not count:
        return f"{_file(wheel)} fits this machine; it has no binary in it."
    looked = any(report["libraries"] is not None for report in wheel["binaries"])
    what = "its binary loads" if count == 1 else f"its {count} binaries load"
    if not looked:
        return f"{_file(wheel)} fits this machine as far as the facts tell."
    after = any(
        row["status"] == "after-torch"
        for report in wheel["binaries"]
        for row in report["libraries"] or ()
    )
    return (
        f"{_file(wheel)} fits this machine: {what} here{' after `import torch`' if after else ''}."
    )
