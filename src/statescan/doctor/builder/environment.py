# SPDX-License-Identifier: Apache-2.0
"""The variables of a build: what must be set, and what the user set and keeps.

The bit FORCE_CXX11_ABI is never set here: the setup of both packages already takes the bit of the
torch that it finds, and the variable can only turn it into one that does not load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from statescan.doctor import catalog, releases
from statescan.doctor.builder.model import Environment
from statescan.doctor.checks import known, resources
from statescan.doctor.checks.toolkit import is_whole
from statescan.doctor.model import Fact, Facts

THREADS = 4
"""Parallel steps of one nvcc, as the setup of both packages asks for."""

_TRUTHY = ("1", "true", "yes", "on", "y")
_KEPT = (
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAHOSTCXX", "NVCC_CCBIN"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "PYTORCH_NVCC", "TMPDIR", "HIP_ARCHITECTURES"),
)
"""Variables that compilers and torch's build read, beside those that are decided on here."""


def toolkit(facts: Facts) -> Mapping[str, Any]:
    """The toolkit to build with, in the form of the fact ``toolkit.build``; empty for none.

    It is the one that a build would take by itself, unless that has no nvcc, is of another CUDA
    than torch or lacks headers, the user did not name it by CUDA_HOME, and there is a better one.
    """
    taken: Mapping[str, Any] = facts.get("toolkit.build") or {}
    if taken.get("via") in ("CUDA_HOME", "CUDA_PATH"):
        return taken
    major = known.major(str(facts.get("torch.cuda", "")))
    homes: Sequence[Mapping[str, Any]] = facts.get("toolkit.homes", [])
    fitting = [
        home
        for home in homes
        if home.get("nvcc")
        and is_whole(home)
        and known.major(str(home.get("version") or "")) == major
    ]
    known_bad = [home["path"] for home in homes if home not in fitting]
    taken_fits = taken.get("nvcc") and known.major(str(taken.get("version") or "")) == major
    if not fitting or (taken_fits and taken.get("path") not in known_bad):
        return taken
    home = fitting[0]
    return {
        "path": home["path"],
        "via": "the folders of toolkits",
        "exists": True,
        "nvcc": f"{home['path']}/bin/nvcc",
        "version": home["version"],
    }


def with_toolkit(facts: Facts) -> Facts:
    """The facts as they are once the build has chosen its toolkit."""
    chosen = toolkit(facts)
    if not chosen or chosen == facts.get("toolkit.build"):
        return facts
    rows = {fact.name: fact for fact in facts}
    rows["toolkit.build"] = Fact("toolkit.build", dict(chosen), "chosen for this build")
    return Facts(rows)


def decide(package: str, facts: Facts, wrapper: str, scripts: str, targets: int = 1) -> Environment:
    """The environment of a build.

    Args:
        package: Which of the originals.
        facts: Of the machine, after ``with_toolkit``.
        wrapper: Value of PYTORCH_NVCC.
        scripts: Folder of this interpreter's programs, for ninja.
        targets: How many kinds of GPU code are made, which nvcc does in parallel.
    """
    given: Mapping[str, str] = facts.get("environment.variables", {})
    home = str((facts.get("toolkit.build") or {}).get("path") or "")
    made: dict[str, str] = {}
    notes: list[str] = []
    if home:
        made["CUDA_HOME"] = home
        made["PATH"] = f"{home}/bin:{scripts}"
    jobs, threads, why = _jobs(package, facts, targets)
    if given.get("MAX_JOBS"):
        threads = None
        notes.append(f"MAX_JOBS={given['MAX_JOBS']} is yours and stays")
    else:
        made["MAX_JOBS"] = str(jobs)
        notes.append(f"MAX_JOBS={jobs}: {why}")
    if threads is not None:
        notes.append(f"nvcc takes {threads} of its {THREADS} threads, for the same reason")
    made |= _switches(package, given, notes)
    if given.get("PYTORCH_NVCC"):
        notes.append(f"PYTORCH_NVCC={given['PYTORCH_NVCC']} is yours; the wrapper calls it")
    made["PYTORCH_NVCC"] = wrapper
    # Messages in one language, progress in one form, and nothing that waits for an answer.
    made |= {"NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    made |= {"PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1"}
    names = (*_KEPT, "MAX_JOBS", *_own_names(package))
    # PYTORCH_NVCC is both: the build sets it to the wrapper, and the wrapper calls the user's.
    free = set(names) - set(made) | {"PYTORCH_NVCC"}
    kept = {name: given[name] for name in names if given.get(name) and name in free}
    return Environment(made, kept, tuple(notes), threads)


def of_child(environment: Environment, outer: Mapping[str, str]) -> dict[str, str]:
    """All variables of a child: those of this process with those of the build."""
    child = {**outer, **environment.set}
    if "PATH" in environment.set:
        child["PATH"] = f"{environment.set['PATH']}:{outer.get('PATH', '')}"
    return child


def scripts_folder(executable: str) -> str:
    """Where the interpreter's programs are, of which ninja must be on PATH."""
    return str(Path(executable).parent)


def _switches(package: str, given: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """The package's own switches; they compare with the text TRUE and take any other for false."""
    names = releases.variables(package)
    made = {}
    for purpose in ("force", "keep"):
        name = names.get(purpose)
        if name is None:
            continue
        value = given.get(name, "")
        if not value:
            made[name] = "TRUE"
        elif value != "TRUE" and value.lower() in _TRUTHY:
            made[name] = "TRUE"
            notes.append(f"{name}={value} would be ignored and becomes TRUE")
        elif value != "TRUE":
            notes.append(f"{name}={value} is yours and stays: a published wheel may be taken")
    return made


def _own_names(package: str) -> tuple[str, ...]:
    names = releases.variables(package)
    prefix = names["force"].removesuffix("_FORCE_BUILD")
    return (*names.values(), f"{prefix}_LOCAL_VERSION")


def _jobs(package: str, facts: Facts, targets: int) -> tuple[int, int | None, str]:
    """Compilers at a time, parallel steps of each (None for its own choice), and why."""
    memory = facts.get("system.memory") or {}
    sizes = [memory.get("free_gb"), memory.get("limit_gb")]
    free = min((float(size) for size in sizes if size is not None), default=None)
    cores, files = int(facts.get("system.cores", 1)), resources.FILES[package]
    if free is None:
        return 1, 1, "how much memory is free is not known"
    row = catalog.load("builds")["memory_gb"][package]
    at_once = max(1, min(targets, THREADS))

    def needed(jobs: int) -> float:
        """For that many compilers, of which one has the largest source."""
        return float(at_once * (row["largest"] + (jobs - 1) * row["others"]))

    fitting = [jobs for jobs in range(1, min(cores, files) + 1) if needed(jobs) <= free]
    if not fitting:
        steps = max(1, min(at_once, int(free / row["largest"])))
        why = f"{free:.1f} GB are free, and one compiler can take {needed(1):.0f} GB"
        return 1, steps if steps < at_once else None, why
    jobs = fitting[-1]
    if jobs == files:
        return jobs, None, f"there are {files} sources for nvcc"
    if jobs == cores:
        return jobs, None, f"this process has {cores} cores"
    return jobs, None, f"{free:.1f} GB are free, and one more could take {needed(jobs + 1):.0f} GB"
