# SPDX-License-Identifier: Apache-2.0
"""torch's own tools on CUDA tensors: opcheck, compile, CUDA graphs made by compile, export.

Options and refusals of those tools are the same on every device: tests/ops has them.
"""

from __future__ import annotations

import pytest
import torch
from helpers.gpu_calls import STEPS, UPDATED, OnGpu, assert_equal_bits, on_gpu
from helpers.integration import TORCH_WARNINGS, RecordOps
from torch.export import export
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

from statescan import ops
from statescan.testing import assert_close

NAMES = ("scan", "scan_last", "scan_packed", "conv", "conv_last", "inner", *STEPS)
COMPILED = ("scan", "conv_last", "inner", "state", "taps")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(*TORCH_WARNINGS),
    # What inductor says about the GPU and its own code.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call: OnGpu, **options: object):
    """The public function of a call as one graph, its tensors given by name."""
    fixed = {n: v for n, v in call.kwargs.items() if not isinstance(v, torch.Tensor)}
    function = getattr(ops, call.op)
    return torch.compile(
        lambda **tensors: function(**tensors, **fixed, backend="cuda"), fullgraph=True, **options
    )


def results_of(call: OnGpu, function) -> dict[str, torch.Tensor]:
    """As ``OnGpu.run``, with another function in the op's place."""
    if call.op in UPDATED:
        name = UPDATED[call.op]
        tensors = call.tensors | {name: call.kwargs[name].clone()}
        with torch.no_grad():
            out = function(**tensors)
        return {"out": out, name: tensors[name]}
    leaves = call.leaves()
    given = function(**call.tensors | leaves)
    results = given if isinstance(given, tuple) else (given,)
    found = torch.autograd.grad(results, tuple(leaves.values()), call.cotangents, allow_unused=True)
    gradients = {f"d{n}": g for n, g in zip(leaves, found, strict=True) if g is not None}
    return {str(i): r.detach().clone() for i, r in enumerate(results)} | gradients


def assert_similar(found, expected):
    """Compiled code may hand over gradients in another layout, which changes sums' order."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert_close(value, expected[name], 1e-4, name)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    """Schema, fakes (strides too) and tracing of the registered ops."""
    call = on_gpu(name)
    with RecordOps() as recorded:
        call.run()
    assert recorded.calls
    for registered, args in recorded.calls:
        opcheck(registered, tree_map_only(torch.Tensor, torch.Tensor.detach, args))


@pytest.mark.parametrize("name", NAMES)
def test_whole_graph(name):
    call = on_gpu(name)
    expected = call.run()
    assert_similar(results_of(call, compiled(call, backend="aot_eager", dynamic=True)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_inductor(name):
    call = on_gpu(name)
    expected = call.run()
    assert_similar(results_of(call, compiled(call)), expected)


@pytest.mark.slow
# Torch captures an empty graph to start its pool with; the warning of that would be an error.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", ["scan", "conv_last"])
def test_graphs_made_by_compile(name):
    """mode="reduce-overhead": the third call and those after it are replays."""
    call = on_gpu(name)
    expected = call.run()
    function = compiled(call, mode="reduce-overhead")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert_similar(results_of(call, function), expected)


@pytest.mark.parametrize("name", COMPILED)
def test_exported_program(name):
    call = on_gpu(name)
    fixed = {n: v for n, v in call.kwargs.items() if not isinstance(v, torch.Tensor)}

    class Call(torch.nn.Module):
        def forward(self, **tensors):
            return getattr(ops, call.op)(**tensors, **fixed, backend="cuda")

    expected = call.run()
    with torch.no_grad():
        program = export(Call(), (), dict(call.tensors)).module()
        if call.op in UPDATED:
            assert_equal_bits(results_of(call, program), expected)
        else:
            results = program(**call.tensors)
            for number, result in enumerate(results):
                assert torch.equal(result, expected[str(number)])


def test_autocast_changes_nothing():
    call = on_gpu("scan")
    expected = call.run()
    with torch.autocast("cuda", torch.bfloat16):
        assert_equal_bits(call.run(), expected)
