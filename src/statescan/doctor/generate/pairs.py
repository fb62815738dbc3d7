# SPDX-License-Identifier: Apache-2.0
"""Chooses releases of mamba-ssm and causal-conv1d that fit each other, a torch and a GPU.

What a release is and holds is read from ``doctor.releases``; nothing about one is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from statescan.doctor import catalog, releases
from statescan.doctor.generate.choice import number
from statescan.doctor.releases import Release

_NEWEST = "the newest for this torch, CUDA and GPU"


@dataclass(frozen=True)
class Chosen:
    """A release to build, and why this one."""

    package: str
    version: str
    why: str
    release: Release


@cache
def choose(
    package: str, torch: str, python: str, cuda: str, gpus: tuple[str, ...]
) -> tuple[Chosen, ...]:
    """The releases to build, in their order; none when no release serves the environment."""
    mambas, convs = (
        _serving(name, torch, python, cuda, gpus) for name in ("mamba-ssm", "causal-conv1d")
    )
    if package == "causal-conv1d":
        return tuple(_chosen(conv, _NEWEST) for conv in convs[:1])
    for mamba in mambas:
        for conv in convs:
            if conv.conv_generation == mamba.conv_generation:
                arguments = f"takes the {conv.conv_generation} arguments that mamba-ssm passes"
                return (
                    _chosen(conv, f"{_NEWEST} whose function {arguments}"),
                    _chosen(mamba, _NEWEST),
                )
    return ()


def missing_codes(release: Release, cuda: str, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """GPU codes, such as "61", that must be added to a build so that it runs on the GPUs."""
    codes = [_code(arch) for arch in release.cubins(cuda)]
    return tuple(_code(gpu) for gpu in gpus if not any(_runs(code, _code(gpu)) for code in codes))


def least_python(package: str) -> str:
    """The oldest Python of the releases that can be built."""
    buildable = [one for one in releases.releases(package) if one.sdist_has_sources]
    return min((one.python_min for one in buildable), key=number)


def _chosen(release: Release, why: str) -> Chosen:
    return Chosen(release.package, release.version, why, release)


def _serving(
    package: str, torch: str, python: str, cuda: str, gpus: tuple[str, ...]
) -> list[Release]:
    """Releases that can be built from PyPI for the environment, the best first.

    A release that holds code for the GPUs is better than a newer one that must be given it.
    """
    serving = [
        release
        for release in reversed(releases.releases(package))
        if release.sdist_has_sources
        and number(python) >= number(release.python_min)
        and has_triton(release, torch)
        and _compiles(release, cuda)
        and _reachable(release, cuda, gpus)
    ]
    return sorted(serving, key=lambda one: bool(missing_codes(one, cuda, gpus)))


def has_triton(release: Release, torch: str) -> bool:
    """Whether torch's own Triton is new enough; a newer one would pull a newer torch with it."""
    known = catalog.load("pins")["torch"].get(".".join(torch.split(".")[:2]))
    needed = [one.partition(">=")[2] for one in release.requires if one.startswith("triton>=")]
    return known is None or all(
        number(known["triton"]) >= number(version)[:2] for version in needed
    )


def _compiles(release: Release, cuda: str) -> bool:
    """Whether this nvcc knows every architecture that the release's setup names."""
    codes = [_code(arch) for arch in release.cubins(cuda)]
    return bool(codes) and all(_nvcc_knows(code, cuda) for code in codes)


def _reachable(release: Release, cuda: str, gpus: tuple[str, ...]) -> bool:
    """Whether the codes that the release lacks can be added to its build."""
    return all(_nvcc_knows(code, cuda) for code in missing_codes(release, cuda, gpus))


def _nvcc_knows(code: str, cuda: str) -> bool:
    low, high = releases.nvcc_archs(cuda)
    return int(_code(low)) <= int(code) <= int(_code(high))


def _runs(code: str, gpu: str) -> bool:
    """Code of a capability runs on the same major with the same or a higher minor.

    sm_87 is Jetson's: the desktop cards of 8.9 run sm_80 or sm_86 of the same file.
    """
    return code[:-1] == gpu[:-1] and code[-1] <= gpu[-1]


def _code(arch: object) -> str:
    return str(arch).removeprefix("sm_").replace(".", "")
