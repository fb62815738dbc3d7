# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver by ctypes: devices, contexts, loading of code, and the address that launches.

Handles are plain integers. Nothing here knows of tensors or of which kernels there are, and there
is no other ctypes for the driver.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from statescan.errors import StatescanError

_NAME = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_LIBRARIES_SINCE = 12000
"""Driver version that knows code without a context (CUlibrary); before it, modules do."""

_MAJOR, _MINOR, _SHARED_OPT_IN = 75, 76, 97
_MAX_DYNAMIC_SHARED = 8
_DEFAULT_SHARED_LIMIT = 48 * 1024

NO_BINARY = frozenset((200, 209, 218, 222, 223, 801))
"""Errors that say "not this code on this device": another form of it may still run."""

_CAPTURE = range(900, 908)
_Pointer = ctypes.c_void_p


class DriverError(StatescanError, RuntimeError):
    """The CUDA driver refused a call.

    Attributes:
        code: The driver's number of the error.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Function:
    """A kernel on one device.

    Attributes:
        handle: What ``cuLaunchKernel`` takes.
        allow_shared: Raises the dynamic shared memory that a launch may ask for.
    """

    handle: int
    allow_shared: Callable[[int], None]


class Driver:
    """The loaded driver library.

    Attributes:
        version: Such as 12080.
        launch_address: Where ``cuLaunchKernel`` is.
        has_libraries: Whether code is loaded once for all devices.
    """

    def __init__(self, path: str | None = None) -> None:
        # The driver has its own opinion on which of its files to load, and torch has asked already.
        self.library = (
            ctypes.WinDLL(path or _NAME)  # type: ignore[attr-defined,unused-ignore]
            if sys.platform == "win32"
            else ctypes.CDLL(path or _NAME)
        )
        self._declare()
        self.check("cuInit", self.library.cuInit(0))
        self.version = self._integer("cuDriverGetVersion")
        self.has_libraries = self.version >= _LIBRARIES_SINCE and hasattr(
            self.library, "cuLibraryLoadData"
        )
        self.launch_address = ctypes.cast(self.library.cuLaunchKernel, _Pointer).value or 0

    def capability(self, index: int) -> tuple[int, int]:
        """Compute capability of a device, such as (9, 0)."""
        return self._attribute(_MAJOR, index), self._attribute(_MINOR, index)

    def shared_limit(self, index: int) -> int:
        """Most dynamic shared memory of a block on a device, in bytes."""
        return self._attribute(_SHARED_OPT_IN, index)

    def primary_context(self, index: int) -> int:
        """The context that torch uses on a device; kept alive until the process ends."""
        context = _Pointer()
        retain = self.library.cuDevicePrimaryCtxRetain
        self.check(
            "cuDevicePrimaryCtxRetain", retain(ctypes.byref(context), self._device(index)), index
        )
        return int(context.value or 0)

    def current_context(self) -> int:
        """The context of this thread, 0 if it has none."""
        context = _Pointer()
        self.check("cuCtxGetCurrent", self.library.cuCtxGetCurrent(ctypes.byref(context)))
        return int(context.value or 0)

    def set_context(self, context: int) -> None:
        """Make a context this thread's."""
        self.check("cuCtxSetCurrent", self.library.cuCtxSetCurrent(context))

    def is_capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being recorded from a stream."""
        answer = ctypes.c_int()
        result = self.library.cuStreamIsCapturing(stream, ctypes.byref(answer))
        # The legacy stream cannot even be asked while another one is recorded.
        if result in _CAPTURE:
            return True
        self.check("cuStreamIsCapturing", result)
        return bool(answer.value)

    def load(self, code: bytes) -> int:
        """Load a cubin or PTX text; in drivers before 12.0 for the current context only."""
        loaded = _Pointer()
        # PTX is text and must end; a cubin knows its own length.
        data = code + b"\0"
        if self.has_libraries:
            options = (None, None, 0, None, None, 0)
            result = self.library.cuLibraryLoadData(ctypes.byref(loaded), data, *options)
            self.check("cuLibraryLoadData", result)
        else:
            result = self.library.cuModuleLoadData(ctypes.byref(loaded), data)
            self.check("cuModuleLoadData", result)
        return int(loaded.value or 0)

    def function(self, loaded: int, symbol: str, index: int) -> Function:
        """A kernel of loaded code, ready to be launched in the current context of device ``index``.

        It is really loaded here: CUDA's lazy loading would else do so at the first launch, which
        may be inside of a capture.
        """
        function, name = _Pointer(), symbol.encode()
        if not self.has_libraries:
            result = self.library.cuModuleGetFunction(ctypes.byref(function), loaded, name)
            self.check("cuModuleGetFunction", result)
            handle = int(function.value or 0)
            return Function(handle, lambda size: self._allow_function(handle, size))
        kernel = _Pointer()
        result = self.library.cuLibraryGetKernel(ctypes.byref(kernel), loaded, name)
        self.check("cuLibraryGetKernel", result)
        result = self.library.cuKernelGetFunction(ctypes.byref(function), kernel)
        self.check("cuKernelGetFunction", result)
        kernel_handle, device = int(kernel.value or 0), self._device(index)
        return Function(
            int(function.value or 0), lambda size: self._allow_kernel(kernel_handle, size, device)
        )

    def check(self, call: str, result: int, index: int | None = None) -> None:
        """Raise what a driver call answered, unless it was success."""
        if result == 0:
            return
        device = "" if index is None else f" on cuda:{index}"
        text = f"{call}{device} failed: {self.error_text(result)}."
        if result in _CAPTURE:
            text += f"\n{CAPTURE_HINT}"
        raise DriverError(result, text)

    def error_text(self, result: int) -> str:
        """The driver's name and description of an error."""
        parts = []
        for call in (self.library.cuGetErrorName, self.library.cuGetErrorString):
            text = ctypes.c_char_p()
            if call(result, ctypes.byref(text)) == 0 and text.value:
                parts.append(text.value.decode(errors="replace"))
        return " ".join((*parts, f"({result})")) if parts else f"error {result}"

    def _allow_kernel(self, kernel: int, size: int, device: int) -> None:
        if size > _DEFAULT_SHARED_LIMIT:
            set_attribute = self.library.cuKernelSetAttribute
            result = set_attribute(_MAX_DYNAMIC_SHARED, size, kernel, device)
            self.check("cuKernelSetAttribute", result)

    def _allow_function(self, function: int, size: int) -> None:
        if size > _DEFAULT_SHARED_LIMIT:
            result = self.library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, size)
            self.check("cuFuncSetAttribute", result)

    def _device(self, index: int) -> int:
        return self._integer("cuDeviceGet", index)

    def _attribute(self, attribute: int, index: int) -> int:
        return self._integer("cuDeviceGetAttribute", attribute, self._device(index))

    def _integer(self, call: str, *args: int) -> int:
        answer = ctypes.c_int()
        self.check(call, getattr(self.library, call)(ctypes.byref(answer), *args))
        return answer.value

    def _declare(self) -> None:
        """Argument types, without which ctypes would cut handles to 32 bits."""
        integer, unsigned, text = ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
        out = ctypes.POINTER(_Pointer)
        out_integer = ctypes.POINTER(integer)
        for name, types in {
            "cuInit": (unsigned,),
            "cuDriverGetVersion": (out_integer,),
            "cuGetErrorName": (integer, ctypes.POINTER(text)),
            "cuGetErrorString": (integer, ctypes.POINTER(text)),
            "cuDeviceGet": (out_integer, integer),
            "cuDeviceGetAttribute": (out_integer, integer, integer),
            "cuDevicePrimaryCtxRetain": (out, integer),
            "cuCtxGetCurrent": (out,),
            "cuCtxSetCurrent": (_Pointer,),
            "cuStreamIsCapturing": (_Pointer, out_integer),
            "cuModuleLoadData": (out, text),
            "cuModuleGetFunction": (out, _Pointer, text),
            "cuFuncSetAttribute": (_Pointer, integer, integer),
            "cuLaunchKernel": (_Pointer, *[unsigned] * 7, _Pointer, _Pointer, _Pointer),
        }.items():
            self._signature(name, types)
        # Of CUDA 12, so absent in older drivers.
        for name, types in {
            "cuLibraryLoadData": (out, text, *[_Pointer] * 2, unsigned, *[_Pointer] * 2, unsigned),
            "cuLibraryGetKernel": (out, _Pointer, text),
            "cuKernelGetFunction": (out, _Pointer),
            "cuKernelSetAttribute": (integer, integer, _Pointer, integer),
        }.items():
            if hasattr(self.library, name):
                self._signature(name, types)

    def _signature(self, name: str, types: tuple[Any, ...]) -> None:
        function = getattr(self.library, name)
        function.argtypes, function.restype = types, ctypes.c_int


CAPTURE_HINT = (
    "A CUDA graph is being captured, and code cannot be loaded meanwhile.\n"
    "Call statescan.prepare(op, *tensors, device=...) or run the op once before the capture."
)


@dataclass(frozen=True)
class DriverStatus:
    """Outcome of the search: a driver, or the reason and the original error."""

    driver: Driver | None
    reason: str = ""
    error: Exception | None = None


@lru_cache(maxsize=1)
def status() -> DriverStatus:
    """Load and initialise the driver once per process; never raises.

    Only for a process that has CUDA tensors: CUDA does not survive a fork, so who merely asks
    what there is must not initialise it.
    """
    try:
        driver = Driver()
    # OSError: there is no such library. AttributeError: it lacks a function.
    except (OSError, AttributeError, DriverError) as error:
        return DriverStatus(None, f"the NVIDIA driver is not usable ({error})", error)
    _initialised_by.append(os.getpid())
    return DriverStatus(driver)


@lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether there is a driver library, without initialising it."""
    try:
        ctypes.CDLL(_NAME)
    except OSError:
        return False
    return True


_initialised_by: list[int] = []
"""The process that initialised the driver; a child that was forked off inherits the entry."""


def forked() -> bool:
    """Whether the driver was initialised in a parent of this process, and so is dead here."""
    return bool(_initialised_by) and _initialised_by[0] != os.getpid()


FORKED = (
    "this process was forked from one that uses CUDA, and CUDA does not work after a fork; "
    'start processes with multiprocessing.set_start_method("spawn")'
)
