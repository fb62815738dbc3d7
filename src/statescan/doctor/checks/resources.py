# SPDX-License-Identifier: Apache-2.0
"""Checks of memory and disk for a build, and of wheels in pip's cache that it would take instead.

How long a build takes is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor.checks.base import CONV, MAMBA, MODULES, Question, check, finding
from statescan.doctor.model import Facts, Finding, Severity

_NO_BUILD = (
    *("no-cuda-machine", "macos-unsupported", "system-without-torch"),
    *("msvc-missing", "msvc-code-portability"),
)
GB_PER_JOB = 2.5
"""Seen of one compiler on average: ten at once took more than 20 GB (four architectures each)."""
GB_OF_ONE = 3.0
"""Below this even one compiler at a time is killed."""
FILES = {MAMBA: 10, CONV: 3}
"""Sources of each package, which no number of jobs exceeds."""
GB_OF_DISK = 4.0
"""Objects and temporary files of a build."""
GB_TO_INSTALL = 0.5
"""A wheel of mamba-ssm unpacked."""


@check(
    *("resources", "build-out-of-memory"),
    about="memory is enough for the compilers of a build",
    unless=_NO_BUILD,
    needs=("system.memory",),
    of_build=True,
)
def memory(question: Question) -> Iterable[Finding]:
    """Free memory against as many compilers as would run at once."""
    facts = question.facts
    free = _free_memory(facts)
    if not question.compiled or free is None:
        return
    jobs, why = _jobs(facts)
    jobs = min(jobs, max(FILES[package] for package in question.compiled))
    if free >= GB_OF_ONE and free >= jobs * GB_PER_JOB:
        return
    fitting = max(1, int(free / GB_PER_JOB))
    summary = f"{free:.1f} GB of memory are free, and {jobs} compilers at once ({why}) need "
    summary += f"about {max(jobs * GB_PER_JOB, GB_OF_ONE):.0f} GB."
    memory_row = facts.get("system.memory")
    evidence = [f"total {memory_row.get('total_gb')} GB, free {memory_row.get('free_gb')} GB"]
    if memory_row.get("limit_gb"):
        evidence.append(f"limit of this container: {memory_row['limit_gb']} GB")
    yield finding(
        *(question, "build-out-of-memory", summary, evidence),
        packages=question.compiled,
        severity=Severity.ERROR if free < GB_OF_ONE else Severity.WARNING,
        values={"needed": str(fitting)},
    )


def _free_memory(facts: Facts) -> float | None:
    row = facts.get("system.memory") or {}
    sizes = [row.get("free_gb"), row.get("limit_gb")]
    return min((float(size) for size in sizes if size is not None), default=None)


def _jobs(facts: Facts) -> tuple[int, str]:
    """How many compilers ninja starts, and why."""
    said = facts.get("environment.variables", {}).get("MAX_JOBS", "")
    if said.isdigit() and int(said):
        return int(said), f"MAX_JOBS={said}"
    ninja = facts.get("compiler.ninja") or "ninja" in facts.get("packages.installed", {})
    cores = int(facts.get("system.cores", 1))
    return (cores, f"{cores} cores, MAX_JOBS is not set") if ninja else (1, "without ninja")


@check(
    *("resources", "disk-full"),
    about="the disks have room for a build and an install",
    unless=_NO_BUILD,
    needs=("system.disks",),
    of_build=True,
)
def disk(question: Question) -> Iterable[Finding]:
    """The temporary folder holds the build, site-packages what comes of it."""
    disks = question.facts.get("system.disks") or {}
    needs = {"tmp": GB_OF_DISK if question.compiled else GB_TO_INSTALL, "site": GB_TO_INSTALL}
    for name, needed in needs.items():
        row = disks.get(name) or {}
        free = row.get("free_gb")
        if free is None or float(free) >= needed:
            continue
        summary = f"{row['path']} has {float(free):.1f} GB free, and {needed:g} GB are needed."
        evidence = [
            f"{other['path']}: {other['free_gb']} GB free"
            for key, other in disks.items()
            if key != name and other and other.get("free_gb") is not None
        ]
        slug = "disk-full"
        yield finding(question, slug, summary, evidence, packages=question.built)
        return


@check(
    *("resources", "stale-wheel-cache"),
    about="pip's cache has no wheel of its own making that an install would take",
    unless=(*_NO_BUILD, "torch-abi-mismatch", "cxx11-abi-mismatch", "cudart-missing"),
    needs=("caches.pip_wheels",),
    of_build=True,
)
def cached_wheels(question: Question) -> Iterable[Finding]:
    """A wheel that pip built is kept under a name that does not tell its torch."""
    facts = question.facts
    tag = str(facts.get("python.tag", ""))
    modules = {MODULES[package]: package for package in question.built}
    rows = [
        (row, modules[row["file"].partition("-")[0]])
        for row in facts.get("caches.pip_wheels", [])
        if row["file"].partition("-")[0] in modules and f"-{tag}-" in row["file"]
    ]
    if rows:
        files = ", ".join(row["file"] for row, _ in rows)
        summary = f"pip would take {files} from its cache, built for the torch of that time."
        evidence = [str(row["path"]) for row, _ in rows]
        yield finding(
            *(question, "stale-wheel-cache", summary, evidence),
            packages=list(dict.fromkeys(package for _, package in rows)),
            severity=Severity.WARNING,
        )
