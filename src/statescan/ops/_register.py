# SPDX-License-Identifier: Apache-2.0
"""Turns the description of a sequence op into registered torch ops with gradients.

One ``SequenceOp`` gives ``statescan::<name>_fwd`` and ``_bwd`` (opaque to torch.compile), their
fakes, and ``call``, which picks the cheapest road that keeps gradients (docs/design/0003).
What an op computes is not said here: that is in ``ops/<op>.py`` and its backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from statescan.backends.base import OpRequest
from statescan.backends.outputs import empty_gradients
from statescan.dispatch import select
from statescan.ops._functions import Functions, make_functions
from statescan.ops._library import (
    below_autograd,
    define,
    dtype_name,
    fail_traced_transform,
    forward_mode_active,
    is_exporting,
    map_over,
    refuse_forward_mode,
    transforms_active,
)
from statescan.ops._shapes import check_backend

_SCHEMA_TYPES = {bool: "bool", float: "float", int: "SymInt"}


@dataclass(frozen=True)
class SequenceOp:
    """Everything that registration needs to know of an op over whole sequences.

    Attributes:
        name: The public function's name.
        inputs: Tensor arguments in schema order; a "?" at the end marks an optional one.
        index_inputs: Those of the inputs that hold integers and have no gradient.
        options: Name and type of each further argument, in schema order.
        num_outputs: Results that the user sees and that carry gradients.
        num_saved: Results after those, kept for the backward.
        allocate: (inputs, options, save_states) -> the empty results of the forward.
        reference: (inputs, options) -> the user's results, differentiable plain torch.
        dims: inputs -> sizes by canonical name.
        check_values: inputs -> None; reads index values, raises before any work.
        input_names: Names of the inputs.
        gradient_names: Inputs that have a gradient, in the order of the backward's results.
    """

    name: str
    inputs: tuple[str, ...]
    index_inputs: tuple[str, ...]
    options: tuple[tuple[str, type], ...]
    num_outputs: int
    num_saved: int
    allocate: Callable[[Sequence[Tensor | None], Sequence[Any], bool], tuple[Tensor, ...]]
    reference: Callable[[Sequence[Tensor | None], Sequence[Any]], tuple[Tensor, ...]]
    dims: Callable[[Sequence[Tensor | None]], dict[str, int]]
    check_values: Callable[[Sequence[Tensor | None]], None]
    input_names: tuple[str, ...] = field(init=False)
    gradient_names: tuple[str, ...] = field(init=False)
    _described: tuple[tuple[str, bool, bool], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Worked out once: they are asked for in every call.
        names = tuple(name.removesuffix("?") for name in self.inputs)
        object.__setattr__(self, "input_names", names)
        with_gradient = tuple(name for name in names if name not in self.index_inputs)
        object.__setattr__(self, "gradient_names", with_gradient)
        optional = (name.endswith("?") for name in self.inputs)
        described = tuple((n, n in with_gradient, o) for n, o in zip(names, optional, strict=True))
        object.__setattr__(self, "_described", described)

    def gradient_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Those of ``inputs`` that have a gradient."""
        pairs = zip(self._described, inputs, strict=True)
        return [value for (_, has_gradient, _), value in pairs if has_gradient]

    def request(self, inputs: Sequence[Tensor | None], options: Sequence[Any]) -> OpRequest:
        """The call without its tensors, for dispatch."""
        dtypes, flags, device = {}, set(), "cpu"
        for (name, has_gradient, optional), tensor in zip(self._described, inputs, strict=True):
            if tensor is None:
                continue
            if optional:
                flags.add(name)
            if has_gradient:
                dtypes[name] = dtype_name(tensor.dtype)
                device = tensor.device.type
                if tensor.is_complex():
                    flags.add("complex")
        pairs = zip(self.options, options, strict=True)
        flags.update(name for (name, kind), value in pairs if kind is bool and value)
        return OpRequest(self.name, device, dtypes, self.dims(inputs), frozenset(flags))

    def resolve(self, backend: str, inputs: Sequence[Tensor | None], options: Sequence[Any]) -> str:
        """Name of the backend that a call with ``backend=`` runs on."""
        return select(backend, self.request(inputs, options)).name


Call = Callable[[str, Sequence["Tensor | None"], Sequence[Any]], tuple[Tensor, ...]]


def _schemas(op: SequenceOp) -> tuple[str, str]:
    """Schema text of the forward and the backward op."""
    tensors = [f"Tensor{'?' * name.endswith('?')} {name.removesuffix('?')}" for name in op.inputs]
    options = [f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in op.options]
    results = ", ".join(["Tensor"] * (op.num_outputs + op.num_saved))
    last = ["bool save_states"] * (op.num_saved > 0) + ["str backend"]
    forward = f"{op.name}_fwd({', '.join(tensors + options + last)}) -> ({results})"
    grads = [f"Tensor{'?' * (i > 0)} dout{i}" for i in range(op.num_outputs)]
    saved = [f"Tensor saved{i}" for i in range(op.num_saved)]
    back_results = ", ".join(["Tensor"] * len(op.gradient_names))
    arguments = ", ".join(grads + tensors + saved + options + ["str backend"])
    return forward, f"{op.name}_bwd({arguments}) -> ({back_results})"


def _define_forward(op: SequenceOp, schema: str, differentiable: Any) -> Any:
    n, end = len(op.inputs), len(op.inputs) + len(op.options)

    def run(*args: Any) -> tuple[Tensor, ...]:
        inputs, options = args[:n], args[n:end]
        op.check_values(inputs)
        chosen = select(args[-1], op.request(inputs, options))
        result: tuple[Tensor, ...] = chosen.function(op.name, "fwd")(*args[:-1])
        return result

    def fake(*args: Any) -> tuple[Tensor, ...]:
        save_states = bool(args[-2]) if op.num_saved else False
        return op.allocate(args[:n], args[n:end], save_states)

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return map_over(overload, info.batch_size, in_dims, args)

    overload = define(schema, run, fake, vmap, differentiable)
    return overload


def _define_backward(op: SequenceOp, schema: str) -> Any:
    start, stop = op.num_outputs, op.num_outputs + len(op.inputs)

    def run(*args: Any) -> tuple[Tensor, ...]:
        inputs, options = args[start:stop], args[stop + op.num_saved : -1]
        chosen = select(args[-1], op.request(inputs, options))
        result: tuple[Tensor, ...] = chosen.function(op.name, "bwd")(*args[:-1])
        return result

    def fake(*args: Any) -> tuple[Tensor, ...]:
        return empty_gradients(*op.gradient_inputs(args[start:stop]))

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return map_over(overload, info.batch_size, in_dims, args)

    overload = define(schema, run, fake, vmap)
    return overload


def _wants_gradient(inputs: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)


def _define_pair(op: SequenceOp) -> tuple[Any, Functions]:
    """The forward op with its autograd kernel, over the backward op."""
    n, end = len(op.inputs), len(op.inputs) + len(op.options)

    def differentiable(*args: Any) -> tuple[Tensor, ...]:
        """For whoever calls the registered op itself: traced and exported programs."""
        inputs = args[:n]
        if forward_mode_active():
            refuse_forward_mode(op.name, inputs)
        if not _wants_gradient(inputs):
            with below_autograd():
                untracked: tuple[Tensor, ...] = forward(*args)
                return untracked
        if transforms_active():
            fail_traced_transform(op.name)
        results = functions.transformable.apply(args[-1], *args[n:end], *inputs)
        if op.num_saved and args[-2]:
            return tuple(results)
        unsaved = [tensor.new_empty((0,)) for tensor in results[op.num_outputs :]]
        return (*results[: op.num_outputs], *unsaved)

    forward_schema, backward_schema = _schemas(op)
    forward = _define_forward(op, forward_schema, differentiable)
    backward = _define_backward(op, backward_schema)
    functions = make_functions(op, forward, backward)
    return forward, functions


def register(op: SequenceOp) -> Call:
    """Register ``op`` with torch.library and return its ``call(backend, inputs, options)``."""
    forward, functions = _define_pair(op)
    eager, transformable = functions
    nothing_saved = (False,) * (op.num_saved > 0)

    def traced(
        backend: str, inputs: Sequence[Tensor | None], options: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        # An exported program is for inference first: its autograd kernel saves what it needs.
        saving = (_wants_gradient(inputs) and not is_exporting(),) * (op.num_saved > 0)
        results: tuple[Tensor, ...] = forward(*inputs, *options, *saving, backend)
        return results[: op.num_outputs]

    def call(
        backend: str, inputs: Sequence[Tensor | None], options: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        check_backend(op.name, backend)
        if torch.compiler.is_compiling():
            return traced(backend, inputs, options)
        if forward_mode_active():
            refuse_forward_mode(op.name, inputs)
        results: tuple[Tensor, ...]
        if transforms_active():
            chosen = op.resolve(backend, inputs, options)
            results = transformable.apply(chosen, *options, *inputs)
        elif _wants_gradient(inputs) and not torch.is_inference_mode_enabled():
            # Grad mode may be on inside inference mode, where torch's own ops record nothing.
            results = eager.apply(op.resolve(backend, inputs, options), *options, *inputs)
        else:
            with below_autograd():
                results = forward(*inputs, *options, *nothing_saved, backend)
        return results[: op.num_outputs]

    return call
