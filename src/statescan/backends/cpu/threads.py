# SPDX-License-Identifier: Apache-2.0
"""Borrows the threads that torch computes with: its own parallel-for, or its OpenMP runtime.

The library never makes threads, so ``torch.set_num_threads`` holds for it too and no second pool
competes for the cores. After a fork the child runs serially: torch's pool does not survive one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path

import torch

from statescan.backends import native

SERIAL, TORCH, OPENMP = 0, 1, 2
"""The values of ``enum statescan_pool``."""

_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class SerialAfterForkWarning(UserWarning):
    """The kernels use one thread, since this process is a fork of one that had used more.

    It speaks of statescan's kernels only: torch's own operations on large tensors may hang there.
    """


class _State:
    """What this process knows of its pool."""

    kind: int | None = None
    forked = False
    used = False


def find_pool() -> tuple[int, int, str]:
    """Kind of pool, address of its function, and what it is in words."""
    for library in _torch_libraries():
        function = getattr(library, "torch_parallel_for", None)
        if function is not None:
            return TORCH, _address(function), "torch_parallel_for"
    for path in _openmp_runtimes():
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            # An OpenMP runtime without the GNU entry point; another one may have it.
            continue
        return OPENMP, _address(function), f"GOMP_parallel of {Path(path).name}"
    return SERIAL, 0, "no pool of torch's was found: one thread"


def workers() -> int:
    """How many threads a kernel may use now; sets the pool up on first use."""
    if _State.kind is None:
        kind, function, _ = find_pool()
        native.require().handle.statescan_set_pool(kind, function)
        _State.kind = kind
    if _State.kind == SERIAL:
        return 1
    if _State.forked:
        _go_serial()
        return 1
    count = torch.get_num_threads()
    _State.used = _State.used or count > 1
    return count


def _go_serial() -> None:
    native.require().handle.statescan_set_pool(SERIAL, 0)
    _State.kind = SERIAL
    warnings.warn(
        "statescan: this process was forked from one that had run threads, and torch's thread pool "
        "does not survive that: its kernels use one thread here. Start processes with 'spawn' or "
        "'forkserver' to use all.",
        SerialAfterForkWarning,
        stacklevel=3,
    )


def _after_fork() -> None:
    _State.forked = _State.kind is not None and _State.kind != SERIAL


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _torch_libraries() -> list[ctypes.CDLL]:
    folder = Path(torch.__file__).parent / "lib"
    names = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
    path = folder / names.get(sys.platform, "libtorch_cpu.so")
    try:
        return [ctypes.CDLL(str(path))] if path.is_file() else []
    except OSError:
        return []


def _openmp_runtimes() -> list[str]:
    """OpenMP runtimes that torch has already mapped; only Linux tells."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(p for p in paths if Path(p).name.startswith(_RUNTIMES))


def _address(function: object) -> int:
    value = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    return value or 0
