# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: forward, backward and decode are captured, and a replay computes what a call does.

Also with CUDA's own asynchronous allocator, and what is said when a kernel is not loaded yet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu_calls import MAKERS, SEQUENCES, STEPS, UPDATED, assert_equal_bits, on_gpu
from helpers.integration import TORCH_VERSION, child

from statescan import ops

pytestmark = pytest.mark.gpu

REPLAYS = 3


def capture(work):
    """The graph of ``work``, warmed up on a side stream as torch asks for, and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


def refill(call, seed, name, dtype):
    """Other numbers in the same tensors; the values of indices stay."""
    other = on_gpu(name, dtype, seed=seed)
    for key, tensor in call.tensors.items():
        if tensor.is_floating_point():
            tensor.copy_(other.kwargs[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SEQUENCES)
def test_forward(name, dtype):
    call = on_gpu(name, dtype)
    graph, results = capture(call.forward)
    # With cudaMallocAsync a graph's memory is there from its first replay on.
    graph.replay()
    for seed in range(1, 1 + REPLAYS):
        refill(call, seed, name, dtype)
        expected = [result.clone() for result in call.forward()]
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SEQUENCES)
def test_forward_and_backward(name, dtype):
    call = on_gpu(name, dtype)
    leaves = call.leaves()
    call.forward_and_backward(leaves)
    graph, (results, gradients) = capture(lambda: call.forward_and_backward(leaves))
    for seed in range(1, 1 + REPLAYS):
        refill(call, seed, name, dtype)
        expected = call.run()
        graph.replay()
        found = {str(i): result.detach() for i, result in enumerate(results)}
        found |= {f"d{n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}
        assert_equal_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STEPS)
def test_decode(name, dtype):
    """Replays walk the state on, step after step, as calls do."""
    call, plain = on_gpu(name, dtype), on_gpu(name, dtype)
    state = UPDATED[call.op]
    graph, (out,) = capture(call.forward)
    call.kwargs[state].copy_(plain.kwargs[state])
    for _ in range(10):
        graph.replay()
        (expected,) = plain.forward()
        assert torch.equal(out, expected)
        assert torch.equal(call.kwargs[state], plain.kwargs[state])


@pytest.mark.parametrize(("name", "argument"), [("state", "state_batch_indices"),
                                                ("taps", "conv_state_indices")])  # fmt: skip
def test_indices_may_change_between_replays(name, argument):
    """Padding (negative) and slots in another order, in memory that the graph knows."""
    call, plain = on_gpu(name), on_gpu(name)
    state, rows = UPDATED[call.op], call.kwargs["x"].shape[0]
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    call.kwargs[argument] = slots
    graph, (out,) = capture(call.forward)
    for turn in range(3):
        order = torch.arange(rows).roll(turn + 1)
        order[turn] = -1
        slots.copy_(order)
        plain.kwargs[argument] = order.to("cuda", torch.int32)
        call.kwargs[state].copy_(plain.kwargs[state])
        graph.replay()
        (expected,) = plain.forward()
        assert torch.equal(out, expected)
        assert torch.equal(call.kwargs[state], plain.kwargs[state])


# torch's own remark about make_graphed_callables, whose warm-up runs on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables():
    """torch's own tool, which captures the backward as a graph of its own."""
    call = on_gpu("scan")
    names = [n for n, v in call.tensors.items() if v.is_floating_point()]

    def scan(*tensors):
        given = dict(zip(names, tensors, strict=True))
        return ops.selective_scan(
            **given, dt_softplus=True, return_final_states=True, backend="cuda"
        )

    leaves = call.leaves()
    graphed = torch.cuda.make_graphed_callables(scan, tuple(leaves.values()))
    expected = call.run()
    results = graphed(*leaves.values())
    gradients = torch.autograd.grad(results, tuple(leaves.values()), call.cotangents)
    found = {str(i): result.detach() for i, result in enumerate(results)}
    found |= {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}
    assert_equal_bits(found, expected)


ALLOCATOR = """
import sys
sys.path[:0] = {path!r}
import torch
from tests.gpu.test_graphs import test_decode, test_forward, test_forward_and_backward
assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
test_forward("scan", torch.bfloat16)
test_forward_and_backward("scan_long", torch.float32)
test_forward_and_backward("conv_last", torch.float32)
test_decode("state", torch.bfloat16)
test_decode("taps", torch.bfloat16)
print("fine")
"""


def test_with_cudas_own_allocator():
    """B56: memory from cudaMallocAsync, also inside a capture."""
    # From torch 2.9 on the old name of the variable is warned about.
    variable = "PYTORCH_ALLOC_CONF" if TORCH_VERSION >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
    code = ALLOCATOR.format(path=paths())
    printed = child(code, **{variable: "backend:cudaMallocAsync"})
    assert printed.split() == ["fine"]


COLD = """
import sys
sys.path[:0] = {path!r}
import torch
from helpers.gpu_calls import on_gpu
from statescan.errors import BackendUnavailableError
number = torch.zeros(1, device="cuda")
for name in ("scan", "conv", "state", "taps"):
    call = on_gpu(name)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            number.add_(1)  # torch warns about graphs with nothing in them
            call.forward()
    except BackendUnavailableError as error:
        print("refused", "prepare" in str(error))
    torch.cuda.synchronize()
    print("results", len(call.run()) > 0)
"""


def test_a_kernel_that_is_not_loaded_is_refused_in_a_capture():
    """With the way out in the message, and the process goes on."""
    printed = child(COLD.format(path=paths())).split("\n")
    assert printed[:-1] == 4 * ["refused True", "results True"]


PREPARED = """
import sys
sys.path[:0] = {path!r}
import torch
from helpers.gpu_calls import UPDATED, assert_equal_bits, on_gpu
import statescan
taken = []
for name in {names!r}:
    call = on_gpu(name, torch.bfloat16)
    before = {{n: t.clone() for n, t in call.tensors.items()}}
    statescan.prepare(call.op, **call.kwargs, backend="cuda")
    torch.cuda.synchronize()
    assert_equal_bits(call.tensors, before)
    leaves, graph = call.leaves(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if call.op in UPDATED:
            results, gradients = call.forward(), ()
        else:
            results, gradients = call.forward_and_backward(leaves)
    taken.append((call, before, leaves, graph, results, gradients))
for call, before, leaves, graph, results, gradients in taken:
    graph.replay()
    torch.cuda.synchronize()
    out = results[0].clone()
    for name, tensor in before.items():
        call.kwargs[name].copy_(tensor)
    expected = call.run()
    assert torch.equal(out, expected["out" if call.op in UPDATED else "0"]), call.op
    for name, gradient in zip(leaves, gradients):
        assert torch.equal(gradient, expected["d" + name]), (call.op, name)
print("fine")
"""


def test_prepare_loads_all_that_a_capture_needs():
    """In a process in which no op ever ran, the first runs are captured ones."""
    # The matrix products of mamba_inner are torch's, which make their own handles at first use.
    names = [name for name in MAKERS if name != "inner"]
    assert child(PREPARED.format(path=paths(), names=names)).split() == ["fine"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("name", ["scan", "conv", "inner", "state"])
def test_no_call_waits_for_the_gpu(name):
    """Nor may it, in a capture. The update of a step, too, looks at no value."""
    call = on_gpu(name)
    call.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert torch.cuda.get_sync_debug_mode() == 2, "a call that waits raises"
        call.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_call_has_a_capture_test():
    assert {*SEQUENCES, *STEPS} == {*MAKERS}


def paths():
    tests = Path(__file__).resolve().parents[1]
    return [str(tests.parent), str(tests), *(p for p in sys.path if p.endswith("src"))]
