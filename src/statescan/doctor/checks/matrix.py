# SPDX-License-Identifier: Apache-2.0
"""Least and recommended versions for each package and release, and where a machine stands.

The data are the catalogue's; ``matrix.json`` says when each torch was published, because a release
fits the torch of its time best. That something is wrong is for the checks to say.
"""

from __future__ import annotations

from typing import Any

from statescan.doctor import catalog, releases
from statescan.doctor.checks import known
from statescan.doctor.checks.base import ORIGINALS, PACKAGES
from statescan.doctor.model import Facts
from statescan.doctor.releases import Release
from statescan.doctor.symbols.findings import numbers

COMPONENTS = ("python", "torch", "cuda", "gcc")

NOTES = (
    "least: the oldest that a release accepts. best: what it was made and tried with, and what is "
    "least trouble today. CUDA is that of nvcc and of torch's build; their major versions must be "
    "equal. statescan needs neither nvcc nor GCC.",
    "conv: how many arguments causal_conv1d_fwd takes; a mamba-ssm and a causal-conv1d fit where "
    "the numbers are equal.",
    "git: the source package on PyPI lacks the CUDA sources, so a build needs a clone. not here: "
    "the release does not take this Python.",
)


def build(facts: Facts, package: str | None = None) -> dict[str, Any]:
    """The matrix as JSON data.

    Returns:
        ``here``: the versions of this machine; ``packages``: a row a package and component with
        ``least``, ``best``, ``here`` and ``stands`` ("ok", "too old", "newer", "missing" or
        "not needed"); ``releases``: a row for each release of the originals; ``notes``.
    """
    here = _here(facts)
    wanted = [package] if package else list(PACKAGES)
    return {
        "here": here,
        "packages": [
            row for name in wanted for row in _package_rows(name, here, releases.matrix()[name])
        ],
        "releases": [
            _release_row(release, facts)
            for name in wanted
            if name in ORIGINALS
            for release in reversed(releases.releases(name))
        ],
        "notes": list(NOTES),
    }


def _here(facts: Facts) -> dict[str, str | None]:
    compiler = known.compiler_of(facts, "compiler.cxx")
    gcc = compiler.get("version") if compiler.get("family") == "gcc" else None
    return {
        "python": facts.get("python.version"),
        "torch": facts.get("torch.version"),
        "cuda": (facts.get("toolkit.build") or {}).get("version"),
        "gcc": gcc,
    }


def _package_rows(
    package: str, here: dict[str, str | None], bounds: Any
) -> list[dict[str, str | None]]:
    rows = []
    for component in COMPONENTS:
        least, best = bounds[component]
        needed = least != "none"
        version = here[component]
        rows.append(
            {
                "package": package,
                "component": component,
                "least": least if needed else None,
                "best": best if needed else None,
                "here": version,
                "stands": _stands(version, least, best) if needed else "not needed",
            }
        )
    return rows


def _stands(version: str | None, least: str, best: str) -> str:
    if not version:
        return "missing"
    if known.older(version, least):
        return "too old"
    return "newer" if known.newer(version, best) else "ok"


def _release_row(release: Release, facts: Facts) -> dict[str, Any]:
    """One release with the torch of its time, and what follows from that."""
    torch = _torch_of(release)
    pins = catalog.load("pins")["torch"].get(torch, {})
    cuda = _cuda_of(pins.get("cuda", ["11.8"]))
    pythons = releases.torch_pythons(torch)
    python = str(facts.get("python.version", ""))
    return {
        "package": release.package,
        "version": release.version,
        "date": release.date,
        "python": {"least": release.python_min, "best": pythons[max(len(pythons) - 2, 0)]},
        "torch": {"least": _least_torch(release), "best": torch},
        "cuda": {"least": known.LEAST_NVCC, "best": cuda},
        "gcc": {"least": releases.torch_min_gcc(torch), "best": _gcc_for(cuda)},
        "conv": release.conv_generation,
        "from_pypi": release.sdist_has_sources,
        "for_this_python": not python or not known.older(python, release.python_min),
    }


def _torch_of(release: Release) -> str:
    """The newest torch at the date of a release that brings the Triton it asks for."""
    dates: dict[str, str] = catalog.load("matrix")["torch_dates"]
    before = [torch for torch, date in dates.items() if date <= release.date[:7]]
    return max(before, key=numbers)


def _least_torch(release: Release) -> str:
    """The oldest torch whose Triton is new enough for a release."""
    least: str = releases.matrix()[release.package]["torch"][0]
    triton = known.triton_min(release)
    if not triton:
        return least
    table = catalog.load("pins")["torch"]
    fitting = [
        name for name, row in table.items() if not known.older(row["triton"], known.minor(triton))
    ]
    return min(fitting, key=numbers, default=least)


def _cuda_of(cudas: list[str]) -> str:
    """Of torch's builds the newest of CUDA 12, which most drivers serve; else the newest."""
    twelve = [cuda for cuda in cudas if cuda.startswith("12.")]
    return max(twelve or cudas, key=numbers)


def _gcc_for(cuda: str) -> str:
    """The newest GCC that this nvcc accepts, of those that are found everywhere."""
    return min(releases.gcc_bounds(cuda)[1], "13", key=int)
