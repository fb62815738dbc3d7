# SPDX-License-Identifier: Apache-2.0
"""The autograd functions around a registered sequence op: for eager calls and for transforms.

They move tensors between torch and the registered ops; no shapes, checks or arithmetic here.
Argument order of every function: backend, options, then tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from statescan.ops._library import (
    below_autograd,
    fail_forward_mode,
    forward_mode_active,
    map_over,
    named,
    refuse_forward_mode,
    transforms_active,
)
from statescan.ops._second_order import make_second

if TYPE_CHECKING:
    from statescan.ops._register import SequenceOp


class Functions(NamedTuple):
    """What ``register`` needs of the functions of one op."""

    eager: Any
    """Returns the user's results; the least overhead, for ordinary autograd only."""

    transformable: Any
    """Returns these and the saved tensors; works under torch.func and while tracing."""


def _dress(op: SequenceOp, gradients: Sequence[Tensor | None], inputs: Sequence[Any]) -> list[Any]:
    """Gradients for every input: None for index inputs and absent ones."""
    found = iter(gradients)
    dressed: list[Any] = []
    for name, value in zip(op.input_names, inputs, strict=True):
        gradient = None if name in op.index_inputs else next(found)
        dressed.append(None if value is None else gradient)
    return dressed


def _make_backward(op: SequenceOp, backward: Any) -> Any:
    """The backward as a function of its own, so that it can be differentiated once more."""
    num_options, num_inputs, num_outputs = len(op.options), len(op.inputs), op.num_outputs
    second_function = make_second(op)

    class Backward(Function):
        @staticmethod
        def forward(backend: str, *args: Any) -> tuple[Tensor, ...]:
            return tuple(backward(*args[num_options:], *args[:num_options], backend))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.options = inputs[1 : 1 + num_options]
            ctx.save_for_backward(*inputs[1 + num_options :][: num_outputs + num_inputs])

        @staticmethod
        def backward(ctx: Any, *second: Tensor | None) -> tuple[Any, ...]:
            saved = ctx.saved_tensors
            found = second_function.apply(*ctx.options, *saved, *second)
            remaining = iter(found[num_outputs:])
            given = op.gradient_inputs(saved[num_outputs:])
            gradients = [None if tensor is None else next(remaining) for tensor in given]
            dinputs = _dress(op, gradients, saved[num_outputs:])
            head = [None] * (1 + num_options)
            return (*head, *found[:num_outputs], *dinputs, *[None] * op.num_saved)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            fail_forward_mode(op.name)

        @classmethod
        def vmap(cls, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return map_over(cls.apply, info.batch_size, in_dims, args)

    return named(f"{op.name}_bwd", Backward)


def _is_transformed(op: str, tensors: Sequence[Tensor | None]) -> bool:
    """Whether a backward is itself differentiated or mapped over; refuses forward mode."""
    if torch.compiler.is_compiling():
        return False
    if forward_mode_active():
        refuse_forward_mode(op, tensors)
    return torch.is_grad_enabled() or transforms_active()


def _make_eager(op: SequenceOp, forward: Any, backward: Any, backward_function: Any) -> Any:
    """The road of ordinary autograd: least overhead (docs/design/0003)."""
    num_options, num_inputs, num_outputs = len(op.options), len(op.inputs), op.num_outputs
    saving = (True,) * (op.num_saved > 0)

    class Eager(Function):
        @staticmethod
        def forward(ctx: Any, backend: str, *args: Any) -> tuple[Tensor, ...]:
            options, inputs = args[:num_options], args[num_options:]
            with below_autograd():
                results = forward(*inputs, *options, *saving, backend)
            ctx.backend, ctx.options = backend, options
            ctx.save_for_backward(*inputs, *results[num_outputs:])
            return tuple(results[:num_outputs])

        @staticmethod
        def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
            saved = ctx.saved_tensors
            gradients: Sequence[Tensor]
            if _is_transformed(op.name, (*douts, *saved)):
                gradients = backward_function.apply(ctx.backend, *ctx.options, *douts, *saved)
            else:
                gradients = backward(*douts, *saved, *ctx.options, ctx.backend)
            return (*[None] * (1 + num_options), *_dress(op, gradients, saved[:num_inputs]))

    return named(op.name, Eager)


def _make_transformable(op: SequenceOp, forward: Any, backward_function: Any) -> Any:
    """The road of torch.func and of tracing: setup_context style, with a vmap rule."""
    num_options, num_inputs, num_outputs = len(op.options), len(op.inputs), op.num_outputs
    saving = (True,) * (op.num_saved > 0)

    class Transformable(Function):
        @staticmethod
        def forward(backend: str, *args: Any) -> tuple[Tensor, ...]:
            with below_autograd():
                return tuple(forward(*args[num_options:], *args[:num_options], *saving, backend))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.backend, ctx.options = inputs[0], inputs[1 : 1 + num_options]
            kept = output[num_outputs:]
            ctx.mark_non_differentiable(*kept)
            ctx.save_for_backward(*inputs[1 + num_options :], *kept)

        @staticmethod
        def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
            saved = ctx.saved_tensors
            gradients = backward_function.apply(
                ctx.backend, *ctx.options, *douts[:num_outputs], *saved
            )
            return (*[None] * (1 + num_options), *_dress(op, gradients, saved[:num_inputs]))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            fail_forward_mode(op.name)

        @classmethod
        def vmap(cls, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return map_over(cls.apply, info.batch_size, in_dims, args)

    return named(op.name, Transformable)


def make_functions(op: SequenceOp, forward: Any, backward: Any) -> Functions:
    """Build the autograd functions of ``op`` over its two registered ops."""
    backward_function = _make_backward(op, backward)
    eager = _make_eager(op, forward, backward, backward_function)
    return Functions(eager, _make_transformable(op, forward, backward_function))
