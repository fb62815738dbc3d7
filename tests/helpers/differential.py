# SPDX-License-Identifier: Apache-2.0
"""Checks of a call, its gradients and what it writes against the float64 reference.

Arguments are made in op_inputs.py; allowed errors come from statescan.testing.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.op_inputs import Kwargs

from statescan import ops, reference
from statescan.dispatch import all_backends
from statescan.errors import BackendUnavailableError
from statescan.testing import assert_close, error, in_double, tolerance
from statescan.testing.tolerances import MULTIPLES

BACKENDS = [b.name for b in all_backends() if b.automatic and b.availability().ok]
POOLS = {"selective_state_update": "ssm_state", "causal_conv1d_update": "conv_state"}
STATES = {
    "selective_scan": ("out", "final_states"),
    "causal_conv1d": ("out", "final_states"),
    "mamba_inner": ("out", "conv_final_states", "final_states"),
}


def call(op: str, kwargs: Kwargs, backend: str) -> Any:
    """The public function; a backend that says why it does not offer a call skips the test."""
    try:
        return getattr(ops, op)(**kwargs, backend=backend)
    except BackendUnavailableError as reason:
        pytest.skip(str(reason))


def tensors_of(kwargs: Kwargs) -> dict[str, torch.Tensor]:
    return {n: v for n, v in kwargs.items() if isinstance(v, torch.Tensor)}


def leaves_of(kwargs: Kwargs) -> dict[str, torch.Tensor]:
    """The tensors that have gradients, as leaves that share their memory and strides."""
    return {
        name: tensor.detach().requires_grad_()
        for name, tensor in tensors_of(kwargs).items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def differentiate(
    function: Any, op: str, kwargs: Kwargs, cotangents: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Results by name and gradients as d<argument>, for cotangents given by result name."""
    leaves = leaves_of(kwargs)
    returned = function(**(kwargs | leaves))
    outputs = returned if isinstance(returned, tuple) else (returned,)
    named = dict(zip(STATES[op], outputs, strict=False))
    used = [(o, cotangents[n]) for n, o in named.items() if cotangents.get(n) is not None]
    used = [(o, c.to(o.dtype)) for o, c in used if o.requires_grad]
    found: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    if used:
        results, seeds = zip(*used, strict=True)
        found = torch.autograd.grad(results, tuple(leaves.values()), seeds, allow_unused=True)
    gradients = {
        f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return {name: output.detach() for name, output in named.items()} | gradients


def draw_cotangents(op: str, kwargs: Kwargs, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random gradients of every result, rounded to the result's dtype."""
    with torch.no_grad():
        returned = getattr(reference, f"{op}_ref")(**kwargs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, output in zip(STATES[op], outputs, strict=False):
        wide = torch.complex128 if output.is_complex() else torch.float64
        values = torch.randn(output.shape, dtype=wide, generator=generator)
        drawn[name] = values.to(output.dtype)
    return drawn


def exact_results(
    op: str, kwargs: Kwargs, cotangents: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """What the float64 reference makes of the same numbers."""
    return differentiate(getattr(reference, f"{op}_ref"), op, in_double(kwargs), cotangents)


def allowed(op: str, kwargs: Kwargs, name: str, result: torch.Tensor) -> float:
    dtype = kwargs["xz" if op == "mamba_inner" else "x"].dtype
    return tolerance(op, dtype, result.dtype, gradient=name.startswith("d"))


def neighbours(kwargs: Kwargs) -> list[Kwargs]:
    """The same inputs with each float32 number one unit in the last place up or down, at random."""
    generator = torch.Generator().manual_seed(0)

    def moved(value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        up = torch.rand(value.shape, generator=generator) < 0.5
        return torch.nextafter(value, torch.where(up, math.inf, -math.inf))

    return [{name: moved(value) for name, value in kwargs.items()} for _ in range(8)]


def check_sequence(
    op: str, kwargs: Kwargs, backend: str, *,
    cotangents: dict[str, torch.Tensor | None] | None = None, ill_conditioned: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Every result and every gradient of a call equals the float64 reference's.

    Also: dtypes as promised, inputs untouched, and no result in the memory of an input.
    `ill_conditioned` inputs may cost as many digits more as they cost the plain reference itself.
    """
    cotangents = draw_cotangents(op, kwargs) if cotangents is None else cotangents
    before = {name: tensor.clone() for name, tensor in tensors_of(kwargs).items()}
    results = differentiate(lambda **named: call(op, named, backend), op, kwargs, cotangents)
    exact = exact_results(op, kwargs, cotangents)
    bounds = {name: allowed(op, kwargs, name, result) for name, result in results.items()}
    if ill_conditioned and any(error(results[n], exact[n]) > bounds[n] for n in results):
        # Where digits cancel, one evaluation's error is luck: neighbouring inputs show its size.
        costs = [plain_errors(op, near, cotangents) for near in (kwargs, *neighbours(kwargs))]
        worst = {name: max(cost[name] for cost in costs) for name in results}
        bounds = {n: max(bound, bound_from(worst[n], results[n])) for n, bound in bounds.items()}
    for name, result in results.items():
        assert_close(result, exact[name], bounds[name], name)
        if name.startswith("d"):
            assert result.dtype == kwargs[name[1:]].dtype, name
    for name, tensor in tensors_of(kwargs).items():
        assert_same(tensor, before[name], f"{name} was modified")
    assert_apart(results, tensors_of(kwargs))
    return results


def plain_errors(
    op: str, kwargs: Kwargs, cotangents: dict[str, torch.Tensor | None]
) -> dict[str, float]:
    """Errors of the reference itself in the dtypes given; in float32 where those are float64."""
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    single = {
        n: v.to(narrow.get(v.dtype, v.dtype)) if isinstance(v, torch.Tensor) else v
        for n, v in kwargs.items()
    }
    plain = differentiate(getattr(reference, f"{op}_ref"), op, single, cotangents)
    exact = exact_results(op, single, cotangents)
    return {name: error(plain[name], exact[name]) for name in plain}


def bound_from(cost: float, result: torch.Tensor) -> float:
    """The error allowed where the plain reference's is ``cost``, by the table's multiples."""
    kind = result.dtype.to_real() if result.is_complex() else result.dtype
    if kind == torch.float64:
        digits = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return digits * MULTIPLES[torch.float32] * cost
    return MULTIPLES[kind] * cost


def check_update(
    op: str, kwargs: Kwargs, backend: str, *, shared: bool = False
) -> dict[str, torch.Tensor]:
    """A decode step's result and everything that it writes equal the float64 reference's.

    The state pool and intermediate_states keep their bits wherever the reference leaves them
    alone, and inputs everywhere. `shared`: arguments overlap in memory, so they are not compared.
    """
    written = [n for n in (POOLS[op], "intermediate_states") if kwargs.get(n) is not None]
    before = {name: tensor.clone() for name, tensor in tensors_of(kwargs).items()}
    exact_kwargs = in_double(kwargs)
    with torch.no_grad():
        exact = {"out": getattr(reference, f"{op}_ref")(**exact_kwargs)}
        results = {"out": call(op, kwargs, backend)}
    exact |= {name: exact_kwargs[name] for name in written}
    results |= {name: kwargs[name] for name in written}
    if kwargs.get("out") is None:
        assert results["out"].dtype == kwargs["x"].dtype
        assert_apart({"out": results["out"]}, tensors_of(kwargs))
    else:
        assert results["out"] is kwargs["out"]
    for name, result in results.items():
        assert_close(result, exact[name], allowed(op, kwargs, name, result), name)
    for name, old in before.items():
        if name in written:
            kept = exact[name] == in_double({name: old})[name]
            assert_same(kwargs[name][kept], old[kept], f"{name} changed where no row writes")
        elif name != "out" and not shared:
            assert_same(kwargs[name], old, f"{name} was modified")
    return results


def assert_same(result: torch.Tensor, expected: torch.Tensor, message: str = "") -> None:
    """Equal shape and bits, NaN counting as equal to NaN."""
    assert result.shape == expected.shape, message
    same = (result == expected) | (result.isnan() & expected.isnan())
    assert bool(same.all()), message


def assert_apart(results: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    """No result lies in the memory of an input or of another result."""
    taken = {t.untyped_storage().data_ptr(): n for n, t in inputs.items() if t.numel()}
    for name, result in results.items():
        place = result.untyped_storage().data_ptr()
        if result.numel():
            assert place not in taken, f"{name} lies in the memory of {taken[place]}"
            taken[place] = name
