# SPDX-License-Identifier: Apache-2.0
"""Runs cases on an op and judges every output, written state and gradient against the truth.

What a case is lies in `cases.py`, how errors are measured in `compare.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from statescan import reference
from statescan.errors import BackendUnavailableError
from statescan.testing import inputs
from statescan.testing.cases import Case, all_cases
from statescan.testing.compare import Comparison, compare, identical
from statescan.testing.draw import place
from statescan.testing.tolerances import tolerance

POOLS = {"selective_state_update": "ssm_state", "causal_conv1d_update": "conv_state"}
"""The ops that write states in place, with the name of their pool of states."""

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """All cases of an op on one backend in one dtype.

    Attributes:
        worst: The comparison with the largest error for its tolerance; None if nothing ran.
        worst_case: The name of its case.
        num_cases: Number of cases that ran.
        refused: Name and reason of each case that the backend does not offer.
    """

    op: str
    backend: str
    dtype: torch.dtype
    worst: Comparison | None
    worst_case: str
    num_cases: int
    refused: tuple[tuple[str, str], ...]

    @property
    def passed(self) -> bool:
        return self.worst is not None and self.worst.passed


def run_op(
    op: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    *,
    fn: Callable[..., Any] | None = None,
    cases: Sequence[Case] | None = None,
) -> Verdict:
    """Run all cases of an op, or those given, and keep the worst comparison.

    Calls that the backend refuses with BackendUnavailableError are listed with the reason.
    """
    worst: Comparison | None = None
    worst_case, num_cases = "", 0
    refused: list[tuple[str, str]] = []
    for case in all_cases(op) if cases is None else cases:
        try:
            comparisons = run_case(case, dtype, device, backend, fn=fn)
        except BackendUnavailableError as reason:
            refused.append((case.name, str(reason)))
            continue
        num_cases += 1
        hardest = max(comparisons, key=lambda item: item.severity)
        if worst is None or hardest.severity > worst.severity:
            worst, worst_case = hardest, case.name
    return Verdict(op, backend, dtype, worst, worst_case, num_cases, tuple(refused))


def run_case(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    *,
    fn: Callable[..., Any] | None = None,
    seed: int = 0,
) -> list[Comparison]:
    """Run one case and compare every output, every state written and every gradient.

    `fn` replaces the public op; it takes the op's keyword arguments without `backend`.
    Compared bit for bit: inputs, and the parts of state pools that no row writes.
    """
    kwargs = inputs.make(case, dtype, device, seed)
    before = {
        name: value.clone() for name, value in kwargs.items() if isinstance(value, torch.Tensor)
    }
    exact = exact_results(case, dtype, seed)
    results = evaluate(case, fn or _public(case.op, backend), kwargs, dtype, seed)
    comparisons = []
    for name, result in results.items():
        allowed = tolerance(case.op, dtype, result.dtype, gradient=name.startswith("d"))
        item = compare(name, result, exact[name], allowed)
        wanted = _result_dtype(case, name, dtype)
        if wanted not in (None, result.dtype):
            detail = f"got {result.dtype}, expected {wanted}"
            item = Comparison(f"{name} dtype", math.inf, 0.0, detail)
        comparisons.append(item)
    comparisons += _unchanged(case, kwargs, before, exact)
    return comparisons


@lru_cache(maxsize=512)
def exact_results(case: Case, dtype: torch.dtype, seed: int = 0) -> Results:
    """What the float64 reference makes of the inputs as rounded to `dtype`, on the CPU."""
    kwargs = inputs.in_double(inputs.make(case, dtype, "cpu", seed))
    return evaluate(case, getattr(reference, f"{case.op}_ref"), kwargs, dtype, seed)


def evaluate(
    case: Case, fn: Callable[..., Any], kwargs: dict[str, Any], dtype: torch.dtype, seed: int = 0
) -> Results:
    """Outputs by name, states written in place, and gradients as d<argument>.

    The gradients are those of the sum of outputs times fixed random numbers, rounded to what the
    op returns for activations of `dtype`.
    """
    if case.op in POOLS:
        with torch.no_grad():
            results = {"out": fn(**kwargs)}
        written = (POOLS[case.op], "intermediate_states")
        return results | {name: kwargs[name] for name in written if kwargs.get(name) is not None}
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    }
    returned = fn(**(kwargs | leaves))
    outputs = returned if isinstance(returned, tuple) else (returned,)
    states = ("conv_final_states", "final_states") if len(outputs) == 3 else ("final_states",)
    named = dict(zip(("out", *states), outputs, strict=False))
    gradients = _gradients(case, named, leaves, dtype, seed)
    return {name: output.detach() for name, output in named.items()} | gradients


def _result_dtype(case: Case, name: str, dtype: torch.dtype) -> torch.dtype | None:
    """What an op returns for activations of `dtype`; None for gradients and states given."""
    if name == "final_states" and case.op != "causal_conv1d":
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return wide.to_complex() if case.has("complex") else wide
    return dtype if name in ("out", "final_states", "conv_final_states") else None


def _gradients(
    case: Case, outputs: Results, leaves: Results, dtype: torch.dtype, seed: int
) -> Results:
    generator = torch.Generator().manual_seed(seed + 1)
    reached, cotangents = [], []
    for name, output in outputs.items():
        wide = torch.complex128 if output.is_complex() else torch.float64
        drawn = torch.randn(output.shape, dtype=wide, generator=generator)
        drawn = drawn.to(_result_dtype(case, name, dtype))
        # An output without a graph (a reference that met no token) has zero gradients, which
        # is what a missing graph in the function under test is then compared with.
        if output.requires_grad:
            reached.append(output)
            cotangents.append(place(drawn.to(output.device, output.dtype), case.layout))
    found: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    if reached:
        found = torch.autograd.grad(reached, tuple(leaves.values()), cotangents, allow_unused=True)
    return {
        f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def _unchanged(
    case: Case, kwargs: dict[str, Any], before: Results, exact: Results
) -> list[Comparison]:
    """Inputs must keep their bits; so must those parts of states that the truth leaves alone."""
    comparisons = []
    for name, old in before.items():
        if name == "out":
            continue
        new = kwargs[name]
        if name in exact:
            kept = (exact[name] == inputs.in_double({name: old})[name]).to(new.device)
            new, old = torch.where(kept, new, 0), torch.where(kept, old, 0)
        comparisons.append(identical(f"{name} unchanged", new, old))
    return comparisons


def _public(op: str, backend: str) -> Callable[..., Any]:
    """The public function with its backend argument filled in."""
    # Imported late so that the references can be tested before any op is registered.
    from statescan import ops

    def call(**kwargs: Any) -> Any:
        return getattr(ops, op)(**kwargs, backend=backend)

    return call
