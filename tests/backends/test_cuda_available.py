# SPDX-License-Identifier: Apache-2.0
"""When the cuda backend says that it can run, why not otherwise, and what asking costs nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from helpers.fake_driver import ship

from statescan.backends.base import OpRequest, Support
from statescan.backends.cuda import CudaBackend, driver, nvrtc
from statescan.backends.cuda import _code_for as code_for
from statescan.backends.cuda import _machine as machine
from statescan.backends.cuda.launch import launch
from statescan.errors import BackendUnavailableError


@pytest.fixture
def backend():
    """A backend that has found out nothing yet."""
    machine.cache_clear()
    code_for.cache_clear()
    yield CudaBackend()
    machine.cache_clear()
    code_for.cache_clear()


@pytest.fixture
def cuda_torch(monkeypatch):
    """A torch with CUDA that sees two GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))


def test_torch_without_cuda_is_a_limit(backend, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    answer = backend.availability()
    assert answer == Support(False, "this torch is built without CUDA", limit=True)


def test_no_driver_is_a_limit(backend, cuda_torch, monkeypatch):
    driver.is_installed.cache_clear()
    monkeypatch.setattr(driver, "_NAME", "libcuda-that-is-nowhere.so.1")
    answer = backend.availability()
    driver.is_installed.cache_clear()
    assert answer == Support(False, "there is no NVIDIA driver on this machine", limit=True)


def test_no_visible_gpu_is_a_limit(backend, cuda_torch, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    answer = backend.availability()
    assert answer == Support(False, "torch sees no CUDA device", limit=True)


def test_asking_initialises_nothing(backend, cuda_torch, gpu):
    assert backend.availability().ok
    assert gpu.library.cuDriverGetVersion is not None
    assert not driver.forked()
    assert driver._initialised_by == [], "cuInit before a fork would take CUDA from the children"
    assert gpu.calls() == []


def request(device="cuda", flags=(), **dtypes):
    return OpRequest("selective_scan", device, dtypes or {"x": "bfloat16"}, {}, frozenset(flags))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request("cpu"), "these are on cpu"),
        (request("xpu"), "these are on xpu"),
        (request(flags=("complex",)), "no complex states"),
        (request(x="float32", A="float64"), "A is float64"),
        (
            OpRequest("selective_state_update", "cuda", {"x": "float32"}, {"dstate": 1025}),
            "takes dstate up to 1024",
        ),
    ],
)
def test_documented_limits_are_refused_with_the_reason(backend, cuda_torch, gpu, asked, reason):
    answer = backend.supports(asked)
    assert not answer.ok
    assert reason in answer.reason
    assert answer.limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_three_dtypes_are_taken(backend, cuda_torch, gpu, dtype):
    assert backend.supports(request(x=dtype, A="float32")).ok


def test_an_op_of_another_version_is_refused(backend, cuda_torch, gpu):
    answer = backend.supports(OpRequest("unheard_of", "cuda"))
    assert (answer.ok, answer.reason) == (False, "it does not offer unheard_of")


def test_a_gpu_that_is_too_old_is_a_limit(backend, cuda_torch, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    answer = backend.supports(request())
    assert "need compute capability 7.0, this GPU has 6.1" in answer.reason
    assert answer.limit


def test_neither_cubins_nor_a_compiler_is_a_fault_and_not_a_limit(
    backend, cuda_torch, gpu, monkeypatch
):
    monkeypatch.setattr(nvrtc, "status", lambda: nvrtc.NvrtcStatus(None, "no NVRTC"))
    answer = backend.supports(request())
    assert "no kernels for compute capability 9.0" in answer.reason
    assert "no NVRTC" in answer.reason
    assert not answer.limit
    code_for.cache_clear()
    ship("sm_90")
    assert backend.supports(request()).ok


def test_one_good_gpu_is_enough(backend, cuda_torch, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((6, 1), (9, 0))[index])
    assert backend.supports(request()).ok


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_after_a_fork_both_the_backend_and_a_launch_say_so(backend, cuda_torch, gpu):
    launch("toy", "bf16", torch.device("cuda", 0), (1, 1, 1), (1, 2, 3))
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in processes with threads, which this test is about.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            lines = [backend.availability().reason]
            try:
                launch("toy", "bf16", torch.device("cuda", 0), (1, 1, 1), (1, 2, 3))
            except BackendUnavailableError as error:
                lines.append(str(error))
            os.write(write, "\n".join(lines).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        told = stream.read().splitlines()
    os.waitpid(child, 0)
    assert len(told) == 2
    assert all('set_start_method("spawn")' in line for line in told)
    assert len(gpu.calls("cuLaunchKernel")) == 1
    assert backend.availability().ok, "the parent goes on"


def test_import_and_cpu_calls_touch_neither_the_driver_nor_a_compiler():
    code = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "import torch, statescan\n"
        "x = torch.randn(1, 4, 8)\n"
        "statescan.causal_conv1d(x, torch.randn(4, 3))\n"
        "from statescan.backends.cuda import driver, nvrtc\n"
        "assert driver.status.cache_info().misses == 0\n"
        "assert nvrtc.status.cache_info().misses == 0\n"
        "assert 'statescan.backends.cuda.launch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
