# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels by stem: every module of this folder that has a ``KERNEL``.

Data only: no torch, no driver, so that a build machine needs neither.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path

from statescan.backends.cuda.tables.base import Kernel

_NO_TABLE = frozenset(("__init__", "base"))


@lru_cache(maxsize=64)
def kernel(stem: str) -> Kernel:
    """The kernel of that name, without loading the tables of the others.

    Raises:
        KeyError: there is none.
    """
    if stem not in stems():
        raise KeyError(f"{stem!r} is no CUDA kernel; there are {', '.join(stems())}")
    found: Kernel = import_module(f"{__name__}.{stem}").KERNEL
    if found.stem != stem:
        raise KeyError(f"tables/{stem}.py describes {found.stem!r}, not {stem!r}")
    return found


@lru_cache(maxsize=1)
def stems() -> tuple[str, ...]:
    """Names of all kernels."""
    found = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return tuple(sorted(stem for stem in found if stem not in _NO_TABLE and stem[0] != "_"))


def __getattr__(name: str) -> dict[str, Kernel]:
    if name == "TABLE":
        return {stem: kernel(stem) for stem in stems()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
