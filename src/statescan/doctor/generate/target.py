# SPDX-License-Identifier: Apache-2.0
"""The environment that files are written for: read from ``--target`` text or from facts.

Only what was said or seen is recorded; versions are chosen in ``choices``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from statescan.doctor.model import Facts
from statescan.errors import ArgumentError

KEYS = ("cuda", "torch", "python", "os", "machine", "gpu")
SYSTEMS = ("linux", "windows", "macos")

_MACHINES = {
    "x86_64": "x86_64",
    "amd64": "x86_64",
    "x64": "x86_64",
    "aarch64": "aarch64",
    "arm64": "aarch64",
}
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")
_MINOR = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Target:
    """What is known about the environment; an empty field was neither said nor seen.

    Attributes:
        origin: "target" for text of the user, "facts" for what a machine showed.
        os: One of ``SYSTEMS``.
        machine: "x86_64", "aarch64", or what a machine calls itself.
        python: "3.11", without the patch release.
        torch: "2.7" or "2.7.1", without the local part.
        cuda: "12.8", "none" for a build without GPU, or "rocm6.3".
        gpus: Compute capabilities, such as "9.0".
        driver_cuda: The newest CUDA that the driver serves.
        libc: "glibc", "musl", or empty.
        memory_gb: What a build may use; 0 when unknown.
        cores: CPUs that a build may use; 0 when unknown.
        statescan: Its version there.
        installed: Names of distributions to versions; None for one that has no pin.
    """

    origin: str = "target"
    os: str = ""
    machine: str = ""
    python: str = ""
    torch: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    driver_cuda: str = ""
    libc: str = ""
    memory_gb: float = 0.0
    cores: int = 0
    statescan: str = ""
    installed: Mapping[str, str | None] = field(default_factory=dict)

    def text(self) -> str:
        """The ``--target`` that says the same."""
        pairs = {
            "cuda": self.cuda,
            "torch": self.torch,
            "python": self.python,
            "os": self.os,
            "machine": self.machine,
            "gpu": ",".join(self.gpus),
        }
        return " ".join(f"{key}={value}" for key, value in pairs.items() if value)


def parse(text: str) -> Target:
    """The target of ``--target "cuda=12.8 torch=2.7 python=3.11"``."""
    values: dict[str, str] = {}
    for word in text.replace(";", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not value or key not in KEYS:
            raise _wrong(word, f"Each word is KEY=VALUE with a KEY of {', '.join(KEYS)}.")
        if key in values:
            raise _wrong(word, f"{key} is given twice.")
        values[key] = value.lower()
    if not values:
        raise _wrong(text, "At least one KEY=VALUE is needed.")
    torch, cuda = _torch_and_cuda(values.get("torch", ""), values.get("cuda", ""))
    return Target(
        os=_one_of("os", values.get("os", ""), SYSTEMS),
        machine=_machine(values.get("machine", "")),
        python=_python(values.get("python", "")),
        torch=torch,
        cuda=cuda,
        gpus=_gpus(values.get("gpu", "")),
    )


def from_facts(facts: Facts) -> Target:
    """The target that a machine is."""
    version = str(facts.get("torch.version", ""))
    # A build between releases (2.7.0a0+nv25.05) is on no index and cannot be pinned.
    release = re.fullmatch(r"(\d+\.\d+\.\d+)(\+.*)?", version)
    memory = facts.get("system.memory", {})
    sizes = [memory.get("total_gb"), memory.get("limit_gb")]
    gpus = facts.get("driver.gpus", []) or facts.get("torch.devices", [])
    machine = str(facts.get("system.machine", "")).lower()
    return Target(
        origin="facts",
        os=str(facts.get("system.os", "")),
        machine=_MACHINES.get(machine, machine),
        python=".".join(str(facts.get("python.version", "")).split(".")[:2]),
        torch=release[1] if release else "",
        cuda=_cuda_of(facts, version) if release else "",
        gpus=tuple(sorted({gpu["capability"] for gpu in gpus if gpu.get("capability")})),
        driver_cuda=str(facts.get("driver.cuda", "")),
        libc=str(facts.get("system.libc", {}).get("kind", "")),
        # The whole and not the free memory: the same machine gives the same file tomorrow.
        memory_gb=min((float(size) for size in sizes if size), default=0.0),
        cores=int(facts.get("system.cores", 0)),
        statescan=_release_of(facts.get("statescan.version", "")),
        installed=_installed(facts),
    )


def in_container(target: Target) -> Target:
    """The same GPU and versions inside a Linux container."""
    return replace(target, os="linux", libc="glibc")


def _cuda_of(facts: Facts, version: str) -> str:
    hip = str(facts.get("torch.hip", ""))
    if hip:
        local = re.search(r"\+rocm(\d+\.\d+)", version)
        return f"rocm{local[1] if local else '.'.join(hip.split('.')[:2])}"
    return str(facts.get("torch.cuda", "")) or "none"


def _installed(facts: Facts) -> dict[str, str | None]:
    rows = facts.get("packages.installed", {})
    return {
        name: None if row.get("editable") or row.get("direct_url") else str(row.get("version"))
        for name, row in sorted(rows.items())
    }


def _release_of(version: object) -> str:
    return str(version) if re.fullmatch(r"\d+(\.\d+)+", str(version)) else ""


def _torch_and_cuda(torch: str, cuda: str) -> tuple[str, str]:
    release, plus, local = torch.partition("+")
    if torch and not _RELEASE.fullmatch(release):
        raise _wrong(f"torch={torch}", "torch is a release such as 2.7, 2.7.1 or 2.7.1+cu128.")
    if plus:
        said = _cuda_of_local(local)
        if not said:
            raise _wrong(f"torch={torch}", "Its local part is cpu, cu128, rocm6.3 and the like.")
        if cuda and _cuda(cuda) != said:
            raise _wrong(f"torch={torch} cuda={cuda}", "The two name different builds of torch.")
        return release, said
    return release, _cuda(cuda) if cuda else ""


def _cuda_of_local(local: str) -> str:
    if local == "cpu":
        return "none"
    cu = re.fullmatch(r"cu(\d{2})(\d)", local)
    if cu:
        return f"{cu[1]}.{cu[2]}"
    return local if re.fullmatch(r"rocm\d+\.\d+(\.\d+)?", local) else ""


def _cuda(value: str) -> str:
    if value in ("none", "cpu"):
        return "none"
    if re.fullmatch(r"rocm\d+\.\d+(\.\d+)?", value):
        return value
    if not _RELEASE.fullmatch(value):
        raise _wrong(f"cuda={value}", "cuda is a version such as 12.8, or none for the CPU.")
    # The patch release of a toolkit changes neither torch's builds nor what runs.
    return ".".join(value.split(".")[:2])


def _python(value: str) -> str:
    if value and not _RELEASE.fullmatch(value):
        raise _wrong(f"python={value}", "python is a version such as 3.11.")
    return ".".join(value.split(".")[:2])


def _gpus(value: str) -> tuple[str, ...]:
    names = [name for name in value.split(",") if name]
    for name in names:
        if not _MINOR.fullmatch(name):
            raise _wrong(f"gpu={value}", "gpu is a compute capability such as 9.0, or 8.0,9.0.")
    return tuple(sorted(set(names), key=lambda name: tuple(map(int, name.split(".")))))


def _machine(value: str) -> str:
    return _MACHINES[_one_of("machine", value, tuple(_MACHINES))] if value else ""


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value and value not in allowed:
        raise _wrong(f"{key}={value}", f"{key} is one of {', '.join(allowed)}.")
    return value


def _wrong(given: str, needed: str) -> ArgumentError:
    return ArgumentError(
        f"--target: {given!r} is not understood.\n{needed}\n"
        'An example: --target "cuda=12.8 torch=2.7 python=3.11".'
    )
