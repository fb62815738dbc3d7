# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that records instead of running, for tests on machines without a GPU.

The stand-in itself is `fake_driver.c`, compiled here; the fixtures put it where the cuda backend
looks, together with a small kernel of its own. What must happen is for the tests to say.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from statescan.backends import native
from statescan.backends.cuda import cache, cubins, driver, launch, loading, nvrtc, source, tables
from statescan.backends.cuda.tables.base import Instance, Kernel

SOURCE = Path(__file__).with_name("fake_driver.c")
COMPILER = shutil.which("gcc") or shutil.which("cc")

KERNEL = Kernel(
    stem="toy",
    fields=(("x", "ptr"), ("count", "i64"), ("out", "ptr")),
    instances=(
        Instance("bf16", "bf16", threads=128),
        Instance("f32", "float", threads=256, min_blocks=2),
        Instance("f32_wide", "float", threads=256, shared_bytes=100_000),
    ),
)
TEXT = """
template <typename T>
__device__ __forceinline__ void toy(const ToyParams& p) {
    i64 place = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (place < p.count) {
        static_cast<T*>(p.out)[place] = from_float<T>(2.0f * to_float(static_cast<T*>(p.x)[place]));
    }
}
"""
ELF = b"\x7fELF stand-in for a cubin"
PTX = b".version 8.0 stand-in for PTX"


class FakeDriver:
    """The stand-in, and torch's idea of where it is: current device and streams."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.fake_calls.restype = ctypes.c_char_p
        self.library.fake_parameters.restype = ctypes.c_void_p
        self.library.fake_capture.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self.device = 0
        self.streams = {0: 0xA0, 1: 0xB0}
        self.library.fake_parameter_bytes(KERNEL.packer.size)

    def calls(self, start: str = "") -> list[str]:
        """What was called so far, those lines that begin like this."""
        lines = self.library.fake_calls().decode().splitlines()
        return [line for line in lines if line.startswith(start)]

    def parameters(self) -> tuple[int, ...]:
        """The struct of the last launch, unpacked."""
        data = ctypes.string_at(self.library.fake_parameters(), KERNEL.packer.size)
        return KERNEL.packer.unpack(data)

    def fail(self, call: str, code: int, times: int = -1) -> None:
        """Let the next calls of a driver function fail; all of them by default."""
        self.library.fake_fail(call.encode(), code, times)

    def capture(self, stream: int, blocks_null: bool = False) -> None:
        """Say that a graph is being captured from a stream; 0 for none."""
        self.library.fake_capture(stream, blocks_null)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Stands for ``torch.cuda.device``."""
        before = self.device
        self.device = before if device.index is None else device.index
        # The runtime makes the context of the device current when torch changes to it.
        ctypes.CDLL(str(self.path)).cuCtxSetCurrent(ctypes.c_void_p(0x1000 + self.device))
        try:
            yield
        finally:
            self.device = before
            ctypes.CDLL(str(self.path)).cuCtxSetCurrent(ctypes.c_void_p(0x1000 + before))


class FakeCompiler:
    """Stands for NVRTC: gives code by architecture and remembers what it compiled."""

    path = Path("libnvrtc-of-the-test.so")
    version = (12, 9)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []
        self.knows = (80, 90, 100)
        self.error: str = ""

    def architecture_for(self, capability: tuple[int, int]) -> str | None:
        number = 10 * capability[0] + capability[1]
        older = [known for known in self.knows if known <= number]
        if not older:
            return None
        return f"{'sm' if number in self.knows else 'compute'}_{max(older)}"

    def compile(self, text: str, name: str, architecture: str) -> nvrtc.Compiled:
        if self.error:
            raise nvrtc.CompileError(self.error)
        self.compiled.append((name, architecture))
        return nvrtc.Compiled(ELF if architecture.startswith("sm_") else PTX, "")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory) -> Path:
    """The compiled stand-in."""
    if COMPILER is None:
        pytest.skip("the stand-in driver needs gcc or cc")
    path = tmp_path_factory.mktemp("driver") / "libstandin.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, SOURCE]
    subprocess.run([str(part) for part in command], check=True, timeout=60)
    return path


@pytest.fixture
def compiler(monkeypatch) -> FakeCompiler:
    """A compiler in NVRTC's place."""
    found = FakeCompiler()
    monkeypatch.setattr(nvrtc, "status", lambda: nvrtc.NvrtcStatus(found))
    return found


@pytest.fixture
def toy(monkeypatch, tmp_path) -> Kernel:
    """A small kernel as the only one, with its sources and an empty store of cubins."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for shared in ("ptx.cuh", "common.cuh"):
        shutil.copy(source.FOLDER / shared, folder)
    (folder / "toy.cu").write_text(TEXT)
    monkeypatch.setattr(source, "FOLDER", folder)
    monkeypatch.setattr(cubins, "FOLDER", folder / "cubins")
    monkeypatch.setattr(tables, "kernel", {"toy": KERNEL}.__getitem__)
    monkeypatch.setattr(tables, "stems", lambda: ("toy",))
    monkeypatch.setenv("STATESCAN_CACHE_DIR", str(tmp_path / "cache"))
    clear()
    yield KERNEL
    clear()


@pytest.fixture
def gpu(monkeypatch, tmp_path, stand_in, toy, compiler) -> FakeDriver:
    """Two GPUs of compute capability 9.0, seen by torch and by the driver; nothing is loaded."""
    # A file of its own, so that nothing of another test is left in its variables.
    fake = FakeDriver(Path(shutil.copy(stand_in, tmp_path / "libstandin.so")))
    monkeypatch.setattr(driver, "_NAME", str(fake.path))
    monkeypatch.setattr(launch, "current_device", lambda: fake.device)
    monkeypatch.setattr(launch, "current_stream", lambda index: fake.streams[index])
    monkeypatch.setattr(torch.cuda, "device", fake.on)
    return fake


def clear() -> None:
    """Forget what the process knows of drivers and code, as a new process would."""
    loading.forget()
    loading._told.clear()
    cache._told.clear()
    driver._initialised_by.clear()
    for cached in (driver.status, driver.is_installed, source.unit_hash, cubins.manifest):
        cached.cache_clear()


def ship(architecture: str, data: bytes = ELF, **changes: Any) -> Path:
    """Put a cubin of the toy into the store, with a manifest that ``changes`` may spoil."""
    folder = cubins.FOLDER / architecture
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "file": "toy.cubin",
        "source": source.unit_hash(KERNEL),
        "sha256": sha256(data).hexdigest(),
        **changes,
    }
    (folder / "toy.cubin").write_bytes(data)
    manifest = {"schema": cubins.SCHEMA, "kernels": {"toy": record}}
    (folder / cubins.MANIFEST).write_text(json.dumps(manifest))
    cubins.manifest.cache_clear()
    return folder / "toy.cubin"


def without_shim(monkeypatch) -> None:
    """As on a machine where the native library is missing."""
    monkeypatch.setattr(native, "status", lambda: native.NativeStatus(None, "taken away"))
