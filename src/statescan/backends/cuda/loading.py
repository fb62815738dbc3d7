# SPDX-License-Identifier: Apache-2.0
"""Loads instances of kernels into a device, once, and keeps what a launch needs of them.

Nothing is launched here, and where code comes from is said in ``cubins``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from statescan.backends import native
from statescan.backends.cuda import cubins, driver, tables
from statescan.backends.cuda.driver import Driver, DriverError, Function
from statescan.backends.cuda.tables.base import Instance, Kernel
from statescan.errors import BackendUnavailableError

_log = logging.getLogger("statescan.cuda")


@dataclass(slots=True)
class Loaded:
    """One instance on one device.

    Attributes:
        target: Where the driver's launch function is, and the driver's handle of the instance.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block unless the call says otherwise.
        shared_allowed: What a launch may ask for without ``allow``.
        pack: Packs the values of the parameter struct.
        call: Takes a packed request and the struct after it to the driver; 0 or its error.
        symbol: Its name in the code.
        index: The device.
        origin: Where its code is from.
    """

    target: tuple[int, int]
    threads: int
    shared_bytes: int
    shared_allowed: int
    pack: Callable[..., bytes]
    call: Callable[[bytes], int]
    symbol: str
    index: int
    origin: str
    raise_limit: Callable[[int], None]
    head: tuple[int, tuple[int, int, int], int, bytes] = (-1, (0, 0, 0), 0, b"")
    """Stream, grid and shared memory of the last launch, and its packed request: the next launch
    of an instance most often has the same, and packing is a third of a launch's cost."""

    def new_head(
        self, stream: int, grid: tuple[int, int, int], shared_bytes: int
    ) -> tuple[int, tuple[int, int, int], int, bytes]:
        """The packed request of a launch; the parameter struct follows in the same bytes."""
        shape = (*grid, self.threads, 1, 1, shared_bytes, 0)
        request = native.LAUNCH_REQUEST.pack(*self.target, stream, 0, *shape)
        # One assignment, so that another thread sees this one or the one before.
        self.head = head = (stream, grid, shared_bytes, request)
        return head

    def allow(self, shared_bytes: int) -> None:
        """Let launches ask for more dynamic shared memory than so far."""
        self.raise_limit(shared_bytes)
        self.shared_allowed = shared_bytes

    def fail(self, result: int, grid: tuple[int, int, int], shared_bytes: int) -> NoReturn:
        """Raise what the driver answered to a launch."""
        raise DriverError(
            result,
            f"{self.symbol} on cuda:{self.index} was not launched: "
            f"{_driver().error_text(result)}.\n"
            f"Grid {grid}, {self.threads} threads, {shared_bytes} bytes of dynamic shared memory; "
            f"code from {self.origin}.\n"
            "It may be an earlier kernel's error: CUDA_LAUNCH_BLOCKING=1 shows whose it is.",
        )


LOADED: dict[tuple[str, str, int | None], Loaded] = {}
"""By stem, suffix and device; launches look here first."""

_lock = threading.RLock()
_codes: dict[tuple[object, ...], tuple[int, str]] = {}
_contexts: dict[int, int] = {}


def load(stem: str, suffix: str, index: int, stream: int) -> Loaded:
    """The instance on a device, loaded if that was not done yet.

    The device's context must be current.

    Raises:
        BackendUnavailableError: it cannot be loaded here, or not during a capture.
    """
    key = (stem, suffix, index)
    with _lock:
        if key not in LOADED:
            current = _driver()
            if current.is_capturing(stream):
                raise BackendUnavailableError(
                    f"{stem} ({suffix}) is not loaded on cuda:{index} yet.\n{driver.CAPTURE_HINT}"
                )
            kernel = tables.kernel(stem)
            LOADED[key] = _load(current, kernel, kernel.by_suffix[suffix], index)
        return LOADED[key]


def load_siblings(stem: str, index: int, stream: int) -> None:
    """Load the other instances of a kernel where one file has them all."""
    current = _driver()
    with _lock:
        if _code_key(current, stem, "", index) in _codes:
            for suffix in tables.kernel(stem).by_suffix:
                load(stem, suffix, index, stream)


class _Thread(threading.local):
    """What is known of one thread.

    Attributes:
        seen: Devices whose context was current when this thread last looked.
        asked_for: While kernels are loaded and not launched, what would have been launched.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.asked_for: set[tuple[str, int]] | None = None


THREAD = _Thread()


@contextmanager
def only_loading() -> Iterator[set[tuple[str, int]]]:
    """In this block and thread, launches load their code and do nothing more.

    Gives the set of (kernel, device) that were asked for.
    """
    asked_for: set[tuple[str, int]] = set()
    # No device counts as seen, so that every launch takes the road on which this is looked at.
    THREAD.seen, THREAD.asked_for = set(), asked_for
    try:
        yield asked_for
    finally:
        THREAD.seen, THREAD.asked_for = set(), None


def first_look(stem: str, suffix: str, index: int, stream: int) -> bool:
    """Make a device's context current; whether the launch is to go on after that."""
    make_context_current(index)
    if THREAD.asked_for is None:
        THREAD.seen.add(index)
        return True
    THREAD.asked_for.add((stem, index))
    load(stem, suffix, index, stream)
    return False


def make_context_current(index: int) -> bool:
    """Give this thread the context that torch uses on a device; whether it had another or none.

    A thread that has only handled tensors may have none in the driver's eyes, although torch
    knows its device.
    """
    current = _driver()
    with _lock:
        context = _contexts.get(index)
        if context is None:
            context = _contexts[index] = current.primary_context(index)
    if current.current_context() == context:
        return False
    current.set_context(context)
    return True


def _driver() -> Driver:
    if driver.forked():
        raise BackendUnavailableError(f"{driver.FORKED}.")
    found = driver.status()
    if found.driver is None:
        raise BackendUnavailableError(
            f"CUDA kernels cannot run here: {found.reason}.\n"
            'Check that `nvidia-smi` works, or use backend="torch".'
        ) from found.error
    return found.driver


def _load(current: Driver, kernel: Kernel, instance: Instance, index: int) -> Loaded:
    symbol = kernel.symbol(instance)
    function, origin = _function(current, kernel, instance, index)
    limit = current.shared_limit(index)
    if instance.shared_bytes > limit:
        raise BackendUnavailableError(
            f"{symbol} needs {instance.shared_bytes} bytes of shared memory, and cuda:{index} "
            f'offers {limit}.\nUse backend="torch" on this device.'
        )
    function.allow_shared(instance.shared_bytes)
    _log.info("loaded %s on cuda:%d from %s", symbol, index, origin)
    return Loaded(
        target=(current.launch_address, function.handle),
        threads=instance.threads,
        shared_bytes=instance.shared_bytes,
        shared_allowed=max(instance.shared_bytes, _FREE_SHARED),
        pack=kernel.packer.pack,
        call=_launcher(current),
        symbol=symbol,
        index=index,
        origin=origin,
        raise_limit=function.allow_shared,
    )


_FREE_SHARED = 48 * 1024
"""Dynamic shared memory that needs no permission."""


def _function(
    current: Driver, kernel: Kernel, instance: Instance, index: int
) -> tuple[Function, str]:
    """The instance from the best code that this device takes."""
    symbol = kernel.symbol(instance)
    whole, alone = (_code_key(current, kernel.stem, part, index) for part in ("", instance.suffix))
    for key in (whole, alone):
        if key in _codes:
            handle, origin = _codes[key]
            return current.function(handle, symbol, index), origin
    reasons: list[str] = []
    capability = current.capability(index)
    for code in cubins.candidates(kernel, instance, capability, reasons):
        try:
            handle = current.load(code.data)
            function = current.function(handle, symbol, index)
        except DriverError as error:
            if error.code not in driver.NO_BINARY:
                raise
            reasons.append(f"{code.origin}: {error}")
            continue
        _tell(kernel.stem, code.origin, reasons)
        _codes[whole if code.whole else alone] = (handle, code.origin)
        return function, code.origin
    raise BackendUnavailableError(
        f"{symbol} cannot be had for cuda:{index}, of compute capability "
        f"{capability[0]}.{capability[1]}:\n"
        + "\n".join(reasons[:3] or ["this package has no code for it"])
        + '\nInstall a newer statescan or nvidia-cuda-nvrtc, or use backend="torch".'
    )


def _code_key(current: Driver, stem: str, suffix: str, index: int) -> tuple[object, ...]:
    """Devices of one capability share loaded code, unless the driver ties it to a context."""
    return stem, suffix, current.capability(index), None if current.has_libraries else index


def _tell(stem: str, origin: str, reasons: list[str]) -> None:
    """Say once a kernel why its code is not from where it should be."""
    if reasons and (stem, *reasons) not in _told:
        _told.add((stem, *reasons))
        _log.warning("%s runs from %s, because %s", stem, origin, "; ".join(reasons))


_told: set[tuple[str, ...]] = set()


def _launcher(current: Driver) -> Callable[[bytes], int]:
    """The C shim where the native library is there, else ctypes, which costs 1 us more."""
    library = native.status().library
    if library is None:
        _log.info("launches go through ctypes: %s", native.status().reason)
        return partial(launch_by_ctypes, current.library.cuLaunchKernel)
    function: Callable[[bytes], int] = library.handle.statescan_launch
    return function


def launch_by_ctypes(launch_kernel: Callable[..., int], request: bytes) -> int:
    """What the C shim does with a request, in Python."""
    size = native.LAUNCH_REQUEST.size
    _, function, stream, _, *shape = native.LAUNCH_REQUEST.unpack_from(request)
    values = (ctypes.c_char * (len(request) - size)).from_buffer_copy(request, size)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(values))
    return launch_kernel(function, *shape[:7], stream, parameters, None)


def forget() -> None:
    """Start anew: in a forked child no handle of the parent means anything."""
    LOADED.clear()
    _codes.clear()
    _contexts.clear()
    THREAD.seen = set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)
