# SPDX-License-Identifier: Apache-2.0
"""torch.export of every op: both modes, dynamic sizes, training afterwards, loading elsewhere.

torch.compile is in test_compile.py.
"""

from __future__ import annotations

import pytest
import torch
from helpers.differential import tensors_of
from helpers.integration import (
    SEQUENCE_OPS,
    TORCH_VERSION,
    TORCH_WARNINGS,
    UPDATES,
    as_tuple,
    assert_equal,
    child,
    make,
    public,
    run,
    weigh,
)
from torch.export import Dim, export

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)

CASES = {
    "selective_scan": "all_options",
    "causal_conv1d": "all_options",
    "mamba_inner": "norms_out_proj",
    "selective_state_update": "usual",
    "causal_conv1d_update": "bias_silu",
}
TOKENS = {
    "selective_scan": ("x", "dt", "B", "C", "z"),
    "causal_conv1d": ("x",),
    "mamba_inner": ("xz",),
}
PER_ROW = (
    "x",
    "xz",
    "dt",
    "B",
    "C",
    "z",
    "initial_states",
    "conv_initial_states",
    "ssm_state",
    "conv_state",
)


class Call(torch.nn.Module):
    """An op with its options fixed: the tensors are the arguments of the program."""

    def __init__(self, op, options):
        super().__init__()
        self.op, self.options = op, options

    def forward(self, tensors):
        return public(self.op)(**tensors, **self.options)


def setting(op):
    kwargs = make(op, CASES[op])
    tensors = tensors_of(kwargs)
    options = {n: v for n, v in kwargs.items() if n not in tensors and v is not None}
    return Call(op, options), tensors


def export_dynamically(op, strict):
    """The program with batch (or rows) and seqlen left open."""
    module, tensors = setting(op)
    batch, seqlen = Dim("batch", min=2, max=64), Dim("seqlen", min=2, max=4096)
    shapes = {}
    for name, tensor in tensors.items():
        axes = {0: batch} if name in PER_ROW else {}
        if name in TOKENS.get(op, ()):
            axes[tensor.dim() - 1] = seqlen
        shapes[name] = axes
    program = export(module, (tensors,), dynamic_shapes=({**shapes},), strict=strict)
    return program, module, tensors


def other_sizes(op, tensors):
    """The same tensors, half as many rows more and several times longer."""
    changed = {}
    for name, tensor in tensors.items():
        wider = torch.cat([tensor, tensor[:1]]) if name in PER_ROW else tensor
        longer = name in TOKENS.get(op, ())
        changed[name] = torch.cat([wider] * 8, -1) if longer else wider.clone()
    return changed


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("op", CASES)
def test_program_runs_other_sizes(op, strict):
    with torch.no_grad():
        program, module, tensors = export_dynamically(op, strict)
    exported = program.module()
    for sizes in (tensors, other_sizes(op, tensors)):
        function = {"exported": exported, "eager": module}
        found, expected = (
            run(op, lambda call=call, **kw: call(kw), sizes) for call in function.values()
        )
        assert_equal(found, expected)
    name = f"statescan.{op}{'_fwd' if op in SEQUENCE_OPS else ''}.default"
    # torch 2.4 wraps ops that write in place.
    called = [str((node.target, node.args)) for node in program.graph.nodes]
    assert sum(name.removesuffix(".default") in call for call in called) == 1


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_program_exported_with_gradients_can_be_trained(op, strict):
    """Grad mode on, inputs that require grad: the same program, and eager's gradients from it."""
    program, module, tensors = export_dynamically(op, strict)
    exported = program.module()
    sizes = other_sizes(op, tensors)
    found = run(op, lambda **kw: exported(kw), sizes)
    assert_equal(found, run(op, lambda **kw: module(kw), sizes))
    assert all(f"d{name}" in found for name in tensors)


def test_parameters_of_an_exported_module_get_gradients():
    kwargs = make("mamba_inner", "usual")
    options = {n: v for n, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    names = [name for name in tensors_of(kwargs) if name != "xz"]

    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                setattr(self, name, torch.nn.Parameter(kwargs[name]))

        def forward(self, xz):
            weights = {name: getattr(self, name) for name in names}
            return public("mamba_inner")(xz, **weights, **options)

    model = Mixer()
    exported = export(model, (kwargs["xz"],)).module()
    for module in (model, exported):
        weigh(module(kwargs["xz"])).backward()
    expected = dict(model.named_parameters())
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


LOAD = """
import statescan, torch
inputs, expected = torch.load({data!r}, weights_only=True)
program = torch.export.load({path!r}).module()
with torch.no_grad():
    found = program(inputs)
found = found if isinstance(found, tuple) else (found,)
assert all(torch.equal(a, b) for a, b in zip((*found, *inputs.values()), expected, strict=True))
print("equal")
"""


@pytest.mark.parametrize(
    "op",
    [
        "selective_scan",
        "mamba_inner",
        pytest.param(
            "selective_state_update",
            marks=pytest.mark.skipif(
                TORCH_VERSION < (2, 5),
                reason=f"torch {torch.__version__} cannot load programs with in-place custom ops",
            ),
        ),
    ],
)
def test_saved_program_runs_in_a_new_process(op, tmp_path):
    """The new process imports statescan and torch, in this order, and calls no op itself."""
    with torch.no_grad():
        program, module, tensors = export_dynamically(op, strict=False)
        path, data = str(tmp_path / "program.pt2"), str(tmp_path / "data.pt")
        torch.export.save(program, path)
        inputs = other_sizes(op, tensors)
        after = {name: tensor.clone() for name, tensor in inputs.items()}
        results = as_tuple(module(after))
    torch.save((inputs, (*results, *after.values())), data)
    assert child(LOAD.format(data=data, path=path)) == "equal\n"


def test_loaded_program_can_be_exported_and_compiled_again(tmp_path):
    program, module, tensors = export_dynamically("selective_scan", strict=False)
    torch.export.save(program, str(tmp_path / "program.pt2"))
    loaded = torch.export.load(str(tmp_path / "program.pt2"))
    again = export(loaded.module(), (tensors,))
    function = torch.compile(lambda **kw: loaded.module()(kw), backend="aot_eager")
    expected = run("selective_scan", lambda **kw: module(kw), tensors)
    assert_equal(run("selective_scan", lambda **kw: again.module()(kw), tensors), expected)
    found = run("selective_scan", lambda **kw: function(**kw), tensors)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


def test_decompositions_leave_the_op_alone():
    program, _, tensors = export_dynamically("mamba_inner", strict=False)
    lowered = program.run_decompositions()
    targets = [str(node.target) for node in lowered.graph.nodes]
    assert "statescan.mamba_inner_fwd.default" in targets
    module, _ = setting("mamba_inner")
    for result, other in zip(as_tuple(lowered.module()(tensors)), as_tuple(module(tensors))):
        torch.testing.assert_close(result, other)


@pytest.mark.parametrize("op", UPDATES)
def test_update_of_a_buffer(op):
    """A decode step on states that the module owns: the program updates the buffer."""
    call, tensors = setting(op)
    state = "ssm_state" if op == "selective_state_update" else "conv_state"

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", tensors[state].clone())

        def forward(self, others):
            return call({**others, state: self.state})

    others = {name: tensor for name, tensor in tensors.items() if name != state}
    with torch.no_grad():
        exported, eager = export(Step(), (others,)).module(), Step()
        for _ in range(2):
            torch.testing.assert_close(exported(others), eager(others))
        torch.testing.assert_close(exported.state, eager.state)


AOTI = """
import statescan, torch
inputs, expected = torch.load({data!r}, weights_only=True)
found = torch._inductor.aoti_load_package({path!r})(inputs)
found = found if isinstance(found, (tuple, list)) else (found,)
for a, b in zip((*found, *inputs.values()), expected, strict=True):
    torch.testing.assert_close(a, b)
print("close")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch._inductor, "aoti_compile_and_package"),
    reason=f"torch {torch.__version__} has no AOTInductor packages",
)
@pytest.mark.parametrize("op", ["selective_scan", "causal_conv1d_update"])
def test_aotinductor_package_runs_in_a_new_process(op, tmp_path):
    with torch.no_grad():
        program, module, tensors = export_dynamically(op, strict=False)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        inputs = other_sizes(op, tensors)
        after = {name: tensor.clone() for name, tensor in inputs.items()}
        results = as_tuple(module(after))
    data = str(tmp_path / "data.pt")
    torch.save((inputs, (*results, *after.values())), data)
    assert child(AOTI.format(data=data, path=path)) == "close\n"
