# SPDX-License-Identifier: Apache-2.0
"""Makes the arguments of a case: seeded, of realistic size, in the layout that the case asks for.

No expected results here, and no calls of ops.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from statescan.testing.cases import Case
from statescan.testing.draw import Source

Kwargs = dict[str, Any]


def make(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Kwargs:
    """Keyword arguments for the op's public function, or its reference.

    Activations have `dtype`; A, D, dt_bias and SSM states are float32, or float64 with float64
    activations. The numbers of a case and seed are the same for every dtype and device, up to
    rounding. Padding tokens hold NaN.
    """
    return _MAKERS[case.op](Source(case, dtype, device, seed))


def in_double(kwargs: Kwargs) -> Kwargs:
    """Copies of the arguments in float64 or complex128: what the exact result is computed from."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            wide = torch.complex128 if value.is_complex() else torch.float64
            return torch.empty(value.shape, dtype=wide).copy_(value)
        return value.cpu() if isinstance(value, torch.Tensor) else value

    return {name: convert(value) for name, value in kwargs.items()}


def _selective_scan(source: Source) -> Kwargs:
    case, dtype, wide = source.case, source.dtype, source.wide
    batch, dim, seqlen, dstate = source.size("batch", "dim", "seqlen", "dstate")
    is_complex = case.has("complex")

    def weights(flag: str, name: str) -> torch.Tensor:
        groups = source.groups(name)
        varying = source.poison(
            source.normal(batch, *groups, dstate, seqlen, is_complex=is_complex)
        )
        constant = source.normal(dim, dstate, is_complex=is_complex)
        return source.finish(constant if case.has(flag) else varying, dtype)

    x, dt, z = (
        source.poison(tensor)
        for tensor in (
            source.normal(batch, dim, seqlen),
            source.dt(batch, dim, seqlen),
            source.normal(batch, dim, seqlen),
        )
    )
    states = source.normal(source.num_states(), dim, dstate, is_complex=is_complex)
    return {
        "x": source.finish(x, dtype),
        "dt": source.finish(dt, dtype),
        "A": source.finish(source.decay_rates(dim), source.parameter_dtype),
        "B": weights("constant_B", "B"),
        "C": weights("constant_C", "C"),
        "D": source.optional("D", source.normal(dim), source.parameter_dtype),
        "z": source.optional("z", z, dtype),
        "dt_bias": source.optional("dt_bias", source.dt_bias(dim), source.parameter_dtype),
        "dt_softplus": case.has("dt_softplus"),
        "initial_states": source.optional("initial_states", states, wide),
        "reverse": case.has("reverse"),
        "return_final_states": case.has("return_final_states"),
        **source.packing(),
    }


def _causal_conv1d(source: Source) -> Kwargs:
    case, dtype = source.case, source.dtype
    batch, dim, seqlen, width = source.size("batch", "dim", "seqlen", "width")
    states = source.normal(source.num_states(), dim, width - 1)
    return {
        "x": source.finish(source.poison(source.normal(batch, dim, seqlen)), dtype),
        "weight": source.finish(source.normal(dim, width) / 2, source.weight_dtype),
        "bias": source.optional("bias", source.normal(dim), source.weight_dtype),
        "activation": "silu" if case.has("silu") else None,
        "initial_states": source.optional("initial_states", states, dtype),
        "reverse": case.has("reverse"),
        "return_final_states": case.has("return_final_states"),
        **source.packing(),
    }


def _decode_options(
    source: Source, prefix: str, slot: tuple[int, ...], pool: torch.Tensor
) -> Kwargs:
    """Slots, rollback and out of an update; `prefix` names its index arguments."""
    case = source.case
    kwargs: Kwargs = {
        f"{prefix}_indices": source.integers(case.read),
        f"dst_{prefix}_indices": source.integers(case.write),
        "pad_slot_id": case.pad_slot_id,
        "num_accepted_tokens": source.integers(case.accepted),
    }
    if case.has("intermediate_states"):
        kept = max(case.sizes["ntokens"], *(case.accepted or (0,)))
        states = source.normal(case.sizes["batch"], kept, *slot, is_complex=pool.is_complex())
        kwargs["intermediate_states"] = source.finish(states, pool.dtype)
    return kwargs


def _selective_state_update(source: Source) -> Kwargs:
    case, dtype, wide = source.case, source.dtype, source.wide
    headed, is_complex = case.has("headed"), case.has("complex")
    batch, dstate, slots = source.size("batch", "dstate", "slots")
    channels = source.size("nheads", "headdim") if headed else source.size("dim")
    tokens = (case.sizes["ntokens"],) if "ntokens" in case.sizes else ()
    activation = (batch, *tokens, *channels) if headed else (batch, *channels, *tokens)

    def weights(name: str) -> torch.Tensor:
        groups = (*source.groups(name), dstate)
        shape = (batch, *tokens, *groups) if headed else (batch, *groups, *tokens)
        return source.finish(source.normal(*shape, is_complex=is_complex), dtype)

    def tie(tensor: torch.Tensor, axes: int) -> torch.Tensor:
        """One number a head, expanded with stride 0, as Mamba-2 calls the op."""
        if not case.has("tied"):
            return tensor
        one = tensor[..., :1] if axes == 1 else tensor[..., :1, :1]
        return one.expand(tensor.shape)

    pool = source.finish(
        source.normal(slots, *channels, dstate, is_complex=is_complex),
        dtype if case.has("low_state") else wide,
    )
    D = source.optional("D", source.normal(*channels), source.parameter_dtype)
    bias = source.optional("dt_bias", source.dt_bias(*channels), source.parameter_dtype)
    x, dt, z = source.normal(*activation), source.dt(*activation), source.normal(*activation)
    return {
        "ssm_state": pool,
        "x": source.finish(x, dtype),
        "dt": tie(source.finish(dt, dtype), 1),
        "A": tie(source.finish(source.decay_rates(*channels), source.parameter_dtype), 2),
        "B": weights("B"),
        "C": weights("C"),
        "D": D if D is None else tie(D, 1),
        "z": source.optional("z", z, dtype),
        "dt_bias": bias if bias is None else tie(bias, 1),
        "dt_softplus": case.has("dt_softplus"),
        "out": source.optional("out", torch.full(activation, math.nan), dtype),
        **_decode_options(source, "state_batch", (*channels, dstate), pool),
    }


def _causal_conv1d_update(source: Source) -> Kwargs:
    case, dtype = source.case, source.dtype
    batch, dim, width, slots, state_len = source.size("batch", "dim", "width", "slots", "state_len")
    tokens = (case.sizes["ntokens"],) if "ntokens" in case.sizes else ()
    pool = source.finish(source.normal(slots, dim, state_len), dtype)
    return {
        "x": source.finish(source.normal(batch, dim, *tokens), dtype),
        "conv_state": pool,
        "weight": source.finish(source.normal(dim, width) / 2, source.weight_dtype),
        "bias": source.optional("bias", source.normal(dim), source.weight_dtype),
        "activation": "silu" if case.has("silu") else None,
        "cache_seqlens": source.integers((0, 3, 12)) if case.has("ring") else None,
        "out": source.optional("out", torch.full((batch, dim, *tokens), math.nan), dtype),
        **_decode_options(source, "conv_state", (dim, state_len), pool),
    }


def _mamba_inner(source: Source) -> Kwargs:
    case, dtype, wide = source.case, source.dtype, source.wide
    batch, dim, seqlen, dstate = source.size("batch", "dim", "seqlen", "dstate")
    width, dt_rank, d_model = source.size("width", "dt_rank", "d_model")
    is_complex = case.has("complex")
    part = dstate * (2 if is_complex else 1)
    parts = part * (2 - case.has("constant_B") - case.has("constant_C"))

    def weight(flag: str, *shape: int) -> torch.Tensor | None:
        return source.optional(flag, source.normal(*shape), source.weight_dtype)

    def projection(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        drawn = scale * source.normal(rows, columns) / columns**0.5
        return source.finish(drawn, source.weight_dtype)

    def norm(flag: str, size: int) -> torch.Tensor | None:
        return source.optional(flag, source.uniform(0.5, 1.5, size), source.weight_dtype)

    constants = source.normal(2, dim, dstate, is_complex=is_complex)
    # Without softplus a large projection would give negative steps, and states without bound.
    dt_scale = 1.0 if case.has("dt_softplus") else 0.05
    out_proj = projection(d_model, dim)
    conv_states = source.normal(source.num_states(), dim, width - 1)
    states = source.normal(source.num_states(), dim, dstate, is_complex=is_complex)
    return {
        "xz": source.finish(source.poison(source.normal(batch, 2 * dim, seqlen)), dtype),
        "conv_weight": source.finish(source.normal(dim, width) / 2, source.weight_dtype),
        "conv_bias": weight("conv_bias", dim),
        "x_proj_weight": projection(dt_rank + parts, dim),
        "dt_proj_weight": projection(dim, dt_rank, dt_scale),
        "A": source.finish(source.decay_rates(dim), source.parameter_dtype),
        "B": source.optional("constant_B", constants[0], dtype),
        "C": source.optional("constant_C", constants[1], dtype),
        "D": source.optional("D", source.normal(dim), source.parameter_dtype),
        "dt_bias": source.optional("dt_bias", source.dt_bias(dim), source.parameter_dtype),
        "b_proj_bias": weight("b_proj_bias", part),
        "c_proj_bias": weight("c_proj_bias", part),
        "dt_softplus": case.has("dt_softplus"),
        "activation": "silu" if case.has("silu") else None,
        "out_proj_weight": out_proj if case.has("out_proj") else None,
        "out_proj_bias": weight("out_proj_bias", d_model),
        "b_norm_weight": norm("b_norm", part),
        "c_norm_weight": norm("c_norm", part),
        "dt_norm_weight": norm("dt_norm", dim),
        "conv_initial_states": source.optional("initial_states", conv_states, dtype),
        "initial_states": source.optional("initial_states", states, wide),
        "reverse": case.has("reverse"),
        "return_final_states": case.has("return_final_states"),
        **source.packing(),
    }


_MAKERS: dict[str, Callable[[Source], Kwargs]] = {
    "selective_scan": _selective_scan,
    "selective_state_update": _selective_state_update,
    "causal_conv1d": _causal_conv1d,
    "causal_conv1d_update": _causal_conv1d_update,
    "mamba_inner": _mamba_inner,
}
