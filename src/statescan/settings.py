# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of statescan is read here, at the moment of use, and nowhere else.

No defaults of ops or models live here: only what a user sets outside Python.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Variable(NamedTuple):
    """One environment variable: its name, its values and what it does."""

    name: str
    values: str
    effect: str


VARIABLES = (
    Variable(
        "STATESCAN_BACKEND",
        "auto | cuda | cpu | torch | reference",
        "Forces one backend for every op of the process; a call that it cannot run raises.",
    ),
    Variable(
        "STATESCAN_CACHE_DIR",
        "a folder",
        "Where CUDA kernels are kept that had to be compiled on this machine. "
        "Default: statescan in the user's cache folder.",
    ),
    Variable(
        "STATESCAN_COMPAT",
        "0 | 1",
        "From the start of Python on, mamba_ssm and causal_conv1d are served by statescan, as by "
        "`statescan.compat.install()`. Read by the installed package only, not in a checkout.",
    ),
    Variable(
        "STATESCAN_REQUIRE_NATIVE",
        "0 | 1",
        "While building: a failing C compiler fails the build instead of giving a pure wheel.",
    ),
    Variable(
        "STATESCAN_PURE",
        "0 | 1",
        "While building: leave the C library out. While running: do not load it.",
    ),
)

_BACKEND_KEY = os.environ.encodekey("STATESCAN_BACKEND")
_FALSE = frozenset(("", "0", "false", "off", "no"))


def backend() -> str:
    """Value of STATESCAN_BACKEND in lower case, ``auto`` when unset or empty."""
    # Every decode step asks. A look into os.environ's own table takes 0.1 us, its get 1.2.
    if _BACKEND_KEY is not None and _BACKEND_KEY not in getattr(
        os.environ, "_data", (_BACKEND_KEY,)
    ):
        return "auto"
    return os.environ.get("STATESCAN_BACKEND", "").strip().lower() or "auto"


def cache_dir() -> Path:
    """Folder for files kept between runs; it is not created here."""
    chosen = os.environ.get("STATESCAN_CACHE_DIR", "").strip()
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "statescan"


def cuda_home() -> Path | None:
    """Folder of an installed CUDA toolkit, as CUDA_HOME or CUDA_PATH tells; most have none."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        value = os.environ.get(name, "").strip()
        if value:
            return Path(value)
    return None


def pure() -> bool:
    """True when STATESCAN_PURE asks to leave the native library alone."""
    return os.environ.get("STATESCAN_PURE", "").strip().lower() not in _FALSE


def no_color() -> bool:
    """True when NO_COLOR (https://no-color.org) or a dumb terminal asks for plain text."""
    return "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
