# SPDX-License-Identifier: Apache-2.0
"""Random arguments of every op as keyword arguments, sized and equipped as a test asks.

They are contiguous; layouts, packing and padding are in the modules beside this one.
"""

from __future__ import annotations

from typing import Any

import torch

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
        return torch.complex(rates, turns).to(wide.to_complex()) if is_complex else rates.to(wide)

    def integer(self, low: int, high: int) -> int:
        """low <= result <= high."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, values: Any) -> Any:
        return values[self.integer(0, len(values) - 1)]


def scan_inputs(
    batch: int = 2, dim: int = 4, seqlen: int = 9, dstate: int = 3, *,
    ngroups: int | None = None, constant: str = "", is_complex: bool = False,
    num_states: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
    options: str = "D z dt_bias initial_states",
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
    batch: int = 2, dim: int = 5, seqlen: int = 9, width: int = 4, *,
    num_states: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
    options: str = "bias initial_states", activation: str | None = "silu",
) -> Kwargs:  # fmt: skip
    """Arguments of causal_conv1d."""
    draw = Draw(seed, dtype)
    kwargs = {"x": draw.normal(batch, dim, seqlen), "weight": draw.normal(dim, width)}
    rows = batch if num_states is None else num_states
    optional = {"bias": draw.normal(dim), "initial_states": draw.normal(rows, dim, width - 1)}
    kwargs |= {name: optional[name] for name in options.split()}
    return kwargs | {"activation": activation, "return_final_states": True}


def inner_inputs(
    batch: int = 2, dim: int = 4, seqlen: int = 7, dstate: int = 3, width: int = 4,
    dt_rank: int = 2, d_model: int = 5, *, constant: str = "", is_complex: bool = False,
    num_states: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
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
    batch: int = 3, dim: int = 4, dstate: int = 3, *, slots: int | None = None,
    ntokens: int | None = None, ngroups: int | None = None, heads: tuple[int, int] | None = None,
    is_complex: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0,
    options: str = "D z dt_bias", kept: int | None = None,
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
        "ssm_state": pool if is_complex else pool.to(wide),
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
        kwargs["intermediate_states"] = history.to(kwargs["ssm_state"].dtype)
    return kwargs | {"dt_softplus": True}


def taps_inputs(
    batch: int = 3, dim: int = 4, width: int = 4, *, state_len: int | None = None,
    slots: int | None = None, ntokens: int | None = None, dtype: torch.dtype = torch.float32,
    seed: int = 0, options: str = "bias", activation: str | None = "silu",
    kept: int | None = None,
) -> Kwargs:  # fmt: skip
    """Arguments of causal_conv1d_update."""
    draw = Draw(seed, dtype)
    length = width - 1 if state_len is None else state_len
    tokens = () if ntokens is None else (ntokens,)
    pool = draw.normal(batch if slots is None else slots, dim, length)
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
