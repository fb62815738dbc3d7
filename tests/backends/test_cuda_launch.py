# SPDX-License-Identifier: Apache-2.0
"""Launches through a stand-in driver: what reaches it, on which device, stream and thread."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.fake_driver import KERNEL, without_shim

from statescan.backends import native
from statescan.backends.cuda import loading
from statescan.backends.cuda.driver import DriverError
from statescan.backends.cuda.launch import launch
from statescan.errors import BackendUnavailableError

CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)
VALUES = (0x7F00_0000_1000, -5, 0x7F00_0000_2000)


@pytest.fixture(params=["shim", "ctypes"])
def road(request, monkeypatch):
    """Both ways to the driver's launch function."""
    if request.param == "ctypes":
        without_shim(monkeypatch)
    elif native.status().library is None:
        pytest.skip(f"the native library is not usable: {native.status().reason}")
    return request.param


def test_grid_threads_stream_and_values_arrive(gpu, road):
    launch("toy", "bf16", CUDA0, (70000, 3, 2), VALUES)
    assert gpu.calls("cuLaunchKernel") == [
        "cuLaunchKernel on 0 stream 0xa0 grid 70000,3,2 block 128,1,1 shared 0"
    ]
    assert gpu.parameters() == VALUES


def test_symbol_is_the_instance_that_was_asked_for(gpu):
    launch("toy", "f32", CUDA0, (1, 1, 1), VALUES)
    assert gpu.calls("cuLibraryGetKernel") == ["cuLibraryGetKernel statescan_toy__f32"]


def test_second_launch_loads_and_asks_nothing(gpu):
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    before = gpu.calls()
    launch("toy", "bf16", CUDA0, (2, 1, 1), VALUES)
    assert [line.split()[0] for line in gpu.calls()[len(before) :]] == ["cuLaunchKernel"]


def test_the_stream_is_asked_for_at_every_launch(gpu):
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    gpu.streams[0] = 0xA8
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    assert [line.split()[4] for line in gpu.calls("cuLaunchKernel")] == ["0xa0", "0xa8"]


def test_a_tensor_on_another_device_is_launched_there_and_the_current_device_stays(gpu, road):
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    launch("toy", "bf16", CUDA1, (4, 1, 1), VALUES)
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    assert [line.split()[2:5] for line in gpu.calls("cuLaunchKernel")] == [
        ["0", "stream", "0xa0"],
        ["1", "stream", "0xb0"],
        ["0", "stream", "0xa0"],
    ]
    assert gpu.device == 0


def test_devices_of_one_capability_share_the_loaded_code(gpu):
    for device in (CUDA0, CUDA1):
        launch("toy", "bf16", device, (1, 1, 1), VALUES)
    assert len(gpu.calls("cuLibraryLoadData")) == 1


def test_devices_of_two_capabilities_get_code_of_their_own(gpu, compiler):
    gpu.library.fake_capability(1, 8, 0)
    for device in (CUDA0, CUDA1):
        launch("toy", "bf16", device, (1, 1, 1), VALUES)
    assert [architecture for _, architecture in compiler.compiled] == ["sm_90", "sm_80"]


def test_a_device_without_number_is_the_current_one(gpu):
    gpu.device = 1
    launch("toy", "bf16", torch.device("cuda"), (1, 1, 1), VALUES)
    assert "cuLaunchKernel on 1 stream 0xb0" in gpu.calls("cuLaunchKernel")[0]


def test_a_thread_without_context_gets_the_devices(gpu):
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    thread = threading.Thread(target=launch, args=("toy", "bf16", CUDA0, (9, 1, 1), VALUES))
    thread.start()
    thread.join(30)
    assert len(gpu.calls("cuLaunchKernel on 0")) == 2
    assert len(gpu.calls("cuCtxSetCurrent 0")) == 2


def test_a_context_that_another_library_took_away_comes_back(gpu, road):
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    gpu.library.fake_lose_context()
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    assert len(gpu.calls("cuLaunchKernel on 0")) == 2


def test_eight_threads_load_an_instance_once(gpu):
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(gpu.calls("cuLaunchKernel on 0")) == 8
    assert len(gpu.calls("cuLibraryLoadData")) == 1


def test_large_shared_memory_is_allowed_on_each_device(gpu):
    for device in (CUDA0, CUDA1):
        launch("toy", "f32_wide", device, (1, 1, 1), VALUES)
    assert gpu.calls("cuKernelSetAttribute") == [
        "cuKernelSetAttribute 8 100000 on 0",
        "cuKernelSetAttribute 8 100000 on 1",
    ]
    assert all(line.endswith("shared 100000") for line in gpu.calls("cuLaunchKernel"))


def test_shared_memory_that_a_call_decides_is_allowed_when_it_grows(gpu):
    for shared in (1000, 60_000, 50_000, 61_000):
        launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES, shared_bytes=shared)
    assert gpu.calls("cuKernelSetAttribute") == [
        "cuKernelSetAttribute 8 60000 on 0",
        "cuKernelSetAttribute 8 61000 on 0",
    ]
    assert [line.split()[-1] for line in gpu.calls("cuLaunchKernel")] == [
        *("1000", "60000", "50000", "61000")
    ]


def test_an_instance_that_needs_more_shared_memory_than_there_is_says_so(gpu):
    gpu.library.fake_shared_limit(64 * 1024)
    with pytest.raises(BackendUnavailableError, match=r"needs 100000 bytes .* offers 65536"):
        launch("toy", "f32_wide", CUDA0, (1, 1, 1), VALUES)


def test_a_driver_before_12_loads_modules_for_each_device(gpu, road):
    gpu.library.fake_version(11080)
    for device in (CUDA0, CUDA1, CUDA0):
        launch("toy", "f32_wide", device, (1, 1, 1), VALUES)
    assert len(gpu.calls("cuModuleLoadData")) == 2
    assert gpu.calls("cuLibraryLoadData") == []
    assert gpu.calls("cuFuncSetAttribute") == [
        "cuFuncSetAttribute 8 100000 on 0",
        "cuFuncSetAttribute 8 100000 on 1",
    ]
    assert [line.split()[2] for line in gpu.calls("cuLaunchKernel")] == ["0", "1", "0"]


@pytest.mark.parametrize("blocks_null", [False, True])
def test_nothing_is_loaded_while_a_graph_is_captured(gpu, blocks_null):
    stream = 0 if blocks_null else 0xA0
    gpu.streams[0] = stream
    gpu.capture(stream or 0xC0, blocks_null)
    with pytest.raises(BackendUnavailableError, match=r"statescan\.prepare"):
        launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    assert gpu.calls("cuLibraryLoadData") == []
    gpu.capture(0)
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    assert len(gpu.calls("cuLaunchKernel")) == 1


def test_what_is_loaded_may_be_captured(gpu):
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    gpu.capture(0xA0)
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    assert len(gpu.calls("cuLaunchKernel")) == 2


def test_a_capture_on_another_stream_that_forbids_loading_is_named(gpu):
    gpu.fail("cuLibraryLoadData", 900, times=1)
    with pytest.raises(DriverError, match="A CUDA graph is being captured"):
        launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)


def test_a_refused_launch_names_kernel_device_and_sizes(gpu, road):
    gpu.fail("cuLaunchKernel", 700)
    with pytest.raises(DriverError) as caught:
        launch("toy", "bf16", CUDA0, (7, 1, 1), VALUES)
    message = str(caught.value)
    assert caught.value.code == 700
    for part in ("statescan_toy__bf16 on cuda:0", "CUDA_ERROR_ILLEGAL_ADDRESS", "(7, 1, 1)"):
        assert part in message
    assert "CUDA_LAUNCH_BLOCKING=1" in message
    assert len(message.splitlines()) <= 6


def test_an_unknown_instance_is_a_key_error(gpu):
    with pytest.raises(KeyError):
        launch("toy", "f64", CUDA0, (1, 1, 1), VALUES)


def test_too_few_values_never_reach_the_driver(gpu):
    with pytest.raises(Exception, match="pack expected"):
        launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES[:-1])
    assert gpu.calls("cuLaunchKernel") == []


def test_only_loading_launches_nothing_and_tells_what_was_asked(gpu):
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    with loading.only_loading() as asked_for:
        launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
        launch("toy", "f32", CUDA1, (1, 1, 1), VALUES)
    assert asked_for == {("toy", 0), ("toy", 1)}
    assert len(gpu.calls("cuLaunchKernel")) == 1
    gpu.capture(0xA0)
    launch("toy", "bf16", CUDA0, (1, 1, 1), VALUES)
    assert len(gpu.calls("cuLaunchKernel")) == 2
    assert KERNEL.by_suffix["f32"].threads == 256
