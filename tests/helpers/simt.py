# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA kernels on the CPU, through ``simt.h``: compiled by the host's C++ compiler.

``Simulator`` stands in for ``backends.cuda.launch.launch``, so the launchers of the cuda backend
work on CPU tensors as they do on a GPU's. What a kernel computes is judged; its speed is not.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from statescan.backends.base import YES
from statescan.backends.cuda import CudaBackend, selective_scan, selective_scan_bwd, source, tables
from statescan.backends.cuda.tables.base import Instance, Kernel, packer
from statescan.ops import _plans

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-w",
)
LIMITS = (2**31 - 1, 65535, 65535)
PROCESSORS = 132
LAUNCHERS = (
    *("causal_conv1d", "causal_conv1d_update", "selective_scan", "selective_scan_bwd"),
    *("selective_state_update", "sequences"),
)
"""The modules of the cuda backend that launch."""
_DYNAMIC = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")


class Simulator:
    """A GPU of one architecture that runs on the CPU.

    Args:
        folder: Where compiled kernels are kept.
        architecture: As ``__CUDA_ARCH__`` says it, 900 for 9.0.
    """

    def __init__(self, folder: Path, architecture: int = 900) -> None:
        self.folder = folder
        self.architecture = architecture
        self.calls: list[tuple[str, str, tuple[int, int, int]]] = []
        self._loaded: dict[tuple[str, str], ctypes.CDLL] = {}

    def __call__(
        self,
        stem: str,
        suffix: str,
        device: torch.device,
        grid: tuple[int, int, int],
        values: Sequence[int],
        shared_bytes: int | None = None,
        rest: bytes = b"",
    ) -> None:
        """Run an instance as ``launch`` would; what a GPU would do wrong fails here."""
        kernel = tables.kernel(stem)
        instance = kernel.by_suffix[suffix]
        assert all(1 <= size <= most for size, most in zip(grid, LIMITS, strict=True)), grid
        shared = instance.shared_bytes if shared_bytes is None else shared_bytes
        run = self._function(kernel, instance)
        struct = packer(len(values)).pack(*values) + rest
        assert len(struct) == kernel.packer.size
        # Another order of threads and blocks each time, the same in every run of a test.
        problem = run(struct, *grid, instance.threads, shared, len(self.calls))
        self.calls.append((stem, suffix, grid))
        assert problem is None, f"{kernel.symbol(instance)}, grid {grid}: {problem.decode()}"

    def _function(self, kernel: Kernel, instance: Instance) -> ctypes._FuncPointer:
        key = (kernel.stem, instance.suffix)
        if key not in self._loaded:
            self._loaded[key] = ctypes.CDLL(str(self._compiled(kernel, instance)))
        run = self._loaded[key].run
        run.restype = ctypes.c_char_p
        run.argtypes = [ctypes.c_char_p, *[ctypes.c_uint] * 4, ctypes.c_size_t, ctypes.c_uint]
        return run

    def _compiled(self, kernel: Kernel, instance: Instance) -> Path:
        text = host_text(kernel, instance)
        target = self.folder / f"{kernel.symbol(instance)}_{source.text_hash(text)}.so"
        if not target.exists():
            assert COMPILER is not None, "a C++ compiler is needed: apt-get install g++"
            # Processes share the folder; none may load what another has not finished.
            made = target.with_suffix(f".{os.getpid()}.so")
            written = made.with_suffix(".cpp")
            written.write_text(text)
            subprocess.run(
                (COMPILER, *FLAGS, f"-D__CUDA_ARCH__={self.architecture}", f"-I{HERE}")
                + ("-o", str(made), str(written)),
                check=True,
            )
            made.replace(target)
        return target


def host_text(kernel: Kernel, instance: Instance) -> str:
    """A kernel's text as C++ for the host, with one function that runs a grid of an instance."""
    text = source.unit(kernel, [instance])
    instructions = source._read("ptx.cuh")
    assert text.startswith(instructions)
    text = text.removeprefix(instructions)
    text = _DYNAMIC.sub(r"\1 *const \2 = reinterpret_cast<\1 *>(simt::shared_memory);", text)
    struct = kernel.struct_name
    return "\n".join(
        (
            '#include "simt.h"',
            '#include "simt_ptx.h"',
            text,
            f"static {struct} given;",
            f"static void body() {{ {kernel.symbol(instance)}(given); }}",
            'extern "C" const char *run(const void *values, unsigned x, unsigned y, unsigned z,',
            "                           unsigned threads, std::size_t shared, unsigned seed) {",
            "    std::memcpy(&given, values, sizeof given);",
            "    return simt::run_grid(body, {x, y, z}, threads, shared, seed);",
            "}",
            "",
        )
    )


@pytest.fixture(scope="session")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    """One for all tests: each instance is compiled once."""
    kept = os.environ.get("STATESCAN_SIMT_DIR")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("simt")
    folder.mkdir(parents=True, exist_ok=True)
    return Simulator(folder)


@pytest.fixture
def simulated(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """``backend="cuda"`` takes CPU tensors, and its launches run here."""
    supports = CudaBackend.supports
    monkeypatch.setattr(CudaBackend, "availability", lambda self: YES)
    monkeypatch.setattr(
        CudaBackend,
        "supports",
        lambda self, request: supports(self, replace(request, device="cuda")),
    )
    for name in LAUNCHERS:
        module = import_module(f"statescan.backends.cuda.{name}")
        monkeypatch.setattr(module, "launch", simulator)
    monkeypatch.setattr(selective_scan, "_processors", lambda device: PROCESSORS)
    monkeypatch.setattr(selective_scan_bwd, "_device", lambda device: (PROCESSORS, True))
    _plans._plans.forget()
    simulator.calls.clear()
    yield simulator
    _plans._plans.forget()
