# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the C library of statescan, and keeps the reason when there is none.

Only the library as a whole: which kernel runs a call is decided by the backends that use it.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import statescan
from statescan import settings
from statescan.errors import BackendUnavailableError

ABI_VERSION = 2
"""STATESCAN_ABI_VERSION of ``kernels/cpu/abi.h`` that this module was written for."""

ISA_NAMES = {0: "baseline", 1: "avx2", 2: "avx512", 3: "neon"}
"""The values of ``enum statescan_isa``."""


class LaunchRequest(ctypes.Structure):
    """``struct statescan_launch_request``: one kernel launch; see ``kernels/cpu/abi.h``."""

    _fields_ = (
        ("launch", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("grid_z", ctypes.c_uint32),
        ("block_x", ctypes.c_uint32),
        ("block_y", ctypes.c_uint32),
        ("block_z", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class LayoutRow(ctypes.Structure):
    """``struct statescan_layout_row``: name, offset and size of one field of one struct."""

    _fields_ = (
        ("structure", ctypes.c_char_p),
        ("field", ctypes.c_char_p),
        ("offset", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
    )


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "statescan_launch_request": LaunchRequest,
    "statescan_layout_row": LayoutRow,
}
"""The structs that cross the border, by their names in C."""

KERNELS = (
    *("selective_scan_fwd", "selective_scan_bwd"),
    *("causal_conv1d_fwd", "causal_conv1d_bwd"),
    *("selective_state_update", "causal_conv1d_update", "vector_linear", "mamba_step"),
    "mamba_stack",
)
"""The exported CPU kernels; each takes one packed parameter struct."""

LAUNCH_REQUEST = struct.Struct("@4P8I")
"""Packs a :class:`LaunchRequest` in one call, its fields in order; ``params`` 0 means that the
kernel's parameter struct follows in the same bytes."""


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded C library.

    Attributes:
        path: The file it came from.
        handle: Its functions, with argument types set.
        isa: Vector level of this processor, one of :data:`ISA_NAMES`' values.
    """

    path: Path
    handle: ctypes.CDLL
    isa: str


@dataclass(frozen=True)
class NativeStatus:
    """Outcome of the search: a library, or the reason and the original error."""

    library: NativeLibrary | None
    reason: str = ""
    error: Exception | None = None


def file_name() -> str:
    """Name of the library's file on this platform."""
    suffix = {"win32": "dll", "cygwin": "dll", "darwin": "dylib"}.get(sys.platform, "so")
    return f"_cpu.{suffix}"


@lru_cache(maxsize=1)
def status() -> NativeStatus:
    """Look for the library once per process; never raises."""
    if settings.pure():
        return NativeStatus(None, "STATESCAN_PURE is set")
    # An editable install has two entries here: the checkout and the folder of built files.
    return find(Path(entry) for entry in statescan.__path__)


def require() -> NativeLibrary:
    """The library.

    Raises:
        BackendUnavailableError: when it is absent or does not load; the first error is its cause.
    """
    found = status()
    if found.library is None:
        raise BackendUnavailableError(
            f"the native library of statescan is not usable: {found.reason}.\n"
            "hint: reinstall where a C compiler is on PATH, with STATESCAN_REQUIRE_NATIVE=1 to see "
            'why the build fails, or use backend="torch".'
        ) from found.error
    return found.library


def vector_bytes() -> int:
    """Bytes of one vector of the kernels in use."""
    return int(require().handle.statescan_vector_bytes())


def find(folders: Iterable[Path]) -> NativeStatus:
    """Load the library from the first of ``folders`` that has it."""
    tried = []
    for folder in folders:
        path = folder / file_name()
        if path.is_file():
            return _load(path)
        tried.append(str(folder))
    return NativeStatus(
        None, f"{file_name()} was not built with this install (looked in {', '.join(tried)})"
    )


def layout(handle: ctypes.CDLL) -> dict[tuple[str, str], tuple[int, int]]:
    """The C side's (offset, size) by (struct, field); field ``""`` is the whole struct."""
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    row_number = 0
    table = handle.statescan_layout()
    while (row := table[row_number]).structure is not None:
        rows[row.structure.decode(), row.field.decode()] = (row.offset, row.size)
        row_number += 1
    return rows


def _load(path: Path) -> NativeStatus:
    try:
        handle = ctypes.CDLL(str(path))
        version = handle.statescan_abi_version()
        if version != ABI_VERSION:
            return NativeStatus(
                None,
                f"{path} has ABI version {version} and this package needs {ABI_VERSION}: "
                "it is left over from another build",
            )
        _declare(handle)
        level = handle.statescan_isa_level()
    # OSError: the loader refused the file. AttributeError: it loads but lacks a function.
    except (OSError, AttributeError) as error:
        return NativeStatus(None, f"{path} does not load: {error}", error)
    return NativeStatus(NativeLibrary(path, handle, ISA_NAMES.get(level, "baseline")))


def _declare(handle: ctypes.CDLL) -> None:
    handle.statescan_isa_level.argtypes = ()
    handle.statescan_isa_level.restype = ctypes.c_int
    # A request is passed as packed bytes: building a Structure object costs more than the call.
    handle.statescan_launch.argtypes = (ctypes.c_char_p,)
    handle.statescan_launch.restype = ctypes.c_int
    for kernel in KERNELS:
        function = getattr(handle, f"statescan_{kernel}")
        # Decode kernels get the addresses of their tensors as a second list.
        function.argtypes = (ctypes.c_char_p,) * (1 if kernel.endswith(("_fwd", "_bwd")) else 2)
        function.restype = None
    handle.statescan_set_pool.argtypes = (ctypes.c_int, ctypes.c_void_p)
    handle.statescan_set_pool.restype = None
    handle.statescan_use_isa.argtypes = (ctypes.c_int,)
    handle.statescan_use_isa.restype = ctypes.c_int
    handle.statescan_vector_bytes.argtypes = ()
    handle.statescan_vector_bytes.restype = ctypes.c_int
    handle.statescan_layout.argtypes = ()
    handle.statescan_layout.restype = ctypes.POINTER(LayoutRow)
