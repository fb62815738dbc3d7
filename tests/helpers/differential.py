# SPDX-License-Identifier: Apache-2.0
"""Inputs of every op as keyword arguments, and the check of a call against the float64 reference.

What is special about an input is arranged by the tests; allowed errors come from
statescan.testing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from statescan import ops, reference
from statescan.dispatch import all_backends
from statescan.errors import BackendUnavailableError
from statescan.testing import assert_close, error, in_double, tolerance
from statescan.testing.tolerances import MULTIPLES, judged_dtype

BACKENDS = [b.name for b in all_backends() if b.automatic and b.availability().ok]
POOLS = {"selective_state_update": "ssm_state", "causal_conv1d_update": "conv_state"}
STATES = {
    "selective_scan": ("out", "final_states"),
    "causal_conv1d": ("out", "final_states"),
    "mamba_inner": ("out", "conv_final_states", "final_states"),
}

Kwargs = dict[str, Any]


class Draw:
    """Random tensors from one seeded generator."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int, is_complex: bool = False) -> torch.Tensor:
        wide = torch.complex128 if is_complex else torch.float64
        drawn = torch.randn(shape, dtype=wide, generator=self.generator)
        double = self.dtype == torch.float64
        if is_complex:
            return drawn.to(torch.complex128 if double else torch.complex64)
        return drawn.to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        drawn = torch.rand(shape, dtype=torch.float64, generator=self.generator)
        return (low + (high - low) * drawn).to(self.dtype)

    def decay_rates(self, *shape: int, is_complex: bool = False) -> torch.Tensor:
        """A: float32 at least, complex ones rotate too."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        rates = -0.1 - 2 * torch.rand(shape, dtype=torch.float64, generator=self.generator)
        turns = torch.randn(shape, dtype=torch.float64, generator=self.generator)
        return (torch.complex(rates, turns).to(wide.to_complex()) if is_complex else rates.to(wide))

    def integer(self, low: int, high: int) -> int:
        """low <= result <= high."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, values: Any) -> Any:
        return values[self.integer(0, len(values) - 1)]


def scan_inputs(
    batch: int = 2, dim: int = 4, seqlen: int = 9, dstate: int = 3, *,
    ngroups: int | None = None, constant: str = "", is_complex: bool = False, num_states: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, options: str = "D z dt_bias initial_states",
) -> Kwargs:  # fmt: skip
    """Arguments of selective_scan with dt_softplus; `constant` names those of B and C that are."""
    draw = Draw(seed, dtype)
    groups = () if ngroups is None else (ngroups,)
    kwargs: Kwargs = {
        "x": draw.normal(batch, dim, seqlen),
        "dt": draw.normal(batch, dim, seqlen),
        "A": draw.decay_rates(dim, dstate, is_complex=is_complex),
    }
    for name in ("B", "C"):
        shape = (dim, dstate) if name in constant else (batch, *groups, dstate, seqlen)
        kwargs[name] = draw.normal(*shape, is_complex=is_complex)
    rows = batch if num_states is None else num_states
    states = draw.normal(rows, dim, dstate, is_complex=is_complex)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    optional = {
        "D": draw.normal(dim),
        "z": draw.normal(batch, dim, seqlen),
        "dt_bias": draw.uniform(-3, 0, dim),
        "initial_states": states if is_complex else states.to(wide),
    }
    kwargs |= {name: optional[name] for name in options.split()}
    return kwargs | {"dt_softplus": True, "return_final_states": True}


def conv_inputs(
    batch: int = 2, dim: int = 5, seqlen: int = 9, width: int = 4, *, num_states: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, options: str = "bias initial_states", activation: str | None = "silu",
) -> Kwargs:  # fmt: skip
    """Arguments of causal_conv1d."""
    draw = Draw(seed, dtype)
    kwargs = {"x": draw.normal(batch, dim, seqlen), "weight": draw.normal(dim, width)}
    rows = batch if num_states is None else num_states
    optional = {"bias": draw.normal(dim), "initial_states": draw.normal(rows, dim, width - 1)}
    kwargs |= {name: optional[name] for name in options.split()}
    return kwargs | {"activation": activation, "return_final_states": True}


def inner_inputs(
    batch: int = 2, dim: int = 4, seqlen: int = 7, dstate: int = 3, width: int = 4, dt_rank: int = 2, d_model: int = 5, *,
    constant: str = "", is_complex: bool = False, num_states: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
    options: str = "conv_bias D dt_bias out_proj_weight conv_initial_states initial_states",
) -> Kwargs:  # fmt: skip
    """Arguments of mamba_inner; biases and norms of constant B or C must not be asked for."""
    draw = Draw(seed, dtype)
    part = dstate * (2 if is_complex else 1)
    rows = batch if num_states is None else num_states
    parts = part * (2 - len(constant))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kwargs: Kwargs = {
        "xz": draw.normal(batch, 2 * dim, seqlen),
        "conv_weight": draw.normal(dim, width),
        "conv_bias": draw.normal(dim),
        "x_proj_weight": draw.normal(dt_rank + parts, dim) / dim**0.5,
        "dt_proj_weight": draw.normal(dim, dt_rank),
        "A": draw.decay_rates(dim, dstate, is_complex=is_complex),
    }
    for name in ("B", "C"):
        drawn = draw.normal(dim, dstate, is_complex=is_complex)
        kwargs[name] = drawn if name in constant else None
    states = draw.normal(rows, dim, dstate, is_complex=is_complex)
    optional = {
        "D": draw.normal(dim),
        "dt_bias": draw.uniform(-3, 0, dim),
        "b_proj_bias": draw.normal(part),
        "c_proj_bias": draw.normal(part),
        "out_proj_weight": draw.normal(d_model, dim) / dim**0.5,
        "out_proj_bias": draw.normal(d_model),
        "b_norm_weight": draw.uniform(0.5, 1.5, part),
        "c_norm_weight": draw.uniform(0.5, 1.5, part),
        "dt_norm_weight": draw.uniform(0.5, 1.5, dim),
        "conv_initial_states": draw.normal(rows, dim, width - 1),
        "initial_states": states if is_complex else states.to(wide),
    }
    chosen = options.split()
    if "conv_bias" not in chosen:
        kwargs["conv_bias"] = None
    kwargs |= {name: tensor for name, tensor in optional.items() if name in chosen}
    return kwargs | {"return_final_states": True}


def state_inputs(
    batch: int = 3, dim: int = 4, dstate: int = 3, *, slots: int | None = None, ntokens: int | None = None,
    ngroups: int | None = None, heads: tuple[int, int] | None = None, is_complex: bool = False, dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None, seed: int = 0, options: str = "D z dt_bias", kept: int | None = None,
) -> Kwargs:  # fmt: skip
    """Arguments of selective_state_update; `heads` is (nheads, headdim) of the headed form."""
    draw = Draw(seed, dtype)
    channels = (dim,) if heads is None else heads
    tokens = () if ntokens is None else (ntokens,)
    groups = () if ngroups is None else (ngroups,)
    if heads is None:
        activation, grouped = (batch, dim, *tokens), (batch, *groups, dstate, *tokens)
    else:
        activation, grouped = (batch, *tokens, *heads), (batch, *tokens, *groups, dstate)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pool = draw.normal(batch if slots is None else slots, *channels, dstate, is_complex=is_complex)
    kwargs: Kwargs = {
        "ssm_state": pool if is_complex else pool.to(state_dtype or wide),
        "x": draw.normal(*activation),
        "dt": draw.normal(*activation),
        "A": draw.decay_rates(*channels, dstate, is_complex=is_complex),
        "B": draw.normal(*grouped, is_complex=is_complex),
        "C": draw.normal(*grouped, is_complex=is_complex),
    }
    optional = {
        "D": draw.normal(*channels),
        "z": draw.normal(*activation),
        "dt_bias": draw.uniform(-3, 0, *channels),
    }
    kwargs |= {name: optional[name] for name in options.split()}
    if kept is not None:
        history = draw.normal(batch, kept, *channels, dstate, is_complex=is_complex)
        kwargs["intermediate_states"] = history.to(pool.dtype)
    return kwargs | {"dt_softplus": True}


def taps_inputs(
    batch: int = 3, dim: int = 4, width: int = 4, *, state_len: int | None = None, slots: int | None = None,
    ntokens: int | None = None, dtype: torch.dtype = torch.float32, state_dtype: torch.dtype | None = None, seed: int = 0,
    options: str = "bias", activation: str | None = "silu", kept: int | None = None,
) -> Kwargs:  # fmt: skip
    """Arguments of causal_conv1d_update."""
    draw = Draw(seed, dtype)
    length = width - 1 if state_len is None else state_len
    tokens = () if ntokens is None else (ntokens,)
    pool = draw.normal(batch if slots is None else slots, dim, length).to(state_dtype or dtype)
    kwargs: Kwargs = {
        "x": draw.normal(batch, dim, *tokens),
        "conv_state": pool,
        "weight": draw.normal(dim, width),
    }
    bias = draw.normal(dim)
    kwargs |= {"bias": bias} if "bias" in options.split() else {}
    if kept is not None:
        kwargs["intermediate_states"] = draw.normal(batch, kept, dim, length).to(pool.dtype)
    return kwargs | {"activation": activation}


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
    plain = {}
    if ill_conditioned:
        plain = differentiate(getattr(reference, f"{op}_ref"), op, kwargs, cotangents)
    for name, result in results.items():
        bound = allowed(op, kwargs, name, result)
        if name in plain:
            judged = judged_dtype(op, kwargs["xz" if op == "mamba_inner" else "x"].dtype, result.dtype)
            bound = max(bound, MULTIPLES.get(judged, 4.0) * error(plain[name], exact[name]))
        assert_close(result, exact[name], bound, name)
        if name.startswith("d"):
            assert result.dtype == kwargs[name[1:]].dtype, name
    for name, tensor in tensors_of(kwargs).items():
        assert_same(tensor, before[name], f"{name} was modified")
    assert_apart(results, tensors_of(kwargs))
    return results


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
