# SPDX-License-Identifier: Apache-2.0
"""Calls of every op on a GPU with all their results, for tests of repetition, graphs and streams.

Sizes are chosen so that kernels take every road: many blocks, split time, both layouts, decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers.layouts import lay_out
from helpers.op_inputs import (
    Kwargs,
    conv_inputs,
    inner_inputs,
    scan_inputs,
    state_inputs,
    taps_inputs,
)

from statescan import ops

UPDATED = {"selective_state_update": "ssm_state", "causal_conv1d_update": "conv_state"}

MAKERS: dict[str, tuple[str, Callable[..., Kwargs]]] = {
    "scan": ("selective_scan", lambda **o: scan_inputs(3, 192, 300, 16, **o)),
    "scan_long": ("selective_scan", lambda **o: scan_inputs(1, 40, 9000, 16, **o)),
    "scan_last": ("selective_scan", lambda **o: _last(scan_inputs(2, 136, 257, 16, **o))),
    "scan_groups": ("selective_scan", lambda **o: scan_inputs(2, 96, 200, 33, ngroups=3, **o)),
    "scan_states_1": ("selective_scan", lambda **o: scan_inputs(4, 128, 130, 1, **o)),
    "scan_constant": (
        "selective_scan",
        lambda **o: scan_inputs(2, 64, 150, 8, constant="BC", **o),
    ),
    "scan_packed": (
        "selective_scan",
        lambda **o: _packed(scan_inputs(1, 64, 700, 16, num_states=4, **o), 700),
    ),
    "conv": ("causal_conv1d", lambda **o: conv_inputs(3, 200, 515, 4, **o)),
    "conv_last": ("causal_conv1d", lambda **o: _last(conv_inputs(3, 200, 515, 4, **o))),
    "conv_packed": (
        "causal_conv1d",
        lambda **o: _packed(conv_inputs(1, 96, 700, 4, num_states=4, **o), 700),
    ),
    "inner": ("mamba_inner", lambda **o: inner_inputs(2, 64, 130, 16, 4, 4, 32, **o)),
    "state": ("selective_state_update", lambda **o: state_inputs(9, 256, 16, **o)),
    "state_heads": (
        "selective_state_update",
        lambda **o: state_inputs(5, dstate=128, heads=(8, 64), ngroups=2, **o),
    ),
    "taps": ("causal_conv1d_update", lambda **o: taps_inputs(9, 256, 4, **o)),
    "taps_tokens": ("causal_conv1d_update", lambda **o: taps_inputs(9, 256, 4, ntokens=3, **o)),
}
SEQUENCES = tuple(name for name, (op, _) in MAKERS.items() if op not in UPDATED)
STEPS = tuple(name for name, (op, _) in MAKERS.items() if op in UPDATED)


def _last(kwargs: Kwargs) -> Kwargs:
    return {
        n: lay_out(v, "channel_last") if n in ("x", "dt", "z") else v for n, v in kwargs.items()
    }


def _packed(kwargs: Kwargs, seqlen: int) -> Kwargs:
    return kwargs | {"cu_seqlens": torch.tensor([0, 1, 130, 130, seqlen])}


@dataclass
class OnGpu:
    """One call: its op, and its arguments on the GPU.

    Attributes:
        cotangents: Gradients of the results, once there was a backward.
    """

    op: str
    kwargs: Kwargs
    cotangents: tuple[torch.Tensor, ...] | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: v for n, v in self.kwargs.items() if isinstance(v, torch.Tensor)}

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Results without a graph; an update's state is left as it is written."""
        with torch.no_grad():
            return _tuple(getattr(ops, self.op)(**self.kwargs, backend="cuda"))

    def run(self) -> dict[str, torch.Tensor]:
        """Everything that comes out: results, gradients, states; arguments stay as they were."""
        if self.op in UPDATED:
            name = UPDATED[self.op]
            fresh = OnGpu(self.op, self.kwargs | {name: self.kwargs[name].clone()})
            (out,) = fresh.forward()
            return {"out": out, name: fresh.kwargs[name]}
        leaves = self.leaves()
        results, gradients = self.forward_and_backward(leaves)
        named = {f"d{n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}
        return {str(i): r.detach() for i, r in enumerate(results)} | named

    def leaves(self) -> dict[str, torch.Tensor]:
        return {
            n: v.detach().requires_grad_() for n, v in self.tensors.items() if v.is_floating_point()
        }

    def forward_and_backward(self, leaves: dict[str, torch.Tensor]) -> tuple[Any, Any]:
        results = _tuple(getattr(ops, self.op)(**{**self.kwargs, **leaves}, backend="cuda"))
        if self.cotangents is None:
            self.cotangents = tuple(map(_cotangent, results))
        found = torch.autograd.grad(
            results, tuple(leaves.values()), self.cotangents, allow_unused=True
        )
        return results, found


def on_gpu(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cuda", seed: int = 0
) -> OnGpu:
    """The call of that name."""
    op, maker = MAKERS[name]
    kwargs = maker(dtype=dtype, seed=seed)
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    return OnGpu(op, moved)


def assert_equal_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _cotangent(result: torch.Tensor) -> torch.Tensor:
    index = torch.arange(result.numel(), device=result.device, dtype=torch.float32)
    return torch.cos(index).reshape(result.shape).to(result.dtype)
