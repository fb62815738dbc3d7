# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a GPU runs what is right and tells what is wrong.

Without these a kernel's tests on the CPU would prove less than they seem to.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import simt

from statescan.backends.cuda import source, tables
from statescan.backends.cuda.tables.base import POINTER, Instance, Kernel

pytestmark = pytest.mark.skipif(simt.COMPILER is None, reason="needs g++ or clang++")

THREADS = 64
KERNEL = Kernel(
    stem="toy",
    fields=(("target", POINTER),),
    instances=(Instance("one", "", threads=THREADS, shared_bytes=4 * THREADS),),
)
DEVICE = torch.device("cpu")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a kernel's body on 3 blocks; the numbers it leaves, one a thread."""
    for shared in ("ptx.cuh", "common.cuh"):
        shutil.copy(source.FOLDER / shared, tmp_path)
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "kernel", {"toy": KERNEL}.__getitem__)

    def call(body, launches=1):
        (tmp_path / "toy.cu").write_text(
            "__device__ __forceinline__ void toy(const ToyParams &p) {\n"
            "    extern __shared__ float memory[];\n"
            "    const int me = threadIdx.x, lane = me % 32;\n"
            "    float *target = static_cast<float *>(p.target) + blockIdx.x * blockDim.x;\n"
            f"{body}\n}}\n"
        )
        source._read_file.cache_clear()
        simulator = simt.Simulator(tmp_path)
        out = torch.zeros(3, THREADS)
        for _ in range(launches):
            simulator("toy", "one", DEVICE, (3, 1, 1), (out.data_ptr(),))
        return out

    yield call
    source._read_file.cache_clear()


REVERSED = torch.arange(THREADS - 1.0, -1.0, -1.0).expand(3, THREADS)


def test_threads_meet_at_a_barrier(run):
    out = run("memory[me] = me; __syncthreads(); target[me] = memory[blockDim.x - 1 - me];")
    assert torch.equal(out, REVERSED)


def test_a_missing_barrier_is_seen(run):
    out = run("memory[me] = me; target[me] = memory[blockDim.x - 1 - me];")
    assert out.isnan().any()


def test_a_barrier_that_some_never_reach_is_told(run):
    with pytest.raises(AssertionError, match="wait for others that never come"):
        run("if (me < 32) { meet_at(1, 64); } target[me] = 1;")


def test_shuffles_and_ballots(run):
    out = run(
        "float sum = lane;\n"
        "for (int d = 16; d > 0; d /= 2) { sum += __shfl_xor_sync(0xffffffffu, sum, d); }\n"
        "const unsigned odd = __ballot_sync(0xffffffffu, lane % 2);\n"
        "target[me] = sum + __shfl_sync(0xffffffffu, lane, 3) + (odd == 0xaaaaaaaau);"
    )
    assert torch.equal(out, torch.full((3, THREADS), 31 * 16 + 3 + 1.0))


def test_a_shuffle_that_not_all_lanes_reach_is_told(run):
    with pytest.raises(AssertionError, match="names a lane that has left"):
        run("if (lane < 16) { target[me] = __shfl_xor_sync(0xffffffffu, lane, 1); }")


def test_lanes_at_different_operations_are_told(run):
    with pytest.raises(AssertionError, match="different operations"):
        run(
            "if (lane < 16) { target[me] = __shfl_xor_sync(0xffffffffu, lane, 1); }\n"
            "else { __syncwarp(); }"
        )


def test_shared_memory_beyond_the_launch_is_told(run):
    with pytest.raises(AssertionError, match="beyond what the launch has"):
        run("memory[me + 1] = me;")


def test_shared_memory_is_not_zero_at_first(run):
    assert run("target[me] = memory[me];").isnan().all()


def test_a_vector_that_is_not_aligned_is_told(run):
    with pytest.raises(AssertionError, match="not aligned"):
        run("u32 words[4]; load_128(words, target + 1); target[me] = words[0];")


def test_the_matrix_unit_multiplies(run):
    """Left operand: row + 100 column; right: 1 where row equals column; so the left comes back."""
    out = run(
        "const int g = lane / 4, t = lane % 4;\n"
        "float d[4];\n"
        "multiply(d, g + 100 * t, g + 8 + 100 * t, g + 100 * (t + 4), g + 8 + 100 * (t + 4),\n"
        "         t == g, t + 4 == g);\n"
        "const int c = 2 * t;\n"
        "target[me] = d[0] == g + 100 * c && d[1] == g + 100 * (c + 1) &&\n"
        "             d[2] == g + 8 + 100 * c && d[3] == g + 8 + 100 * (c + 1);"
    )
    assert torch.equal(out, torch.ones(3, THREADS))


def test_the_order_of_blocks_changes_from_launch_to_launch(run):
    """The block that comes last wins; over some launches that is not always the same."""
    body = "if (me == 0) { static_cast<float *>(p.target)[0] = blockIdx.x; }"
    winners = {float(run(body, launches)[0, 0]) for launches in range(1, 9)}
    assert len(winners) > 1
