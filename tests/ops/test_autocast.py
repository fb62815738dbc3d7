# SPDX-License-Identifier: Apache-2.0
"""Under autocast the ops cast nothing: neither their inputs nor what they compute inside.

Whoever wants low precision passes low-precision tensors; modules do so, not ops.
"""

from __future__ import annotations

import pytest
import torch
from helpers.differential import leaves_of
from helpers.integration import (
    SEQUENCE_OPS,
    TORCH_WARNINGS,
    assert_equal,
    make,
    plain,
    public,
    representative,
    run,
    weigh,
)

from statescan.dispatch import all_backends
from statescan.testing import OPS

BACKENDS = [b.name for b in all_backends() if b.availability().ok]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", representative(*OPS), ids=str)
def test_values_and_dtypes_do_not_change(case, backend):
    """Forward and backward inside the context give the bits of a call outside of it."""
    if backend == "cpu" and "complex" in case.name:
        pytest.skip("the cpu backend has no complex states, and says so: tests/dispatch")
    kwargs = {**make(case.op, case.name), "backend": backend}
    expected = run(case.op, public(case.op), kwargs)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found = run(case.op, public(case.op), kwargs)
        assert_equal(found, expected)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_backward_outside_of_the_context(op):
    kwargs = make(op, "bare")
    leaves = leaves_of(kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = weigh(public(op)(**{**kwargs, **leaves}))
    loss.backward()
    expected = run(op, public(op), kwargs)
    assert_equal(
        {f"d{n}": t.grad for n, t in leaves.items()}, {f"d{n}": expected[f"d{n}"] for n in leaves}
    )


def test_double_backward_is_not_cast_either():
    kwargs = make("mamba_inner", "usual", torch.float32)

    def second(function):
        leaves = leaves_of(kwargs)
        first = torch.autograd.grad(
            weigh(function(**{**kwargs, **leaves})), list(leaves.values()), create_graph=True
        )
        return torch.autograd.grad(weigh([g * g for g in first]), list(leaves.values()))

    expected = second(plain("mamba_inner"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = second(public("mamba_inner"))
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("op", OPS)
def test_compiled_code_is_not_cast_either(op):
    kwargs = make(op, "bare")
    torch._dynamo.reset()
    function = torch.compile(lambda **kw: public(op)(**kw), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(op, function, kwargs)
    assert_equal(found, run(op, public(op), kwargs))


def test_layers_around_the_op_are_cast_as_usual():
    """A linear layer's bfloat16 result is taken with float32 parameters."""
    kwargs = make("causal_conv1d", "bias_silu")
    linear = torch.nn.Linear(17, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = public("causal_conv1d")(**{**kwargs, "x": linear(kwargs["x"])})
    assert out.dtype == torch.bfloat16
