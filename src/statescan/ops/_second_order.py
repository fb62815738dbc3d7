# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the gradients of a sequence op, through its differentiable plain reference.

First-order gradients come from backends, never from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from statescan.errors import GradientError
from statescan.ops._library import fail_forward_mode, map_over, named

if TYPE_CHECKING:
    from statescan.ops._register import SequenceOp


def second_order(
    op: SequenceOp,
    options: Sequence[Any],
    douts: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    second: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Gradients of the first-order gradients.

    Args:
        op: The op.
        options: Its options.
        douts: Gradients of the results, as the backward received them.
        inputs: The op's inputs.
        second: Gradient of each first-order gradient, in the order of ``op.gradient_names``.

    Returns:
        Gradients of ``douts`` and of those of ``inputs`` that have one, absent ones left out.
    """
    with torch.enable_grad(), torch.autocast(douts[0].device.type, enabled=False):
        leaves = [
            tensor if tensor is None or name in op.index_inputs else _leaf(tensor)
            for name, tensor in zip(op.input_names, inputs, strict=True)
        ]
        seeds = [_leaf(dout) for dout in douts]
        optional = op.gradient_inputs(leaves)
        wanted = [leaf for leaf in optional if leaf is not None]
        results = op.reference(leaves, options)
        first = _gradients(zip(results, seeds, strict=True), wanted, create_graph=True)
        given = [s for s, leaf in zip(second, optional, strict=True) if leaf is not None]
        return _gradients(zip(first, given, strict=True), [*seeds, *wanted])


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _gradients(
    pairs: Iterable[tuple[Tensor, Tensor | None]], sources: list[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of results with their seeds, zeros where there are none.

    A result without a graph does not depend on the sources: without tokens it is made of zeros.
    """
    used = [(result, seed) for result, seed in pairs if seed is not None and result.requires_grad]
    if not used:
        return tuple(torch.zeros_like(source) for source in sources)
    results, seeds = zip(*used, strict=True)
    return torch.autograd.grad(
        *(results, sources, seeds), create_graph=create_graph, materialize_grads=True
    )


def make_second(op: SequenceOp) -> Any:
    """The backward of the backward; where derivatives end."""
    num_options, num_grads = len(op.options), len(op.gradient_names)
    num_outputs = op.num_outputs

    class Second(Function):
        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            options, tensors = args[:num_options], args[num_options:]
            douts, inputs = tensors[:num_outputs], tensors[num_outputs:-num_grads]
            return second_order(op, options, douts, inputs, tensors[-num_grads:])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
            raise GradientError(
                f"{op.name}: differentiated three times.\n"
                "This op has derivatives of first and second order.\n"
                f"For higher ones call statescan.reference.{op.name}_ref."
            )

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            fail_forward_mode(op.name)

        @classmethod
        def vmap(cls, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return map_over(cls.apply, info.batch_size, in_dims, args)

    return named(f"{op.name}_second", Second)
