# SPDX-License-Identifier: Apache-2.0
"""Compiles source text to a cubin or to PTX with NVIDIA's run-time compiler, by ctypes.

Knows nothing of kernels or tensors and needs no GPU and no driver. Where a compiler is looked for
is said here as well; what is compiled, and when, is decided by ``cubins``.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from statescan import settings
from statescan.errors import StatescanError

_log = logging.getLogger("statescan.cuda")

FLAGS = ("-std=c++17",)
"""Options of every compilation, beside the architecture; part of the key of caches."""

_OLDEST = 70
_WINDOWS = sys.platform == "win32"
_PATTERN = "nvrtc64_*.dll" if _WINDOWS else "libnvrtc.so*"
_BUILTINS = "nvrtc-builtins64_*.dll" if _WINDOWS else "libnvrtc-builtins.so*"
_PLACES = (
    *("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"),
    *("nvidia/cu13/bin/x86_64", "nvidia/cuda_nvrtc/bin", "torch/lib"),
)
"""Folders beside site-packages: the wheels of CUDA 13, of 11 and 12, and torch's own on Windows."""


class CompileError(StatescanError, RuntimeError):
    """A source text does not compile; the message has the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """Outcome of a compilation: the code, and what the compiler had to say."""

    code: bytes
    log: str


class Nvrtc:
    """One loaded libnvrtc.

    Attributes:
        path: The file it came from.
        version: Its CUDA version, such as (12, 9).
    """

    def __init__(self, path: Path) -> None:
        # NVRTC opens its builtins by bare name, and where it was itself opened by full path it
        # may not find them; a library that is loaded already is found by its name.
        for builtins in sorted(path.parent.glob(_BUILTINS)):
            if ".alt." not in builtins.name:
                ctypes.CDLL(str(builtins))
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def compile(self, text: str, name: str, architecture: str) -> Compiled:
        """Compile one text.

        Args:
            text: CUDA C++ without any include.
            name: What messages call it.
            architecture: ``sm_90`` for a cubin, ``compute_80`` for PTX.

        Raises:
            CompileError: it does not compile.
        """
        program = ctypes.c_void_p()
        create = self._library.nvrtcCreateProgram
        self._check(
            create(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
        )
        try:
            options = [option.encode() for option in (f"--gpu-architecture={architecture}", *FLAGS)]
            array = (ctypes.c_char_p * len(options))(*options)
            result = self._library.nvrtcCompileProgram(program, len(options), array)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            if result:
                raise CompileError(
                    f"{name} does not compile for {architecture} with {self.path} "
                    f"({self._message(result)}):\n{log}"
                )
            kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
            return Compiled(self._bytes(program, kind), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def architecture_for(self, capability: tuple[int, int]) -> str | None:
        """What to compile for a GPU: ``sm_...`` if this compiler knows it, else PTX for an older.

        None where it knows nothing that such a GPU could run.
        """
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        major, minor = capability
        for number in range(10 * major + minor, 10 * major - 1, -1):
            if number in numbers:
                return f"sm_{number}"
        older = [number for number in numbers if _OLDEST <= number < 10 * major]
        return f"compute_{max(older)}" if older else None

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(
            getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what
        )
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), what)
        return buffer.raw[: size.value]

    def _message(self, result: int) -> str:
        return bytes(self._library.nvrtcGetErrorString(result)).decode()

    def _check(self, result: int, what: str = "") -> None:
        if result:
            raise CompileError(f"{self.path}: {self._message(result)} {what}".rstrip() + ".")


@dataclass(frozen=True)
class NvrtcStatus:
    """Outcome of the search: a compiler, or the reason and the original error."""

    compiler: Nvrtc | None
    reason: str = ""
    error: Exception | None = None


@lru_cache(maxsize=1)
def status() -> NvrtcStatus:
    """Look for a compiler once per process; never raises."""
    return first_that_loads(candidates())


def first_that_loads(paths: Iterator[Path]) -> NvrtcStatus:
    """The compiler of the first path that loads; the first error if none does."""
    failed: list[str] = []
    first: Exception | None = None
    for path in paths:
        try:
            return NvrtcStatus(Nvrtc(path))
        # OSError: the loader refused the file. AttributeError: it is no NVRTC that we know.
        except (OSError, AttributeError, CompileError) as error:
            first = first or error
            failed.append(f"{path}: {error}")
    if failed:
        return NvrtcStatus(None, f"NVRTC does not load ({'; '.join(failed[:3])})", first)
    return NvrtcStatus(
        None,
        "there is no NVRTC: neither torch's NVIDIA packages nor CUDA_HOME have one "
        "(pip install nvidia-cuda-nvrtc-cu12)",
    )


def candidates() -> Iterator[Path]:
    """Places of a libnvrtc, the likeliest first; each file that exists comes once."""
    seen: set[Path] = set()
    for path in _all_candidates():
        real = path.resolve()
        if real not in seen and path.is_file() and ".alt." not in path.name:
            seen.add(real)
            yield path


def _all_candidates() -> Iterator[Path]:
    yield from _mapped()
    yield from _from_pathfinder()
    for entry in sys.path:
        for place in _PLACES:
            yield from sorted((Path(entry) / place).glob(_PATTERN))
    found = find_library("nvrtc")
    if found and Path(found).is_absolute():
        yield Path(found)
    home = settings.cuda_home()
    if home is not None:
        for folder in ("lib64", "lib", "bin", "targets/x86_64-linux/lib"):
            yield from sorted((home / folder).glob(_PATTERN))


def _mapped() -> Iterator[Path]:
    """A libnvrtc that this process has loaded already, most likely by torch."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return
    for line in maps.read_text(errors="replace").splitlines():
        name = line.partition("/")[2]
        if "libnvrtc.so" in name:
            yield Path(f"/{name}")


def _from_pathfinder() -> Iterator[Path]:
    """The file that NVIDIA's own finder knows, where that package is installed."""
    if find_spec("cuda") is None or find_spec("cuda.pathfinder") is None:
        return
    pathfinder = import_module("cuda.pathfinder")
    # It raises several classes of its own, and a search must go on with the next place.
    try:
        found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception as error:  # noqa: BLE001
        _log.info("cuda.pathfinder finds no NVRTC: %s", error)
        return
    if found:
        yield Path(found)
