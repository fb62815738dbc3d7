# SPDX-License-Identifier: Apache-2.0
"""Checks of the system itself, and of variables that installs and imports read.

Where CUDA_HOME leads is the toolkit's matter, how many jobs fit into memory that of resources.
"""

from __future__ import annotations

from collections.abc import Iterable

from statescan.doctor.checks import known
from statescan.doctor.checks.base import (
    MAMBA,
    ORIGINALS,
    PACKAGES,
    PREFIXES,
    Question,
    check,
    fact_line,
    finding,
)
from statescan.doctor.model import Facts, Finding, Severity

_SWITCHES = ("FORCE_BUILD", "SKIP_CUDA_BUILD", "FORCE_CXX11_ABI", "KEEP_CUDA_BUILD")
_OFF = ("", "0", "false", "no", "off")
_NO_PLACE = ("no-cuda-machine", "macos-unsupported", "system-without-torch")
_MULTIBYTE = ("cp936", "gbk", "gb2312", "gb18030", "cp932", "shift_jis", "cp949", "cp950", "big5")


@check(
    *("environment", "macos-unsupported"),
    about="the system can have CUDA at all",
    needs=("system.os",),
)
def system_has_cuda(question: Question) -> Iterable[Finding]:
    """macOS cannot."""
    if question.facts.get("system.os") != "macos":
        return
    wanted = [package for package in ORIGINALS if question.judges(package)]
    name = question.facts.get("system.name", "macOS")
    summary = f"{' and '.join(wanted)} need CUDA, which {name} does not have."
    yield finding(question, "macos-unsupported", summary, packages=wanted)


@check(
    *("environment", "system-without-torch"),
    packages=PACKAGES,
    about="torch is published for this C library",
    needs=("system.libc",),
)
def libc_has_torch(question: Question) -> Iterable[Finding]:
    """torch has no wheels for musl, but distributions may have packages."""
    facts = question.facts
    libc = facts.get("system.libc") or {}
    if libc.get("kind") != "musl" or facts.get("torch.version"):
        return
    summary = (
        f"{facts.get('system.name', 'This system')} has musl as its C library, "
        "and torch's wheels need glibc."
    )
    evidence = [fact_line(facts, "system.libc", f"musl {libc.get('version', '')}".strip())]
    packages = question.judged
    yield finding(question, "system-without-torch", summary, evidence, packages=packages)


@check(
    *("environment", "wsl-driver-missing"),
    about="WSL shows Windows' GPU driver to Linux",
    unless=("torch-is-cpu-only",),
    needs=("system.wsl",),
)
def wsl_driver(question: Question) -> Iterable[Finding]:
    """WSL without libcuda."""
    facts = question.facts
    wsl = facts.get("system.wsl", 0)
    if not wsl or facts.get("driver.library") or facts.get("driver.version"):
        return
    why = "and WSL 1 never has one" if wsl == 1 else "and /usr/lib/wsl/lib has no libcuda.so.1"
    summary = f"This is WSL {wsl}, no NVIDIA driver is visible in it, {why}."
    packages = _originals(question)
    yield finding(question, "wsl-driver-missing", summary, packages=packages)


@check(
    *("environment", "skip-build-set"),
    about="no variable leaves the CUDA modules out of an install",
    unless=_NO_PLACE,
    needs=("environment.variables",),
)
def skip_switch(question: Question) -> Iterable[Finding]:
    """MAMBA_SKIP_CUDA_BUILD=TRUE and its neighbour."""
    variables = _variables(question.facts)
    for package in _originals(question):
        name = f"{PREFIXES[package]}_SKIP_CUDA_BUILD"
        if variables.get(name) != "TRUE":
            continue
        # What is installed already is not changed by it; the next install is.
        severity = Severity.ERROR if package in question.built else Severity.WARNING
        module = f"{package} would be installed without its CUDA module"
        summary = f"{name} is TRUE in this shell, and {module}."
        yield finding(
            *(question, "skip-build-set", summary, [f"{name}=TRUE"]),
            packages=[package],
            severity=severity,
            values={"needed": name},
        )


@check(
    *("environment", "variable-ignored"),
    about="no variable is set to a value that the build ignores",
    unless=_NO_PLACE,
    needs=("environment.variables",),
)
def ignored_values(question: Question) -> Iterable[Finding]:
    """The originals compare with the text TRUE; torch wants digits in MAX_JOBS."""
    variables = _variables(question.facts)
    lines, packages = [], []
    for package in _originals(question):
        for switch in _SWITCHES:
            name = f"{PREFIXES[package]}_{switch}"
            value = variables.get(name, "")
            if value != "TRUE" and value.lower() not in _OFF:
                lines.append(f"{name}={value}: only the text TRUE switches it on")
                packages.append(package)
    jobs = variables.get("MAX_JOBS", "")
    if jobs and not jobs.isdigit() and question.compiled:
        lines.append(f"MAX_JOBS={jobs}: only a number is read, and as many jobs as cores would run")
        packages += question.compiled
    if lines:
        names = ", ".join(line.partition(":")[0] for line in lines)
        verb = "is" if len(lines) == 1 else "are"
        yield finding(
            *(question, "variable-ignored", f"{names} {verb} ignored.", lines),
            packages=list(dict.fromkeys(packages)),
            values={"needed": lines[0].partition("=")[0]},
        )


@check(
    *("environment", "arch-list-ignored"),
    about="TORCH_CUDA_ARCH_LIST asks for nothing that the build leaves out",
    unless=(*_NO_PLACE, "gpu-arch-not-in-binary", "nvcc-arch-unsupported", "nvcc-missing"),
    needs=("environment.variables",),
    of_build=True,
)
def arch_list(question: Question) -> Iterable[Finding]:
    """The originals pass their own list of architectures; torch then ignores the variable.

    Containers set it to what they were built for, so only what would be missed is told.
    """
    asked = _variables(question.facts).get("TORCH_CUDA_ARCH_LIST", "")
    nvcc = str((question.facts.get("toolkit.build") or {}).get("version") or "")
    for package in question.compiled if nvcc else ():
        archs = known.fitting(question.facts, package).cubins(nvcc)
        devices = [(word, _capability(word)) for word in asked.replace(";", " ").split()]
        lost = known.lacking(archs, [row for row in devices if row[1] != (0, 0)])
        if lost:
            names = ", ".join(name for name, _ in lost)
            summary = f"TORCH_CUDA_ARCH_LIST asks for {names}, and {package} ignores it."
            evidence = [f"TORCH_CUDA_ARCH_LIST={asked}", f"the build makes {', '.join(archs)}"]
            values = {"sm": f"{lost[0][1][0]}{lost[0][1][1]}"}
            slug = "arch-list-ignored"
            yield finding(question, slug, summary, evidence, packages=[package], values=values)
            return


@check(
    *("environment", "library-path-other-cuda"),
    about="LD_LIBRARY_PATH has no CUDA runtime of another major version than torch's",
    unless=(*_NO_PLACE, "torch-missing", "torch-is-cpu-only", "cudart-missing"),
    needs=("libraries.cudart",),
)
def library_path(question: Question) -> Iterable[Finding]:
    """A runtime of another CUDA that the loader may take first."""
    facts = question.facts
    cuda = str(facts.get("torch.cuda", ""))
    rows = [
        row
        for row in facts.get("libraries.cudart", [])
        if row.get("via") == "LD_LIBRARY_PATH" and cuda and _other_major(row["soname"], cuda)
    ]
    if rows:
        row = rows[0]
        summary = f"LD_LIBRARY_PATH leads to {row['soname']}, and torch is built for CUDA {cuda}."
        evidence = [
            f"{row['path']}",
            f"LD_LIBRARY_PATH={_variables(facts).get('LD_LIBRARY_PATH', '')}",
        ]
        yield finding(
            *(question, "library-path-other-cuda", summary, evidence),
            packages=_originals(question),
            values={"path": str(row["path"]).rpartition("/")[0]},
        )


@check(
    *("environment", "locale-encoding"),
    about="Python reads text files as UTF-8",
    unless=_NO_PLACE,
    needs=("system.encoding",),
    of_build=True,
)
def encoding(question: Question) -> Iterable[Finding]:
    """Code pages of several bytes a character stop at UTF-8 text; single-byte ones seldom do."""
    row = question.facts.get("system.encoding") or {}
    preferred = str(row.get("preferred", "")).lower()
    if preferred in _MULTIBYTE and not row.get("utf8_mode"):
        summary = f"Python reads text files as {preferred} here, and the sources are UTF-8."
        evidence = [f"preferred encoding: {preferred}", "UTF-8 mode is off"]
        yield finding(
            *(question, "locale-encoding", summary, evidence),
            packages=question.built,
            severity=Severity.WARNING,
        )


def _variables(facts: Facts) -> dict[str, str]:
    variables: dict[str, str] = facts.get("environment.variables", {})
    return variables


def _originals(question: Question) -> list[str]:
    """The originals that are judged; mamba-ssm's install also wants causal-conv1d."""
    judged = [package for package in ORIGINALS if question.judges(package)]
    return list(ORIGINALS) if question.asked == MAMBA else judged


def _other_major(soname: str, cuda: str) -> bool:
    found = soname.partition(".so.")[2].partition(".")[0]
    return found.isdigit() and found != known.major(cuda)


def _capability(word: str) -> tuple[int, int]:
    """ "12.0+PTX" as numbers; (0, 0) for names such as Ampere."""
    numbers = word.partition("+")[0].rstrip("af").split(".")
    if len(numbers) != 2 or not all(part.isdigit() for part in numbers):
        return 0, 0
    return int(numbers[0]), int(numbers[1])
