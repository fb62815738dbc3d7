# SPDX-License-Identifier: Apache-2.0
"""Calls of shipped cases for the tests of torch's machinery: compile, export, transforms.

Whether results are right is judged against another way of making the same call, not here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from helpers.differential import leaves_of, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

from statescan import ops, reference
from statescan.backends.base import Backend
from statescan.testing import cases, inputs

SEQUENCE_OPS = ("selective_scan", "causal_conv1d", "mamba_inner")
UPDATES = ("selective_state_update", "causal_conv1d_update")
REPRESENTATIVE = {
    "selective_scan": ("bare", "all_options", "complex_all", "seq_idx", "cu_seqlens_reverse"),
    "causal_conv1d": ("bare", "all_options", "channel_last_reverse", "seq_idx", "cu_seqlens"),
    "mamba_inner": ("bare", "norms_out_proj", "complex", "seq_idx", "cu_seqlens"),
    "selective_state_update": ("bare", "read_write", "rollback_slots", "headed_tied", "complex"),
    "causal_conv1d_update": ("bare", "read_write", "rollback_slots", "ring_several", "out"),
}
"""A handful of cases that together use every argument, for what is too slow for all of them."""

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

TORCH_WARNINGS = (
    "ignore:.*torch.jit.script:DeprecationWarning",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.torch.cpu.amp.autocast:FutureWarning",
    "ignore:At pre-dispatch tracing:UserWarning",
    "ignore:You are using .torch.load:FutureWarning",
    "ignore:Please use .torch.vmap. instead:FutureWarning",
    # Dynamo looks at .grad of the results that a graph begins with.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
"""What torch warns about in its own code."""

Results = dict[str, torch.Tensor]


def representative(*names: str) -> list[cases.Case]:
    """The representative cases of the ops of these names."""
    return [cases.get_case(op, name) for op in names for name in REPRESENTATIVE[op]]


def distinct_cases() -> list[cases.Case]:
    """One of the cases that differ in sizes only; sizes 0 and 1 are kept apart."""
    found: dict[Any, cases.Case] = {}
    for case in cases.all_cases():
        given = [getattr(case, n) is None for n in ("runs", "bounds", "read", "write", "accepted")]
        small = [(name, size) for name, size in case.sizes.items() if size < 2]
        axes = ("ngroups" in case.sizes, "ntokens" in case.sizes)
        key = (case.op, case.flags, case.layout, *given, *small, *axes)
        found.setdefault(key, case)
    return list(found.values())


def make(op: str, name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Arguments of one shipped case."""
    return inputs.make(cases.get_case(op, name), dtype, seed=seed)


def public(op: str) -> Callable[..., Any]:
    return getattr(ops, op)


def plain(op: str) -> Callable[..., Any]:
    """The differentiable reference of an op."""
    return getattr(reference, f"{op}_ref")


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def weigh(results: Any) -> torch.Tensor:
    """A real number that depends on every element of every result, on each in another way."""
    total = torch.zeros((), dtype=torch.float64)
    for result in as_tuple(results):
        weights = torch.cos(torch.arange(result.numel(), dtype=torch.float64) + 0.5)
        real = torch.view_as_real(result).sum(-1) if result.is_complex() else result
        total = total + (real.double() * weights.reshape(real.shape)).sum()
    return total


def run_sequence(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Results:
    """Results by number and gradients by argument of a call with every float input a leaf."""
    leaves = leaves_of(dict(kwargs))
    results = as_tuple(function(**{**kwargs, **leaves}))
    loss = weigh(results)
    found = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
    gradients = {
        f"d{name}": gradient
        for name, gradient in zip(leaves, found, strict=True)
        if gradient is not None
    }
    return {str(i): result.detach() for i, result in enumerate(results)} | gradients


def run_update(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Results:
    """The result of a decode step on copies of the arguments, and all arguments afterwards."""
    copies = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in kwargs.items()
    }
    return {"result": function(**copies), **tensors_of(copies)}


def run(op: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Results:
    return (run_update if op in UPDATES else run_sequence)(function, kwargs)


def assert_equal(results: Results, expected: Results) -> None:
    """The same names, and for each the same dtype, strides and bits; NaN equals NaN."""
    assert results.keys() == expected.keys()
    for name, result in results.items():
        other = expected[name]
        torch.testing.assert_close(
            *(result, other),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        if result.numel() > 0:
            assert result.stride() == other.stride(), name


class RecordOps(TorchDispatchMode):
    """Collects the calls of statescan's registered ops: (op, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "statescan":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        return [func._schema.name.removeprefix("statescan::") for func, _ in self.calls]


class Ran(NamedTuple):
    """One call of a backend's function."""

    backend: str
    op: str
    direction: str
    args: tuple[Any, ...]


@contextmanager
def backend_calls() -> Iterator[list[Ran]]:
    """The list that calls of backends are added to, also those that compiled code makes."""
    found: list[Ran] = []
    real = Backend.function

    def function(self: Backend, op: str, direction: str) -> Callable[..., Any]:
        def spy(*args: Any) -> Any:
            found.append(Ran(self.name, op, direction, args))
            return real(self, op, direction)(*args)

        return spy

    with patch.object(Backend, "function", function):
        yield found


def child(code: str, *, check: bool = True, **environment: str) -> str:
    """Run Python code in a new process, warnings being errors; what it printed."""
    torch_warns = ("-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
    done = subprocess.run(
        [sys.executable, *("-W", "error"), *torch_warns, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    if check and done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout if check else done.stdout + done.stderr
