# SPDX-License-Identifier: Apache-2.0
"""Ordinary autograd around the ops: orders of differentiation, saved tensors, single inputs.

Values of first-order gradients are compared in test_cases.py; torch.func is in test_vmap.py.
"""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from helpers.differential import leaves_of
from helpers.integration import (
    SEQUENCE_OPS,
    TORCH_WARNINGS,
    RecordOps,
    as_tuple,
    assert_equal,
    make,
    plain,
    public,
    representative,
    run_sequence,
    weigh,
)
from helpers.op_inputs import conv_inputs, inner_inputs, scan_inputs
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

import statescan
from statescan import ops
from statescan.backends.base import Backend
from statescan.errors import GradientError

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)

SMALL = {
    "selective_scan": scan_inputs(2, 2, 3, 2, ngroups=2, dtype=torch.float64),
    "causal_conv1d": conv_inputs(2, 2, 3, 3, dtype=torch.float64),
    "mamba_inner": inner_inputs(
        *(1, 2, 3, 2, 2, 1, 2),
        dtype=torch.float64,
        options="conv_bias D dt_bias b_proj_bias out_proj_weight out_proj_bias b_norm_weight "
        "c_norm_weight dt_norm_weight conv_initial_states initial_states",
    ),
}


def positional(op, kwargs):
    """The op as a function of its float inputs only, and these inputs as leaves."""
    leaves, implementation = leaves_of(kwargs), public(op)

    def call(*tensors, function=implementation):
        return as_tuple(function(**{**kwargs, **dict(zip(leaves, tensors, strict=True))}))

    return call, tuple(leaves.values())


@pytest.mark.parametrize("batched", [False, True], ids=["plain", "batched"])
@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_gradcheck(op, batched):
    """First-order gradients equal finite differences; batched: also with vmap over the backward."""
    call, tensors = positional(op, SMALL[op])
    assert torch.autograd.gradcheck(call, tensors, check_batched_grad=batched, fast_mode=True)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_gradgradcheck(op):
    """Second-order gradients equal finite differences of the first-order ones."""
    call, tensors = positional(op, SMALL[op])
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def second_order(function, kwargs):
    """Gradients of a function of all first-order gradients."""
    leaves = leaves_of(kwargs)
    results = function(**{**kwargs, **leaves})
    first = torch.autograd.grad(
        weigh(results).sin(), tuple(leaves.values()), create_graph=True, allow_unused=True
    )
    penalty = weigh([g * g for g in first if g is not None])
    second = torch.autograd.grad(penalty, tuple(leaves.values()), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves.values(), second)]


@pytest.mark.parametrize("case", representative(*SEQUENCE_OPS), ids=str)
def test_double_backward_equals_that_of_the_reference(case):
    kwargs = make(case.op, case.name, torch.float64)
    expected = second_order(plain(case.op), kwargs)
    for gradient, other in zip(second_order(public(case.op), kwargs), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_double_backward_keeps_each_inputs_dtype(dtype):
    kwargs = make("selective_scan", "mixed", dtype)
    for gradient, leaf in zip(
        second_order(statescan.selective_scan, kwargs), leaves_of(kwargs).values(), strict=True
    ):
        assert gradient.dtype == leaf.dtype
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("case", ["no_tokens", "no_rows", "no_channels", "one_token"])
def test_double_backward_of_empty_inputs(case):
    for op in ("selective_scan", "causal_conv1d"):
        kwargs = make(op, case, torch.float64)
        expected = second_order(plain(op), kwargs) if case == "one_token" else None
        found = second_order(public(op), kwargs)
        for i, (gradient, leaf) in enumerate(zip(found, leaves_of(kwargs).values(), strict=True)):
            assert gradient.shape == leaf.shape
            if expected is not None:
                torch.testing.assert_close(gradient, expected[i])


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_third_order_raises(op):
    kwargs = SMALL[op]
    leaves = leaves_of(kwargs)
    values = list(leaves.values())
    first = torch.autograd.grad(
        weigh(public(op)(**{**kwargs, **leaves})).sin(), values, create_graph=True
    )
    second = torch.autograd.grad(weigh([g.sin() for g in first]), values, create_graph=True)
    with pytest.raises(GradientError, match="differentiated three times"):
        weigh([g.sin() for g in second]).backward()


def test_hessian_by_reverse_over_reverse():
    call, tensors = positional("selective_scan", SMALL["selective_scan"])

    def loss(function):
        return lambda A: weigh(call(*tensors[:2], A, *tensors[3:], function=function)).sin()

    A = tensors[2].detach()
    found = functional.hessian(loss(statescan.selective_scan), A)
    torch.testing.assert_close(found, functional.hessian(loss(plain("selective_scan")), A))
    vectorised = functional.hessian(loss(statescan.selective_scan), A, vectorize=True)
    torch.testing.assert_close(vectorised, found)
    vector = torch.linspace(-1, 1, A.numel(), dtype=A.dtype).reshape(A.shape)
    _, product = functional.jvp(loss(statescan.selective_scan), A, vector)
    expected = functional.jvp(loss(plain("selective_scan")), A, vector)[1]
    torch.testing.assert_close(product, expected)


class TestForwardModeRaises:
    """Each way into forward mode raises instead of dropping tangents (contracts.md)."""

    match = "carries a forward-mode tangent"

    @pytest.mark.parametrize("op", SEQUENCE_OPS)
    @pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
    def test_dual_numbers(self, op, context):
        call, tensors = positional(op, SMALL[op])
        for index in range(len(tensors)):
            values = [tensor.detach() for tensor in tensors]
            with forward_ad.dual_level(), context():
                values[index] = forward_ad.make_dual(values[index], torch.ones_like(values[index]))
                with pytest.raises(GradientError, match=self.match):
                    call(*values)

    def test_dual_input_that_requires_grad(self):
        call, tensors = positional("selective_scan", SMALL["selective_scan"])
        with forward_ad.dual_level():
            x = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
            with pytest.raises(GradientError, match=self.match):
                call(x, *tensors[1:])

    def test_dual_gradient_of_the_output(self):
        call, tensors = positional("selective_scan", SMALL["selective_scan"])
        out, _ = call(*tensors)
        with forward_ad.dual_level():
            dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
            with pytest.raises(GradientError, match=self.match):
                torch.autograd.grad(out, tensors, dout)

    def test_a_level_without_tangents_is_no_obstacle(self):
        call, tensors = positional("selective_scan", SMALL["selective_scan"])
        expected = torch.autograd.grad(weigh(call(*tensors)), tensors)
        with forward_ad.dual_level():
            found = torch.autograd.grad(weigh(call(*tensors)), tensors)
        for gradient, other in zip(found, expected, strict=True):
            assert_equal({"": gradient}, {"": other})

    @pytest.mark.parametrize("op", SEQUENCE_OPS)
    @pytest.mark.parametrize(
        "transform", ["jvp", "jacfwd", "hessian", "jacrev of jacfwd", "jvp of grad", "linearize"]
    )
    def test_torch_func(self, op, transform):
        call, tensors = positional(op, SMALL[op])
        values = [tensor.detach() for tensor in tensors]

        def loss(x):
            return weigh(call(x, *values[1:])).sin()

        ways = {
            "jvp": lambda: torch.func.jvp(loss, (values[0],), (values[0],)),
            "jacfwd": lambda: torch.func.jacfwd(loss)(values[0]),
            "hessian": lambda: torch.func.hessian(loss)(values[0]),
            "jacrev of jacfwd": lambda: torch.func.jacrev(torch.func.jacfwd(loss))(values[0]),
            "jvp of grad": lambda: torch.func.jvp(
                torch.func.grad(loss), (values[0],), (values[0],)
            ),
            "linearize": lambda: torch.func.linearize(loss, values[0]),
        }
        with pytest.raises(GradientError, match=self.match):
            ways[transform]()

    def test_jvp_of_vjp(self):
        call, tensors = positional("selective_scan", SMALL["selective_scan"])
        x, *others = (tensor.detach() for tensor in tensors)
        out, pull_back = torch.func.vjp(lambda x: call(x, *others)[0], x)
        with pytest.raises(GradientError, match=self.match):
            torch.func.jvp(pull_back, (out,), (out,))

    def test_vectorised_forward_jacobian(self):
        call, tensors = positional("causal_conv1d", SMALL["causal_conv1d"])
        x, *others = (tensor.detach() for tensor in tensors)
        with pytest.raises(GradientError, match=self.match):
            functional.jacobian(
                *(lambda x: call(x, *others)[0], x), vectorize=True, strategy="forward-mode"
            )

    @pytest.mark.parametrize("op", ["selective_scan", "causal_conv1d"])
    def test_registered_op(self, op):
        """The op itself, as an exported program calls it, does not drop tangents either."""
        kwargs = SMALL[op]
        with RecordOps() as recorded, torch.no_grad():
            public(op)(**kwargs)
        ((registered, args),) = recorded.calls
        with forward_ad.dual_level():
            x = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
            with pytest.raises(GradientError, match=self.match):
                registered(x, *args[1:])


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_each_input_may_be_the_only_one_that_requires_grad(op):
    """B49: one gradient a time equals its part of all gradients at once, for every input."""
    kwargs = SMALL[op]
    together = run_sequence(public(op), kwargs)
    for name, leaf in leaves_of(kwargs).items():
        loss = weigh(public(op)(**{**kwargs, name: leaf}))
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert_equal({name: gradient}, {name: together[f"d{name}"]})


@pytest.mark.parametrize("op", ["selective_scan", "causal_conv1d"])
def test_every_subset_of_optional_inputs_gets_gradients(op):
    """B49, B51: all combinations of optional inputs given or not, each with its gradient."""
    kwargs = SMALL[op]
    optional = [n for n in ("D", "z", "dt_bias", "bias", "initial_states") if n in kwargs]
    for count in range(len(optional) + 1):
        for kept in itertools.combinations(optional, count):
            left_out = set(optional) - set(kept)
            chosen = {name: value for name, value in kwargs.items() if name not in left_out}
            found, expected = (run_sequence(f, chosen) for f in (public(op), plain(op)))
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("op", SEQUENCE_OPS)
@pytest.mark.parametrize("which", [1, -1])
def test_gradient_through_final_states_only(op, which):
    """B13: the loss touches a final state and not the output."""
    kwargs = SMALL[op]

    def states_only(function):
        return lambda **kw: function(**kw)[which]

    found = run_sequence(states_only(public(op)), kwargs)
    expected = run_sequence(states_only(plain(op)), kwargs)
    x = "dxz" if op == "mamba_inner" else "dx"
    assert float(found[x].abs().max()) > 0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_the_same_tensor_may_be_given_twice(op):
    """Gradients of one tensor in two places add up."""
    pair = {"selective_scan": ("x", "z"), "causal_conv1d": ("bias", "bias"),
            "mamba_inner": ("D", "dt_bias")}[op]  # fmt: skip
    kwargs = SMALL[op]
    leaf = kwargs[pair[0]].detach().requires_grad_()
    both = {**kwargs, pair[0]: leaf, pair[1]: leaf}
    (found,) = torch.autograd.grad(weigh(public(op)(**both)), leaf)
    (expected,) = torch.autograd.grad(weigh(plain(op)(**both)), leaf)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(op, use_reentrant):
    call, tensors = positional(op, SMALL[op])
    straight = torch.autograd.grad(weigh(call(*tensors)), tensors)
    again = checkpoint(call, *tensors, use_reentrant=use_reentrant)
    weigh(again).backward()
    for tensor, gradient in zip(tensors, straight, strict=True):
        assert_equal({"": tensor.grad}, {"": gradient})


@pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts"),
    reason=f"torch {torch.__version__} has no selective checkpointing",
)
@pytest.mark.parametrize("save", [True, False], ids=["save", "recompute"])
def test_selective_checkpointing_sees_the_op(save):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    op = torch.ops.statescan.selective_scan_fwd.default

    def policy(context, function, *args, **kwargs):
        kept = function is op and save
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    call, tensors = positional("selective_scan", SMALL["selective_scan"])
    straight = torch.autograd.grad(weigh(call(*tensors)), tensors)
    with RecordOps() as recorded:
        results = checkpoint(
            *(call, *tensors),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        found = torch.autograd.grad(weigh(results), tensors)
    assert recorded.names().count("selective_scan_fwd") == (1 if save else 2)
    for gradient, expected in zip(found, straight, strict=True):
        assert_equal({"": gradient}, {"": expected})


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_saved_tensor_hooks_see_everything_saved(op):
    """Offloading works: what the backward reads has passed through the hooks."""
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.detach().clone()

    plainly = run_sequence(public(op), SMALL[op])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooked = run_sequence(public(op), SMALL[op])
    assert_equal(hooked, plainly)
    inputs = {tuple(tensor.shape) for tensor in leaves_of(SMALL[op]).values()}
    assert inputs <= set(packed)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_retained_graph_gives_the_same_bits_again(op):
    call, tensors = positional(op, SMALL[op])
    loss = weigh(call(*tensors))
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    for gradient, again in zip(first, torch.autograd.grad(loss, tensors), strict=True):
        assert_equal({"": again}, {"": gradient})
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_change_of_a_saved_input_is_noticed(op):
    call, tensors = positional(op, SMALL[op])
    loss = weigh(call(*tensors))
    with torch.no_grad():
        tensors[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_results_may_be_changed_in_place(op):
    call, tensors = positional(op, SMALL[op])
    expected = torch.autograd.grad(weigh([r * 2 for r in call(*tensors)]), tensors)
    changed = torch.autograd.grad(weigh([r.mul_(2) for r in call(*tensors)]), tensors)
    for gradient, other in zip(changed, expected, strict=True):
        assert_equal({"": gradient}, {"": other})


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_channel_last_results_may_be_changed_in_place(op):
    """They are no views of other memory, which torch would refuse to change under autograd."""
    kwargs = make(op, "bare", torch.float64)
    name = "xz" if op == "mamba_inner" else "x"
    x = kwargs[name].transpose(1, 2).contiguous().transpose(1, 2)
    kwargs |= {name: x, "return_final_states": True}
    factor = torch.tensor(2.0, requires_grad=True)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            results = public(op)(**kwargs)
        weigh([result.mul_(factor) for result in results]).backward()
    changed = public(op)(**{**kwargs, name: x.requires_grad_()})
    weigh([result.mul_(2) for result in changed]).backward()
    expected = run_sequence(public(op), kwargs)[f"d{name}"]
    torch.testing.assert_close(x.grad, 2 * expected)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_graph_is_freed_without_the_garbage_collector(op):
    """No reference cycle keeps activations alive after the last result is gone."""
    call, tensors = positional(op, SMALL[op])
    gc.collect()
    gc.disable()
    try:
        doubled = tensors[0] * 1
        watched = weakref.ref(doubled)
        results = call(doubled, *tensors[1:])
        del doubled, results
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("op", SEQUENCE_OPS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_grad_mode(op, context):
    kwargs = SMALL[op]
    with context(), RecordOps() as recorded:
        results = as_tuple(public(op)(**{**kwargs, **leaves_of(kwargs)}))
    assert not any(result.requires_grad for result in results)
    ((_, args),) = recorded.calls
    if op != "causal_conv1d":
        assert args[-2] is False, "save_states"
    with RecordOps() as recorded:
        public(op)(**kwargs)
    ((_, args),) = recorded.calls
    if op != "causal_conv1d":
        assert args[-2] is False, "save_states without an input that requires grad"


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_grad_mode_inside_inference_mode_records_nothing(op):
    """As torch's own ops: the outer mode wins, and the call works."""
    kwargs = {**SMALL[op], **leaves_of(SMALL[op])}
    with torch.inference_mode(), torch.enable_grad():
        found = as_tuple(public(op)(**kwargs))
        assert not torch.sin(next(iter(leaves_of(SMALL[op]).values()))).requires_grad
    with torch.no_grad():
        expected = as_tuple(public(op)(**kwargs))
    for result, other in zip(found, expected, strict=True):
        assert not result.requires_grad
        assert torch.equal(result, other)


@pytest.mark.parametrize("expand", [True, False], ids=["one_number", "transposed"])
@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_output_gradients_of_any_strides(op, expand):
    """B30: sum().backward() gives a dout of strides 0; a transpose gives another order."""
    call, tensors = positional(op, SMALL[op])
    out = call(*tensors)[0]
    dout = out.new_ones(()).expand(out.shape)
    if not expand:
        dout = torch.randn(out.shape[::-1], dtype=out.dtype).permute(2, 1, 0)
    found = torch.autograd.grad(out, tensors, dout, retain_graph=True, allow_unused=True)
    expected = torch.autograd.grad(out, tensors, dout.contiguous(), allow_unused=True)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_training_twice_accumulates(op):
    call, tensors = positional(op, SMALL[op])
    once = torch.autograd.grad(weigh(call(*tensors)), tensors)
    for _ in range(2):
        weigh(call(*tensors)).backward()
    for tensor, gradient in zip(tensors, once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * gradient)


UPDATES = {
    "selective_state_update": ("ssm_state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"),
    "causal_conv1d_update": ("x", "conv_state", "weight", "bias"),
}


@pytest.mark.parametrize(("op", "name"), [(op, n) for op, names in UPDATES.items() for n in names])
def test_decode_step_refuses_each_input_that_requires_grad(op, name):
    """B63: no silent None gradient; and nothing is written before the refusal."""
    kwargs = make(op, "usual" if op == "selective_state_update" else "bias_silu")
    state = "ssm_state" if op == "selective_state_update" else "conv_state"
    before = kwargs[state].clone()
    grown = {**kwargs, name: kwargs[name].detach().requires_grad_()}
    with pytest.raises(GradientError, match=r"torch\.no_grad\(\)"):
        getattr(ops, op)(**grown)
    assert torch.equal(kwargs[state], before)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not getattr(ops, op)(**grown).requires_grad


@pytest.mark.parametrize("op", sorted(UPDATES))
def test_autograd_notices_what_a_decode_step_writes(op, monkeypatch):
    """Also when a kernel writes behind torch's back: a tensor saved before is seen to change."""
    monkeypatch.setattr(Backend, "function", lambda self, op, direction: lambda *args: None)
    kwargs = make(op, "several_strided" if op == "selective_state_update" else "out")
    state = "ssm_state" if op == "selective_state_update" else "conv_state"
    factor = torch.ones((), requires_grad=True)
    loss = (kwargs[state] * factor).sum()
    with torch.no_grad():
        getattr(ops, op)(**kwargs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert kwargs["out"]._version > 0
    with torch.inference_mode():
        own = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
        getattr(ops, op)(**own)


@pytest.mark.parametrize("op", sorted(UPDATES))
def test_decode_step_refuses_tangents(op):
    kwargs = make(op, "bare")
    with forward_ad.dual_level(), torch.no_grad():
        x = forward_ad.make_dual(kwargs["x"], torch.ones_like(kwargs["x"]))
        with pytest.raises(GradientError, match="forward-mode"):
            getattr(ops, op)(**{**kwargs, "x": x})
