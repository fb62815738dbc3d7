# SPDX-License-Identifier: Apache-2.0
"""Reads file names: tags of extension modules, tags and build fields of wheels, library versions.

Only the text of the name is looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from statescan.doctor.symbols.binary import WrongKindError

_CPYTHON = re.compile(r"\.cpython-(\d{2,4}t?)(?:-([\w-]+))?\.so$")
_WINDOWS = re.compile(r"\.cp(\d{2,4}t?)-(\w+)\.pyd$")
_PYPY = re.compile(r"\.pypy(\d{2,3})-pp\d+(?:-([\w-]+))?\.(?:so|pyd)$")
_CUDART = re.compile(
    r"^libcudart\.so\.(\d+)(?:\.\d+)*$|^cudart(?:32|64)_(\d+)\.dll$", re.IGNORECASE
)
_LOCAL = re.compile(
    r"^(?:(?P<kind>cu|hip|rocm)(?P<toolkit>[\d.]+))?(?:torch(?P<torch>[\d.]+?))?"
    r"(?:cxx11abi(?P<abi>TRUE|FALSE))?$",
    re.IGNORECASE,
)


def module_name(file_name: str) -> str:
    """The name that Python imports the file by."""
    return file_name.split(".", 1)[0]


def python_tag(file_name: str) -> str | None:
    """The Python that an extension module is for: "cp311", "cp313t", "abi3", "pp39" or None."""
    for pattern, prefix in ((_CPYTHON, "cp"), (_WINDOWS, "cp"), (_PYPY, "pp")):
        match = pattern.search(file_name)
        if match:
            return f"{prefix}{match[1]}"
    return "abi3" if re.search(r"\.abi3\.(so|pyd)$", file_name) else None


def platform_tag(file_name: str) -> str | None:
    """The platform in an extension module's name: "x86_64-linux-gnu", "win_amd64" or None."""
    for pattern in (_CPYTHON, _WINDOWS, _PYPY):
        match = pattern.search(file_name)
        if match:
            return match[2]
    return None


def cudart_major(library: str) -> str | None:
    """The major version of the CUDA runtime of that name; None for any other library.

    Copies that a wheel carries have a changed name and are not meant.
    """
    match = _CUDART.match(library)
    if match is None:
        return None
    if match[1]:
        return match[1]
    number = int(match[2][:6])
    return str(number // 10 if number >= 90 else number)


@dataclass(frozen=True)
class WheelName:
    """The fields of a wheel's file name.

    Attributes:
        distribution: As written in the name.
        version: With the local part.
        toolkit: "cu12" or "hip6" of the local part, as written; empty without one.
        torch: "2.7" of the local part; empty without one.
        cxx11_abi: Of the local part.
        tags: Every combination of the compressed tags.
    """

    distribution: str
    version: str
    toolkit: str
    torch: str
    cxx11_abi: bool | None
    tags: tuple[str, ...]


def wheel_name(file_name: str) -> WheelName:
    """The fields of a wheel's name; WrongKindError when it is no name of one."""
    parts = file_name.removesuffix(".whl").split("-")
    if not file_name.endswith(".whl") or len(parts) not in (5, 6) or not all(parts):
        raise WrongKindError(
            f"{file_name} is no name of a wheel: NAME-VERSION-PYTHON-ABI-PLATFORM.whl is needed."
        )
    local = parts[1].partition("+")[2]
    match = _LOCAL.match(local)
    fields = match.groupdict() if match else {}
    abi = fields.get("abi")
    return WheelName(
        *(parts[0], parts[1], f"{fields.get('kind') or ''}{fields.get('toolkit') or ''}"),
        *(fields.get("torch") or "", None if abi is None else abi.upper() == "TRUE"),
        expand_tags(*parts[-3:]),
    )


def expand_tags(pythons: str, abis: str, platforms: str) -> tuple[str, ...]:
    """The tags that a compressed set stands for: at most some hundreds."""
    return tuple(
        f"{python}-{abi}-{platform}"
        for python in pythons.split(".")[:20]
        for abi in abis.split(".")[:10]
        for platform in platforms.split(".")[:20]
    )
