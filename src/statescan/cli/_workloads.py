# SPDX-License-Identifier: Apache-2.0
"""The calls that benchmarks time: inputs of realistic size, and the same call in three versions.

Small cases with every option are ``testing.cases``; how to time is in ``_timing``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statescan import ops, reference
from statescan.testing import naive

UPDATES = ("selective_state_update", "causal_conv1d_update")
"""The ops without gradients, one token a call."""

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Workload:
    """One op at one size.

    Attributes:
        op: Its name.
        inputs: Tensors by argument name, which all versions take.
        options: Further arguments of statescan's functions; the naive ones have them built in.
    """

    op: str
    inputs: Mapping[str, Tensor]
    options: Mapping[str, Any]

    @property
    def directions(self) -> tuple[str, ...]:
        """fwd, and fwd_bwd where there are gradients."""
        return ("fwd",) if self.op in UPDATES else ("fwd", "fwd_bwd")

    def version(self, name: str) -> Call:
        """The call by "naive", by "reference", or by the backend of that name (or "auto")."""
        if name == "naive":
            naive_call: Call = getattr(naive, f"{self.op}_naive")
            return naive_call
        if name == "reference":
            exact = getattr(reference, f"{self.op}_ref")
            return lambda **inputs: exact(**inputs, **self.options)
        public = getattr(ops, self.op)
        return lambda **inputs: public(**inputs, **self.options, backend=name)

    def in_double(self) -> Workload:
        """Copies of the inputs in float64."""
        return Workload(
            self.op, {name: tensor.double() for name, tensor in self.inputs.items()}, self.options
        )


def run(call: Call, inputs: Mapping[str, Tensor], direction: str) -> dict[str, Tensor]:
    """The results of one call: out, and with fwd_bwd the gradient of sum(out * cos(index)).

    States that the call updates in place are among ``inputs``.
    """
    if direction == "fwd":
        with torch.no_grad():
            return {"out": call(**inputs)}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = call(**leaves)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), _cotangent(out))
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients)}
    return {"out": out.detach(), **named}


def _cotangent(out: Tensor) -> Tensor:
    """Fixed numbers without structure that a wrong backward could hide behind."""
    index = torch.arange(out.numel(), dtype=torch.float64, device=out.device)
    return torch.cos(index).reshape(out.shape).to(out.dtype)


def make_workload(
    op: str, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Workload:
    """Seeded inputs for ``sizes``: batch, dim, seqlen, dstate, width."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
        return drawn.to(device, to)

    # Parameters of the state space are float32 whatever the activations are, as in models.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs, options = _MAKERS[op](sizes, normal, wide)
    return Workload(op, inputs, options)


Normal = Callable[..., Tensor]
Made = tuple[dict[str, Tensor], dict[str, Any]]


def _state_space(sizes: Mapping[str, int], normal: Normal, wide: torch.dtype) -> dict[str, Tensor]:
    """A, D and dt_bias as models have them: rates 1 to dstate, steps of 0.001 to 0.1."""
    dim, dstate = sizes["dim"], sizes["dstate"]
    # Made from a draw of zero variance, so that they land on the device of the others.
    blank = normal(dim, dstate, to=wide) * 0
    rates = blank - torch.arange(1, dstate + 1, dtype=wide, device=blank.device)
    steps = torch.exp(normal(dim, to=wide).clamp(-2, 2) + math.log(0.01))
    return {"A": rates, "D": normal(dim, to=wide), "dt_bias": torch.log(torch.expm1(steps))}


def _selective_scan(sizes: Mapping[str, int], normal: Normal, wide: torch.dtype) -> Made:
    batch, dim, seqlen, dstate = (sizes[n] for n in ("batch", "dim", "seqlen", "dstate"))
    inputs = {name: normal(batch, dim, seqlen) for name in ("x", "dt", "z")}
    inputs |= {name: normal(batch, dstate, seqlen) for name in ("B", "C")}
    return inputs | _state_space(sizes, normal, wide), {"dt_softplus": True}


def _selective_state_update(sizes: Mapping[str, int], normal: Normal, wide: torch.dtype) -> Made:
    batch, dim, dstate = (sizes[n] for n in ("batch", "dim", "dstate"))
    inputs = {"ssm_state": normal(batch, dim, dstate, to=wide)}
    inputs |= {name: normal(batch, dim) for name in ("x", "dt", "z")}
    inputs |= {name: normal(batch, dstate) for name in ("B", "C")}
    return inputs | _state_space(sizes, normal, wide), {"dt_softplus": True}


def _causal_conv1d(sizes: Mapping[str, int], normal: Normal, wide: torch.dtype) -> Made:
    batch, dim, seqlen, width = (sizes[n] for n in ("batch", "dim", "seqlen", "width"))
    inputs = {"x": normal(batch, dim, seqlen), "weight": normal(dim, width), "bias": normal(dim)}
    return inputs, {"activation": "silu"}


def _causal_conv1d_update(sizes: Mapping[str, int], normal: Normal, wide: torch.dtype) -> Made:
    batch, dim, width = (sizes[n] for n in ("batch", "dim", "width"))
    inputs = {"x": normal(batch, dim), "conv_state": normal(batch, dim, width - 1)}
    return inputs | {"weight": normal(dim, width), "bias": normal(dim)}, {"activation": "silu"}


def _mamba_inner(sizes: Mapping[str, int], normal: Normal, wide: torch.dtype) -> Made:
    batch, dim, seqlen, dstate, width = (
        sizes[n] for n in ("batch", "dim", "seqlen", "dstate", "width")
    )
    # The originals' proportions: d_inner is twice d_model, dt_rank a sixteenth of d_model.
    d_model = max(1, dim // 2)
    dt_rank = math.ceil(d_model / 16)
    inputs = {
        "xz": normal(batch, 2 * dim, seqlen),
        "conv_weight": normal(dim, width) / width**0.5,
        "conv_bias": normal(dim),
        "x_proj_weight": normal(dt_rank + 2 * dstate, dim) / dim**0.5,
        "dt_proj_weight": normal(dim, dt_rank) / dt_rank**0.5,
        "out_proj_weight": normal(d_model, dim) / dim**0.5,
    }
    return inputs | _state_space(sizes, normal, wide), {"dt_softplus": True}


_MAKERS: dict[str, Callable[[Mapping[str, int], Normal, torch.dtype], Made]] = {
    "selective_scan": _selective_scan,
    "selective_state_update": _selective_state_update,
    "causal_conv1d": _causal_conv1d,
    "causal_conv1d_update": _causal_conv1d_update,
    "mamba_inner": _mamba_inner,
}
