# SPDX-License-Identifier: Apache-2.0
"""torch.vmap and the reverse-mode transforms of torch.func, alone and inside one another.

Forward mode, which is refused, is in test_autograd.py.
"""

from __future__ import annotations

import pytest
import torch
from helpers.differential import tensors_of
from helpers.integration import (
    SEQUENCE_OPS,
    TORCH_WARNINGS,
    UPDATES,
    as_tuple,
    make,
    plain,
    public,
    weigh,
)
from torch.func import grad, jacrev, vjp, vmap
from torch.utils._pytree import tree_leaves

from statescan.errors import GradientError

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)

CASES = {
    "selective_scan": "all_options",
    "causal_conv1d": "all_options",
    "mamba_inner": "norms_out_proj",
}
SMALL = {"selective_scan": "two_tokens", "causal_conv1d": "shorter_than_width",
         "mamba_inner": "one_token"}  # fmt: skip
WEIGHTS = ("A", "D", "dt_bias", "weight", "bias", "conv_weight", "x_proj_weight", "out_proj_weight")
COPIES = 3


def setting(op, name):
    """The op as a scalar function of its tensors for each implementation, and these tensors."""
    kwargs = make(op, name, torch.float64)
    tensors = tensors_of(kwargs)

    def losses(function):
        return lambda *values: weigh(
            function(**{**kwargs, **dict(zip(tensors, values, strict=True))})
        ).sin()

    return losses(public(op)), losses(plain(op)), tensors


def copies(tensor):
    """Different values for each element of the mapped axis, which lies in front."""
    return torch.stack([tensor * (1 + index / 8) for index in range(COPIES)])


def assert_same_leaves(found, expected):
    for value, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-9)


def one_by_one(function, values, dims):
    """What vmap promises: the function on each element, stacked."""
    rows = [
        function(*(v if d is None else v.select(d, index) for v, d in zip(values, dims)))
        for index in range(COPIES)
    ]
    return [torch.stack(column) for column in zip(*map(tree_leaves, rows), strict=True)]


def arrangements(tensors):
    """in_dims, and tensors for them: everything mapped, each kind alone, the axis moved."""
    names = list(tensors)
    yield "all", dict.fromkeys(names, 0)
    yield "activation", {name: 0 if name in ("x", "xz") else None for name in names}
    yield "weights", {name: 0 if name in WEIGHTS else None for name in names}
    yield "last axis", {name: -1 if name in ("x", "xz", *WEIGHTS) else None for name in names}


@pytest.mark.parametrize("kind", ["all", "activation", "weights", "last axis"])
@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_vmap_and_vmap_of_grad(op, kind):
    loss, _, tensors = setting(op, CASES[op])
    dims = tuple(dict(arrangements(tensors))[kind].values())
    values = [
        tensor if dim is None else copies(tensor).movedim(0, dim)
        for tensor, dim in zip(tensors.values(), dims, strict=True)
    ]
    assert_same_leaves(vmap(loss, in_dims=dims)(*values), one_by_one(loss, values, dims))
    gradients = grad(loss, argnums=tuple(range(len(values))))
    found = vmap(gradients, in_dims=dims)(*values)
    assert_same_leaves(found, one_by_one(gradients, values, dims))


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_grad_equals_autograd_of_the_reference(op):
    loss, exact, tensors = setting(op, CASES[op])
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    expected = torch.autograd.grad(exact(*leaves), leaves)
    values = [tensor.detach() for tensor in leaves]
    assert_same_leaves(grad(loss, argnums=tuple(range(len(values))))(*values), expected)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_grad_of_vmap(op):
    loss, _, tensors = setting(op, CASES[op])
    values = [copies(tensor) for tensor in tensors.values()]
    found = grad(lambda *v: vmap(loss)(*v).sum(), argnums=tuple(range(len(values))))(*values)
    gradients = grad(loss, argnums=tuple(range(len(values))))
    assert_same_leaves(found, one_by_one(gradients, values, (0,) * len(values)))


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_grad_of_grad_and_vmap_of_both(op):
    """Second order through torch.func equals torch.func through the reference."""
    loss, exact, tensors = setting(op, SMALL[op])
    numbers = tuple(range(len(tensors)))

    def penalty(function):
        return lambda *v: sum(g.square().sum() for g in grad(function, argnums=numbers)(*v))

    values = list(tensors.values())
    found = grad(penalty(loss), argnums=numbers)(*values)
    assert_same_leaves(found, grad(penalty(exact), argnums=numbers)(*values))
    mapped = [copies(value) for value in values]
    twice = grad(penalty(loss), argnums=numbers)
    assert_same_leaves(vmap(twice)(*mapped), one_by_one(twice, mapped, (0,) * len(mapped)))


def test_third_order_raises():
    loss, _, tensors = setting("causal_conv1d", "all_options")
    values = list(tensors.values())
    once = grad(loss)
    twice = grad(lambda *v: once(*v).square().sum())
    with pytest.raises(GradientError, match="differentiated three times"):
        grad(lambda *v: twice(*v).square().sum())(*values)


def test_jacrev_and_nested_vmap():
    loss, exact, tensors = setting("selective_scan", SMALL["selective_scan"])
    values = list(tensors.values())
    found = jacrev(jacrev(loss, argnums=2), argnums=2)(*values)
    assert_same_leaves(found, jacrev(jacrev(exact, argnums=2), argnums=2)(*values))
    mapped = [torch.stack([copies(v), -copies(v)]) for v in values]
    expected = torch.stack([vmap(loss)(*[m[i] for m in mapped]) for i in range(2)])
    assert_same_leaves(vmap(vmap(loss))(*mapped), expected)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_vjp_of_all_results(op):
    kwargs = make(op, CASES[op], torch.float64)
    tensors = tensors_of(kwargs)

    def results(*values):
        return as_tuple(public(op)(**{**kwargs, **dict(zip(tensors, values, strict=True))}))

    outputs, pull_back = vjp(results, *tensors.values())
    cotangents = tuple(torch.randn_like(output) for output in outputs)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
    expected = torch.autograd.grad(results(*leaves), leaves, cotangents)
    assert_same_leaves(pull_back(cotangents), expected)
    batches = tuple(torch.stack([c, 2 * c]) for c in cotangents)
    assert_same_leaves(vmap(pull_back)(batches), [torch.stack([g, 2 * g]) for g in expected])


def test_index_inputs_may_be_mapped():
    """Each element of the mapped axis may have its own packing."""
    kwargs = make("causal_conv1d", "seq_idx", torch.float64)
    x, seq_idx = kwargs["x"].nan_to_num(), kwargs["seq_idx"]

    def conv(x, seq_idx):
        return public("causal_conv1d")(x, kwargs["weight"], seq_idx=seq_idx)

    xs, packings = torch.stack([x, x]), torch.stack([seq_idx, seq_idx.flip(1)])
    expected = torch.stack([conv(x, packing) for packing in packings])
    assert_same_leaves(vmap(conv)(xs, packings), expected)
    assert_same_leaves(vmap(conv, in_dims=(None, 0))(x, packings), expected)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_nothing_to_map_over(op):
    _, _, tensors = setting(op, CASES[op])
    kwargs = make(op, CASES[op], torch.float64)

    def results(*values):
        return as_tuple(public(op)(**{**kwargs, **dict(zip(tensors, values, strict=True))}))

    empty = [tensor.new_empty((0, *tensor.shape)) for tensor in tensors.values()]
    shapes = [result.shape for result in results(*tensors.values())]
    assert [r.shape for r in vmap(results)(*empty)] == [(0, *shape) for shape in shapes]


def test_backward_under_vmap_of_ordinary_autograd():
    """is_grads_batched maps over the plain backward."""
    kwargs = make("selective_scan", "all_options", torch.float64)
    x = kwargs["x"].requires_grad_()
    out, _ = public("selective_scan")(**kwargs)
    douts = torch.randn(COPIES, *out.shape, dtype=out.dtype)
    (found,) = torch.autograd.grad(out, x, douts, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(out, x, dout, retain_graph=True)[0] for dout in douts]
    assert_same_leaves(found, torch.stack(rows))


@pytest.mark.parametrize("transform", [vmap, grad], ids=["vmap", "grad"])
@pytest.mark.parametrize("op", UPDATES)
def test_decode_steps_refuse_transforms(op, transform):
    kwargs = make(op, "bare")
    state = "ssm_state" if op == "selective_state_update" else "conv_state"
    before = kwargs[state].clone()

    def step(x):
        return public(op)(**{**kwargs, "x": x}).sum()

    x = copies(kwargs["x"]) if transform is vmap else kwargs["x"]
    with pytest.raises(GradientError, match=r"torch\.func transform"), torch.no_grad():
        transform(step)(x)
    assert torch.equal(kwargs[state], before)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch is older than register_vmap (2.5)"
)
class TestInsideCompile:
    """The transforms inside a compiled function: right, or refused in words; never silent."""

    @pytest.fixture(autouse=True)
    def fresh_dynamo(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_vmap(self):
        loss, _, tensors = setting("selective_scan", CASES["selective_scan"])
        values = [copies(tensor) for tensor in tensors.values()]
        compiled = torch.compile(lambda *v: vmap(loss)(*v), backend="aot_eager", fullgraph=True)
        assert_same_leaves(compiled(*values), vmap(loss)(*values))

    @pytest.mark.parametrize("transform", ["grad", "jvp"])
    def test_others_are_refused(self, transform):
        loss, _, tensors = setting("causal_conv1d", CASES["causal_conv1d"])
        values = tuple(tensors.values())
        ways = {"grad": lambda *v: grad(loss)(*v), "jvp": lambda *v: torch.func.jvp(loss, v, v)}
        compiled = torch.compile(ways[transform], backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=r"causal_conv1d: .*(torch\.func|forward-mode)"):
            compiled(*values)

    @pytest.mark.parametrize("op", UPDATES)
    def test_decode_steps_refuse(self, op):
        kwargs = make(op, "bare")

        def step(x):
            return public(op)(**{**kwargs, "x": x}).sum()

        compiled = torch.compile(lambda x: vmap(step)(x), backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=r"torch\.func transform"), torch.no_grad():
            compiled(copies(kwargs["x"]))
