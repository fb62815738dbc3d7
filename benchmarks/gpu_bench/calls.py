# SPDX-License-Identifier: Apache-2.0
"""Inputs of a row, and the same call of statescan and of the original that has it.

How results are judged is in ``gate``, how calls are timed in ``timing``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_bench.rows import TORCH_NAMES, UPDATES, Row
from statescan import ops
from statescan.cli._bench_peers import Peer

Inputs = dict[str, Tensor]
Call = Callable[..., Tensor]

OPTIONS: dict[str, dict[str, Any]] = {
    "selective_scan": {"dt_softplus": True},
    "selective_state_update": {"dt_softplus": True},
    "causal_conv1d": {"activation": "silu"},
    "causal_conv1d_update": {"activation": "silu"},
}
"""Arguments beside tensors that every version is called with."""

STATES = {"selective_state_update": "ssm_state", "causal_conv1d_update": "conv_state"}
"""The argument that an update writes."""

HOW_TO_GET = {
    "mamba_ssm": "pip install mamba-ssm --no-build-isolation",
    "causal_conv1d": "pip install causal-conv1d --no-build-isolation",
}
"""They come as source and need nvcc of torch's CUDA version."""


@dataclass(frozen=True)
class Draw:
    """Seeded random tensors on one device."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, to: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.dtype if to is None else to)


def make_inputs(row: Row, device: torch.device | str, seed: int = 0) -> Inputs:
    """The tensors of a row, by argument name.

    Rates and steps are as models have them at the start: A from -1 to -dstate, steps of 0.001
    to 0.1 after the softplus.
    """
    draw = Draw(torch.Generator(device).manual_seed(seed), getattr(torch, TORCH_NAMES[row.dtype]))
    inputs = _MAKERS[row.op](row.sizes, draw)
    if row.layout == "channel-last":
        for name, tensor in inputs.items():
            if tensor.dim() == 3:
                inputs[name] = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return inputs


def make_cotangent(row: Row, out: Tensor) -> Tensor:
    """A random gradient of ``out``, rounded to the row's dtype whatever dtype ``out`` has."""
    generator = torch.Generator(out.device).manual_seed(1)
    drawn = torch.randn(out.shape, generator=generator, device=out.device)
    return torch.empty_like(out).copy_(drawn.to(getattr(torch, TORCH_NAMES[row.dtype])))


def _state_space(draw: Draw, channels: tuple[int, ...], dstate: int) -> Inputs:
    rates = -torch.arange(1, dstate + 1, device=draw.generator.device, dtype=torch.float32)
    spread = draw.normal(*channels, to=torch.float32).clamp(-2, 2)
    steps = torch.exp(spread + math.log(0.01))
    return {
        "A": rates.expand(*channels, dstate).contiguous(),
        "D": draw.normal(*channels, to=torch.float32),
        "dt_bias": torch.log(torch.expm1(steps)),
    }


def _scan(sizes: Mapping[str, int], draw: Draw) -> Inputs:
    batch, dim, seqlen, dstate = (sizes[n] for n in ("batch", "dim", "seqlen", "dstate"))
    inputs = {name: draw.normal(batch, dim, seqlen) for name in ("x", "dt", "z")}
    inputs |= {name: draw.normal(batch, dstate, seqlen) for name in ("B", "C")}
    return inputs | _state_space(draw, (dim,), dstate)


def _conv(sizes: Mapping[str, int], draw: Draw) -> Inputs:
    batch, dim, seqlen, width = (sizes[n] for n in ("batch", "dim", "seqlen", "width"))
    return {
        "x": draw.normal(batch, dim, seqlen),
        "weight": draw.normal(dim, width, to=torch.float32),
        "bias": draw.normal(dim, to=torch.float32),
    }


def _state_update(sizes: Mapping[str, int], draw: Draw) -> Inputs:
    """Mamba-1's form, or with heads Mamba-2's: dt, A, D and dt_bias are one number a head."""
    batch, dstate = sizes["batch"], sizes["dstate"]
    channels = (sizes["dim"],) if "dim" in sizes else (sizes["nheads"], sizes["headdim"])
    groups = () if "dim" in sizes else (1,)
    inputs = {"ssm_state": draw.normal(batch, *channels, dstate, to=torch.float32)}
    inputs |= {name: draw.normal(batch, *groups, dstate) for name in ("B", "C")}
    inputs["x"] = draw.normal(batch, *channels)
    if "dim" in sizes:
        inputs |= {name: draw.normal(batch, *channels) for name in ("dt", "z")}
        return inputs | _state_space(draw, channels, dstate)
    nheads, headdim = sizes["nheads"], sizes["headdim"]
    each = _state_space(draw, (nheads,), 1)
    inputs["dt"] = draw.normal(batch, nheads).unsqueeze(-1).expand(batch, nheads, headdim)
    inputs["A"] = each.pop("A").unsqueeze(-1).expand(nheads, headdim, dstate)
    return inputs | {n: t.unsqueeze(-1).expand(nheads, headdim) for n, t in each.items()}


def _conv_update(sizes: Mapping[str, int], draw: Draw) -> Inputs:
    batch, dim, width = (sizes[n] for n in ("batch", "dim", "width"))
    return {
        "x": draw.normal(batch, dim),
        "conv_state": draw.normal(batch, dim, sizes["state_len"]),
        "weight": draw.normal(dim, width),
        "bias": draw.normal(dim),
    }


_MAKERS: dict[str, Callable[[Mapping[str, int], Draw], Inputs]] = {
    "selective_scan": _scan,
    "selective_state_update": _state_update,
    "causal_conv1d": _conv,
    "causal_conv1d_update": _conv_update,
}


def our_call(op: str, backend: str) -> Call:
    """The public op on one backend."""
    public = getattr(ops, op)
    return lambda **inputs: public(**inputs, **OPTIONS[op], backend=backend)


def results_of(row: Row, call: Call, inputs: Inputs) -> Inputs:
    """out and every gradient, as d<argument>; of an update out and the state that it left."""
    if row.op in UPDATES:
        name = STATES[row.op]
        state = inputs[name].clone()
        with torch.no_grad():
            return {"out": call(**{**inputs, name: state}), name: state}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = call(**leaves)
    found = torch.autograd.grad(out, tuple(leaves.values()), make_cotangent(row, out))
    gradients = {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {"out": out.detach(), **gradients}


def peer_of(op: str) -> Peer:
    """The original's function with the same result."""
    return _PEERS[op]


def _scan_peer(function: Callable[..., Any]) -> Call:
    def call(*, x: Tensor, dt: Tensor, dt_bias: Tensor, **inputs: Tensor) -> Tensor:
        out: Tensor = function(x, dt, delta_bias=dt_bias, delta_softplus=True, **inputs)
        return out

    return call


def _state_peer(function: Callable[..., Any]) -> Call:
    def call(*, ssm_state: Tensor, **inputs: Tensor) -> Tensor:
        out: Tensor = function(ssm_state, dt_softplus=True, **inputs)
        return out

    return call


def _conv_peer(function: Callable[..., Any]) -> Call:
    def call(*, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = function(x, weight, bias, activation="silu")
        return out

    return call


def _taps_peer(function: Callable[..., Any]) -> Call:
    def call(*, x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = function(x, conv_state, weight, bias, activation="silu")
        return out

    return call


_SSM, _CONV = "mamba_ssm", "causal_conv1d"
_PEERS = {
    peer.op: peer
    for peer in (
        Peer(_SSM, "selective_scan", _SSM, "mamba_ssm.ops.selective_scan_interface",
             "selective_scan_fn", _scan_peer),
        Peer(_SSM, "selective_state_update", _SSM, "mamba_ssm.ops.triton.selective_state_update",
             "selective_state_update", _state_peer),
        Peer(_CONV, "causal_conv1d", _CONV, "causal_conv1d", "causal_conv1d_fn", _conv_peer),
        Peer(_CONV, "causal_conv1d_update", _CONV, "causal_conv1d", "causal_conv1d_update",
             _taps_peer),
    )
}  # fmt: skip
