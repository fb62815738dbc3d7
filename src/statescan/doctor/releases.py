# SPDX-License-Identifier: Apache-2.0
"""What is known of the originals' releases and of the toolchains that build them.

The data are ``catalog/releases.json``, read off the source packages on PyPI, and
``catalog/toolchain.json``; no machine is looked at and nothing is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from statescan.doctor import catalog

PACKAGES = ("mamba-ssm", "causal-conv1d")
HOSTS = {"mamba-ssm": "state-spaces/mamba", "causal-conv1d": "Dao-AILab/causal-conv1d"}
"""Repositories with a tag "v" and the version, whose release pages carry the wheels."""


@dataclass(frozen=True)
class Release:
    """One release of mamba-ssm or causal-conv1d.

    Attributes:
        package: Name on PyPI.
        version: As on PyPI.
        date: Of its upload, as YYYY-MM-DD.
        conv_generation: How many arguments the ``causal_conv1d_fwd`` has that causal-conv1d
            offers, or that mamba-ssm calls: 4, 5, 7 or 8.
        sdist_has_sources: Whether the source package on PyPI holds the CUDA sources.
        build_requires_torch: Whether an isolated build downloads a torch of its own.
        python_min: Oldest Python.
        wheel_cuda: "minor" or "major": how wheels of the release name their CUDA.
        requires: Requirements beyond torch, einops, transformers and build tools.
        archs: GPU codes with the toolkit from which (or "<" before which) they are built.
        exact: False for a version that is not listed and answered by the nearest one below.
    """

    package: str
    version: str
    date: str
    conv_generation: int
    sdist_has_sources: bool
    build_requires_torch: bool
    python_min: str
    wheel_cuda: str
    requires: tuple[str, ...]
    archs: tuple[tuple[str, tuple[str, ...]], ...]
    exact: bool = True

    def cubins(self, nvcc: str) -> list[str]:
        """The GPU code that a build with this nvcc holds, as "sm_90"; never PTX."""
        codes = [
            code
            for bound, listed in self.archs
            for code in listed
            if (_less(nvcc, bound[1:]) if bound[0] == "<" else not _less(nvcc, bound))
        ]
        return [f"sm_{code}" for code in sorted(codes, key=int)]

    @property
    def force_variable(self) -> str:
        """The variable that forces a source build; only the text TRUE counts."""
        return variables(self.package)["force"]


@cache
def releases(package: str) -> tuple[Release, ...]:
    """Every release on PyPI, oldest to newest; KeyError for another package."""
    data = catalog.load("releases")
    archs = {name: tuple((b, tuple(c)) for b, c in rows) for name, rows in data["archs"].items()}
    return tuple(
        Release(
            package=package,
            version=row["version"],
            date=row["date"],
            conv_generation=row["conv_generation"],
            sdist_has_sources=row["sdist_has_sources"],
            build_requires_torch=row["build_requires_torch"],
            python_min=row["python_min"],
            wheel_cuda=row["wheel_cuda"],
            requires=tuple(row["requires"]),
            archs=archs[row["archs"]],
        )
        for row in data["releases"][package]
    )


def release(package: str, version: str) -> Release | None:
    """The release of that version, or of its nearest neighbour: the same without or with another
    .postN, else the nearest listed one below it; None if it is older than all.
    """
    plain = version.partition("+")[0]
    known = releases(package)
    for row in known:
        if row.version == plain:
            return row
    near = [row for row in known if _base(row.version) == _base(plain)]
    near = near or [row for row in known if not _less(plain, row.version)]
    return replace(near[-1], version=plain, exact=False) if near else None


def variables(package: str) -> Mapping[str, str]:
    """Environment variables of the package's setup by purpose: force, skip, keep, abi."""
    found: Mapping[str, str] = catalog.load("releases")["variables"][package]
    return found


def wheel_name(
    package: str,
    version: str,
    *,
    cuda: str,
    torch: str,
    abi: bool | None,
    python_tag: str,
    platform: str,
) -> str:
    """Name of the file on the release page that is for this environment, whether or not it exists.

    Args:
        package, version: The release.
        cuda: Of torch, "12.8".
        torch: "2.7"; in an NGC container its version, "25.05".
        abi: torch's C++11 ABI bit; None counts as the default of that torch.
        python_tag: "cp311".
        platform: "linux_x86_64", "linux_aarch64", ...
    """
    major = cuda.partition(".")[0]
    bit = torch_abi_default(torch) if abi is None else abi
    return (
        f"{package.replace('-', '_')}-{version}+cu{_named_cuda(package, version, major)}"
        f"torch{torch}cxx11abi{str(bool(bit)).upper()}-{python_tag}-{python_tag}-{platform}.whl"
    )


def wheel_asked(
    package: str,
    version: str,
    *,
    cuda: str,
    torch: str,
    abi: bool | None,
    python_tag: str,
    platform: str,
) -> str:
    """Name of the file that the release's own setup looks for; the arguments are ``wheel_name``'s.

    It is another one where the setup is older than what it runs on: releases that do not know
    CUDA 13 ask for CUDA 12, and most ask for x86_64 on every Linux machine.
    """
    since: Mapping[str, Mapping[str, str]] = catalog.load("releases")["setup_since"]
    major = cuda.partition(".")[0]
    if major not in ("11", "12") and _less(version, since["cuda_13"][package]):
        cuda = "12"
    if platform.startswith("linux_") and _less(version, since["machine"][package]):
        platform = "linux_x86_64"
    fields = {"torch": torch, "abi": abi, "python_tag": python_tag}
    return wheel_name(package, version, cuda=cuda, platform=platform, **fields)  # type: ignore[arg-type]


def _named_cuda(package: str, version: str, major: str) -> str:
    known = release(package, version)
    if known is not None and known.wheel_cuda == "minor":
        # These releases were built for one CUDA of each major.
        return {"11": "118", "12": "122"}.get(major, major)
    return major


def wheel_published(
    package: str,
    version: str,
    *,
    cuda: str,
    torch: str,
    abi: bool | None,
    python_tag: str,
    platform: str,
) -> bool | None:
    """Whether such a wheel was ever published; None where that is not known.

    Only Linux wheels exist. The combinations of the releases of 2026-03 to 2026-05 are known;
    of others it is known only what cannot be.
    """
    table = catalog.load("releases")["published"]
    if not platform.startswith("linux_") or platform not in ("linux_x86_64", "linux_aarch64"):
        return False
    if cuda.partition(".")[0] not in ("11", "12", "13"):
        return False
    first, last = table["first"][package], table["last"][package]
    if _less(version, first) or _less(last, version):
        return None
    listed = table["torch"].get(torch)
    if listed is None or python_tag not in table["pythons"]:
        return False
    if cuda.partition(".")[0] not in listed:
        return False
    if platform == "linux_aarch64" and _less(torch, table["aarch64_from"]):
        return False
    if abi is False and torch not in table["old_abi"]:
        return False
    return None if abi is None else True


def gcc_bounds(nvcc: str) -> tuple[str, str]:
    """Oldest and newest GCC (major version) that this nvcc accepts."""
    low, high = _toolkit(nvcc)["gcc"]
    return low, high


def msvc_bounds(nvcc: str) -> tuple[str, str]:
    """Oldest and newest Visual C++ compiler version (19.xx) that this nvcc accepts."""
    low, high = _toolkit(nvcc)["msvc"]
    return low, high


def nvcc_archs(nvcc: str) -> tuple[int, int]:
    """Lowest and highest GPU code that this nvcc makes, as 75 and 121."""
    low, high = _toolkit(nvcc)["sm"]
    return low, high


def driver_for_cuda(cuda: str, os_name: str = "linux") -> str:
    """Oldest driver that runs programs of this CUDA; minor versions share their major's."""
    row = _toolkit(cuda)
    found: str = row["windows" if os_name == "windows" else "linux"]
    return found


def torch_min_gcc(torch: str) -> str:
    """Oldest GCC that this torch's headers compile with."""
    found: str = _torch(torch)["gcc"]
    return found


def torch_pythons(torch: str) -> tuple[str, ...]:
    """Every Python that this torch has wheels for, oldest first."""
    low, high = _torch(torch)["pythons"]
    first, last = (int(bound.partition(".")[2]) for bound in (low, high))
    return tuple(f"3.{minor}" for minor in range(first, last + 1))


def torch_abi_default(torch: str) -> bool | None:
    """C++11 ABI bit of the wheels on PyPI; None where it differs by CUDA."""
    found: bool | None = _torch(torch)["abi"]
    return found


def matrix() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """For each package and component the least and the recommended version."""
    rows: Mapping[str, Mapping[str, Any]] = catalog.load("toolchain")["matrix"]
    return {
        package: {component: (least, best) for component, (least, best) in row.items()}
        for package, row in rows.items()
    }


def _toolkit(version: str) -> Mapping[str, Any]:
    return _nearest("toolkits", version)


def _torch(version: str) -> Mapping[str, Any]:
    return _nearest("torch", version)


def _nearest(table: str, version: str) -> Mapping[str, Any]:
    """The newest row that is not newer than ``version``, else the oldest."""
    rows: Mapping[str, Mapping[str, Any]] = catalog.load("toolchain")[table]
    ordered = sorted(rows, key=_numbers)
    at_most = [name for name in ordered if not _less(version, name)]
    return rows[at_most[-1] if at_most else ordered[0]]


def _less(version: str, than: str) -> bool:
    return _numbers(version) < _numbers(than)


def _base(version: str) -> str:
    return re.sub(r"\.?post\d+$", "", version)


def _numbers(version: str) -> tuple[int, ...]:
    """Numbers of a version up to its local part; .post1 counts as one more number."""
    plain = re.sub(r"\.?(post)", ".", version.partition("+")[0])
    return tuple(int(part) for part in re.findall(r"\d+", plain))
