# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck of every registered op: schema, fakes, tracing; and meta and fake tensors.

What torch.compile makes of the public functions is in test_compile.py.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from helpers.differential import POOLS
from helpers.integration import (
    SEQUENCE_OPS,
    TORCH_WARNINGS,
    UPDATES,
    RecordOps,
    as_tuple,
    distinct_cases,
    make,
    public,
    representative,
    run_sequence,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

from statescan.testing import OPS

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)

QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")


def registered_calls(case):
    """The registered ops that a call of a case runs, with their arguments."""
    kwargs = make(case.op, case.name)
    with RecordOps() as recorded:
        if case.op in UPDATES:
            public(case.op)(**kwargs)
        else:
            run_sequence(public(case.op), kwargs)
    assert recorded.names() == (
        [case.op] if case.op in UPDATES else [f"{case.op}_fwd", f"{case.op}_bwd"]
    )
    return recorded.calls


def detached(args):
    return tree_map_only(torch.Tensor, torch.Tensor.detach, args)


@pytest.mark.parametrize("case", distinct_cases(), ids=str)
def test_schema_and_fake(case):
    """Nothing aliases or changes but what the schema says; fakes have the results' metadata."""
    for registered, args in registered_calls(case):
        opcheck(registered, detached(args), test_utils=QUICK)


@pytest.mark.parametrize("case", representative(*OPS), ids=str)
def test_tracing(case):
    for registered, args in registered_calls(case):
        opcheck(registered, detached(args), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_registered_forward_is_differentiable(op):
    """Autograd of the op itself, as in an exported program, and whether opcheck sees it."""
    case = representative(op)[1]
    registered, args = registered_calls(case)[0]
    args = tree_map_only(
        torch.Tensor,
        lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex()),
        args,
    )
    opcheck(registered, args)
    for save_states in (True, False):
        given = args if op == "causal_conv1d" else (*args[:-2], save_states, args[-1])
        results = registered(*given)
        assert results[0].requires_grad
        shapes = [r.shape for r in registered(*detached(given))]
        assert [r.shape for r in results] == shapes


@pytest.mark.parametrize("case", representative(*OPS), ids=str)
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_values(case, device):
    """Meta and fake tensors give results with the metadata of real ones, gradients included."""
    kwargs = make(case.op, case.name)
    real = as_tuple(public(case.op)(**kwargs))

    def infer(kwargs):
        found = as_tuple(public(case.op)(**kwargs))
        if case.op not in UPDATES:
            gradients = run_sequence(public(case.op), kwargs) if device == "fake" else {}
            for name, gradient in gradients.items():
                if name.startswith("d"):
                    assert gradient.shape == kwargs[name[1:]].shape
        return found

    if device == "meta":
        found = infer(
            {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
        )
    else:
        with FakeTensorMode() as mode:
            found = infer(
                {
                    n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                    for n, v in kwargs.items()
                }
            )
    for result, other in zip(found, real, strict=True):
        assert (result.shape, result.dtype) == (other.shape, other.dtype)
        if other.numel():
            assert result.stride() == other.stride()


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_training_on_the_meta_device(op):
    kwargs = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in make(op, "bare").items()
    }
    x = "xz" if op == "mamba_inner" else "x"
    kwargs[x].requires_grad_()
    as_tuple(public(op)(**kwargs))[0].sum().backward()
    assert kwargs[x].grad.shape == kwargs[x].shape


def test_ops_keep_the_strides_that_were_traced():
    for op in OPS:
        names = [op] if op in UPDATES else [f"{op}_fwd", f"{op}_bwd"]
        for name in names:
            tags = getattr(torch.ops.statescan, name).default.tags
            assert torch.Tag.pt2_compliant_tag in tags
            exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
            assert exact in tags


def overloads():
    for op in OPS:
        for name in [op] if op in UPDATES else [f"{op}_fwd", f"{op}_bwd"]:
            yield op, getattr(torch.ops.statescan, name).default


def test_schemas():
    """The backend is a text argument of each; no lists; what is written is returned by none."""
    for op, overload in overloads():
        schema = overload._schema
        assert (schema.arguments[-1].name, str(schema.arguments[-1].type)) == ("backend", "str")
        kinds = {str(argument.type) for argument in schema.arguments}
        assert kinds <= {"Tensor", "Optional[Tensor]", "bool", "float", "int", "str"}, schema
        written = [a.name for a in schema.arguments if a.alias_info is not None]
        if op in UPDATES:
            assert schema.returns == []
            assert set(written) == {POOLS[op], "intermediate_states", "out"}
        else:
            assert written == []
            assert all(returned.alias_info is None for returned in schema.returns)


@pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU", "MPS", "PrivateUse1"])
def test_every_device_reaches_dispatch(key):
    """One implementation for all: also a device that nobody thought of is asked about."""
    for _, overload in overloads():
        has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        assert has(overload._schema.name, key), (overload, key)
        direct = torch._C._dispatch_has_kernel_for_dispatch_key
        assert direct(overload._schema.name, "CompositeExplicitAutograd")
        assert not direct(overload._schema.name, key)


def test_docstrings_say_in_their_first_paragraph_what_is_written():
    for op in OPS:
        first = inspect.getdoc(public(op)).partition("\n\n")[0]
        written = {POOLS[op], "intermediate_states", "out"} if op in UPDATES else set()
        arguments = set(inspect.signature(public(op)).parameters)
        assert set(re.findall(r"``(\w+)``", first)) & arguments - {"xz"} == written, op


def test_no_other_op_is_registered():
    """Each op of this namespace is one that the tests of this file have gone through."""
    expected = {f"statescan::{op}" for op in UPDATES}
    expected |= {
        f"statescan::{op}_{direction}" for op in SEQUENCE_OPS for direction in ("fwd", "bwd")
    }
    found = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("statescan::")}
    assert found == expected
