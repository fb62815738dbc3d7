# SPDX-License-Identifier: Apache-2.0
"""Kernels run on torch's current stream and on the device of their tensors, from any thread."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.gpu_calls import MAKERS, UPDATED, assert_equal_bits, on_gpu
from helpers.integration import child

from statescan import ops
from statescan.errors import DeviceError

pytestmark = [
    pytest.mark.gpu,
    # torch says so when the first matrix product of a thread is its first use of the GPU.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

THREADS = 8
SLEEP = 40_000_000
"""About 20 ms, in cycles: far longer than the call that must wait for it."""

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("name", MAKERS)
def test_the_current_stream_is_used(name):
    """Inputs arrive late on a side stream; a kernel on another one would read what was before."""
    call = on_gpu(name)
    expected = call.run()
    kept = {n: t.clone() for n, t in call.tensors.items() if t.is_floating_point()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for key in kept:
            call.kwargs[key].zero_()
        torch.cuda._sleep(SLEEP)
        for key, value in kept.items():
            call.kwargs[key].copy_(value)
        found = call.run()
    # What follows on the default stream must not overtake it.
    torch.cuda.current_stream().wait_stream(side)
    assert_equal_bits(found, expected)


@pytest.mark.parametrize("name", MAKERS)
def test_two_streams_at_once(name):
    calls = [on_gpu(name, seed=seed) for seed in (0, 1)]
    expected = [call.run() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(call.run())
        torch.cuda.synchronize()
        for results, wanted in zip(found, expected, strict=True):
            assert_equal_bits(results, wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_eight_threads(name):
    """Each on a stream of its own, with its own numbers."""
    calls = [on_gpu(name, seed=seed) for seed in range(THREADS)]
    expected = [call.run() for call in calls]
    torch.cuda.synchronize()

    def work(number):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [calls[number].run() for _ in range(5)]
            stream.synchronize()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    for found, wanted in zip(results, expected, strict=True):
        for each in found:
            assert_equal_bits(each, wanted)


FIRST = """
import sys
sys.path[:0] = {path!r}
from concurrent.futures import ThreadPoolExecutor
import torch
from helpers.gpu_calls import assert_equal_bits, on_gpu
calls = [on_gpu(name) for name in 2 * ("scan", "conv", "state", "taps")]
torch.cuda.synchronize()
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda call: call.run(), calls))
torch.cuda.synchronize()
for call, results in zip(calls, found):
    assert_equal_bits(call.run(), results)
print("fine")
"""


def test_the_first_calls_come_from_eight_threads():
    """Eight threads load kernels at the same time, in a new process."""
    tests = Path(__file__).resolve().parents[1]
    path = [str(tests.parent), str(tests), *(p for p in sys.path if p.endswith("src"))]
    assert child(FIRST.format(path=path)).split() == ["fine"]


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_on_cpu_and_gpu_are_refused(name):
    call = on_gpu(name)
    for key in ("x", "xz", UPDATED.get(call.op, "weight")):
        if key in call.kwargs:
            with pytest.raises(DeviceError):
                getattr(ops, call.op)(**call.kwargs | {key: call.kwargs[key].cpu()}, backend="cuda")


@two_gpus
@pytest.mark.parametrize("name", MAKERS)
def test_the_tensors_device_is_used_not_the_current_one(name):
    expected = on_gpu(name, device="cuda:0").run()
    call = on_gpu(name, device="cuda:1")
    assert torch.cuda.current_device() == 0
    found = call.run()
    assert torch.cuda.current_device() == 0
    assert all(value.device.index == 1 for value in found.values())
    assert_equal_bits({n: v.to("cuda:0") for n, v in found.items()}, expected)


@two_gpus
def test_the_other_devices_stream_is_used():
    call = on_gpu("scan", device="cuda:1")
    expected = call.run()
    kept = {n: t.clone() for n, t in call.tensors.items() if t.is_floating_point()}
    side = torch.cuda.Stream("cuda:1")
    side.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(side):
        for key in kept:
            call.kwargs[key].zero_()
        torch.cuda._sleep(SLEEP)
        for key, value in kept.items():
            call.kwargs[key].copy_(value)
        # The stream's context makes its device current; the call is made from another one.
        with torch.cuda.device(0):
            found = call.run()
    torch.cuda.current_stream("cuda:1").wait_stream(side)
    assert_equal_bits(found, expected)


@two_gpus
def test_two_devices_in_one_call_are_refused():
    call = on_gpu("scan")
    moved = call.kwargs | {"dt": call.kwargs["dt"].to("cuda:1")}
    with pytest.raises(DeviceError):
        ops.selective_scan(**moved, backend="cuda")
