# SPDX-License-Identifier: Apache-2.0
"""The threads of the cpu backend are torch's: found, as many as torch says, and none after a fork.

Equal bits for any number of threads are checked with each op.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
from helpers.op_inputs import scan_inputs

from statescan import ops
from statescan.backends import native
from statescan.backends.cpu import threads as pool

STATUS = native.status()
pytestmark = pytest.mark.skipif(
    STATUS.library is None, reason=f"the native library is not usable: {STATUS.reason}"
)

# Tensors stay below the 32768 numbers from which torch itself runs on threads: with more than that
# a forked child hangs in torch's own operations, with or without statescan.
SRC = Path(pool.__file__).parents[3]
SETUP = """
import sys, os, warnings, torch, statescan
from statescan.backends import native
from statescan.backends.cpu import threads as pool
torch.manual_seed(0)
x, dt = torch.randn(4, 40, 150), torch.randn(4, 40, 150)
A, B, C = -torch.rand(40, 8), torch.randn(4, 8, 150), torch.randn(4, 8, 150)
def scan():
    return statescan.selective_scan(x, dt, A, B, C, dt_softplus=True, backend="cpu")
torch.set_num_threads(1)
expected = scan()
torch.set_num_threads(3)
"""


def run_python(script, timeout=60):
    """Standard output of a script that runs after SETUP in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def unused(monkeypatch):
    """A process that has not asked for its pool yet."""
    for name, value in (("kind", None), ("forked", False), ("used", False)):
        monkeypatch.setattr(pool._State, name, value)
    yield pool._State
    kind, function, _ = pool.find_pool()
    native.require().handle.statescan_set_pool(kind, function)


def test_the_pool_is_torchs_own(unused):
    kind, function, words = pool.find_pool()
    assert function != 0
    assert kind in (pool.TORCH, pool.OPENMP)
    exported = [hasattr(library, "torch_parallel_for") for library in pool._torch_libraries()]
    if any(exported):
        assert (kind, words) == (pool.TORCH, "torch_parallel_for")
    else:
        assert words.startswith("GOMP_parallel of ")


def test_as_many_workers_as_torch_has_threads(threads, unused):
    for number in (1, 2, 3):
        threads(number)
        assert pool.workers() == number
    assert unused.kind == pool.find_pool()[0]


def test_the_pool_is_looked_for_once(monkeypatch, unused):
    asked = []

    def find():
        asked.append(1)
        return pool.SERIAL, 0, "none"

    monkeypatch.setattr(pool, "find_pool", find)
    assert [pool.workers() for _ in range(3)] == [1, 1, 1]
    assert asked == [1]


def test_one_thread_wakes_nobody():
    """With torch.set_num_threads(1) the process has no more threads after a call than before."""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("only Linux tells how many threads a process has")
    output = run_python(
        """
        torch.set_num_threads(1)
        before = len(os.listdir("/proc/self/task"))
        scan()
        print(pool.workers(), len(os.listdir("/proc/self/task")) - before)
        torch.set_num_threads(3)
        scan()
        print(len(os.listdir("/proc/self/task")) - before >= 2)
        """
    )
    assert output.split() == ["1", "0", "True"]


FORK = pytest.mark.skipif(
    not hasattr(os, "fork"), reason=f"processes do not fork on {sys.platform}"
)


@FORK
def test_a_forked_child_runs_serially_says_so_once_and_is_right():
    output = run_python(
        """
        assert torch.equal(scan(), expected)
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                right = [torch.equal(scan(), expected) for _ in range(3)]
            told = [w for w in caught if w.category is pool.SerialAfterForkWarning]
            print(right, len(told), "forked" in str(told[0].message), pool.workers(), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(status, torch.equal(scan(), expected), pool.workers())
        """
    )
    assert output.splitlines() == ["[True, True, True] 1 True 1", "0 True 3"]


@FORK
def test_a_child_of_a_process_without_a_pool_has_all_threads_and_no_warning():
    output = run_python(
        """
        pool._State.kind = None
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                print(pool.workers(), flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        """
    )
    assert output.split() == ["3", "0"]


@FORK
def test_plans_of_the_parent_are_right_in_a_forked_child():
    """A plan was made for several threads, of which the child has one."""
    output = run_python(
        """
        state, rows = torch.randn(4, 500, 16), torch.randn(4, 500, 3)
        rates, weights = -torch.rand(500, 16), torch.randn(4, 16, 3)
        def step():
            fresh = state.clone()
            with torch.no_grad():
                return statescan.selective_state_update(fresh, rows, rows, rates, weights, weights)
        wanted = step()
        assert torch.equal(step(), wanted)
        child = os.fork()
        if child == 0:
            warnings.simplefilter("ignore")
            print([torch.equal(step(), wanted) for _ in range(3)], flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        """
    )
    assert output.splitlines() == ["[True, True, True]", "0"]


def test_without_torchs_function_its_openmp_runtime_is_used():
    if not pool._openmp_runtimes():
        pytest.skip("this torch has mapped no OpenMP runtime, or this system does not tell")
    output = run_python(
        """
        pool._torch_libraries = lambda: []
        pool._State.kind = None
        print([torch.equal(scan(), expected) for _ in range(20)].count(True), pool._State.kind)
        print(pool.workers(), pool.find_pool()[2].startswith("GOMP_parallel of "))
        """
    )
    assert output.splitlines() == ["20 2", "3 True"]


def test_without_any_pool_one_thread_does_it_all():
    output = run_python(
        """
        pool._torch_libraries = pool._openmp_runtimes = lambda: []
        pool._State.kind = None
        print(torch.equal(scan(), expected), pool.workers(), pool.find_pool()[2])
        """
    )
    assert output.strip() == "True 1 no pool of torch's was found: one thread"


def test_python_goes_on_during_a_call():
    """The kernels do not hold the interpreter's lock: another thread counts meanwhile."""
    kwargs = scan_inputs(8, 512, 1024, 16, options="")
    started, ended, counts = threading.Event(), threading.Event(), []

    def count():
        number = 0
        started.wait()
        while not ended.is_set():
            number += 1
        counts.append(number)

    original = native.require().handle.statescan_selective_scan_fwd

    def watched(packed):
        # From here to the end nothing but the kernel runs on this thread.
        started.set()
        original(packed)
        ended.set()

    counter = threading.Thread(target=count)
    counter.start()
    try:
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr("statescan.backends.cpu.abi.kernel", lambda name: watched)
            ops.selective_scan(**kwargs, backend="cpu")
    finally:
        started.set()
        ended.set()
        counter.join()
    assert counts[0] > 100


def test_calls_of_several_python_threads_are_each_right():
    kwargs = [scan_inputs(2, 40, 70, 4, seed=seed) for seed in range(4)]
    expected = [ops.selective_scan(**given, backend="cpu") for given in kwargs]
    together, wrong = threading.Barrier(4, timeout=60), []

    def scan(number):
        together.wait()
        for _ in range(30):
            found = ops.selective_scan(**kwargs[number], backend="cpu")
            pairs = zip(found, expected[number], strict=True)
            wrong.extend(number for one, other in pairs if not torch.equal(one, other))

    workers = [threading.Thread(target=scan, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_the_warning_is_a_user_warning_that_can_be_silenced(monkeypatch, unused):
    unused.kind, unused.forked = pool.TORCH, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pool.SerialAfterForkWarning)
        assert pool.workers() == 1
    assert unused.kind == pool.SERIAL
    assert issubclass(pool.SerialAfterForkWarning, UserWarning)


def test_kernels_run_without_the_interpreter_lock():
    """ctypes gives the lock back around functions of a CDLL, and keeps it for those of a PyDLL."""
    handle = native.require().handle
    assert isinstance(handle, ctypes.CDLL)
    assert not isinstance(handle, ctypes.PyDLL)
