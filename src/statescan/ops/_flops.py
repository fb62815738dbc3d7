# SPDX-License-Identifier: Apache-2.0
"""Operation counts of the registered ops for ``torch.utils.flop_counter.FlopCounterMode``.

A multiplication, an addition and an exponential count as one each; softplus, SiLU and norms are
left out, as torch leaves out activations. No arithmetic on tensors here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from statescan._after_import import after_import

Shapes = Mapping[str, Any]
"""Shapes of tensor arguments and values of the others, by the names of the op's schema."""

# For each token and state: the decay takes 2, the new state 3, its readout 2.
_SCAN = 7
# Decay and state again (5); two each for the gradients of the state, the decay, dt, A, B, C and
# dt x; one to hand the state's gradient to the token before.
_SCAN_BWD = 20


def _tokens(of: Shapes) -> int:
    """Numbers in x: (batch, dim, seqlen), also as half of mamba_inner's xz."""
    return prod(of["x"]) if "x" in of else prod(of["xz"]) // 2


def _states(of: Shapes) -> int:
    """Numbers in the states of all tokens."""
    dstate: int = of["A"][-1]
    return _tokens(of) * dstate


def _around_the_scan(of: Shapes) -> int:
    """dt x, the skip and the gate, once a token."""
    gated = "xz" in of or of["z"] is not None
    return _tokens(of) * (1 + 2 * (of["D"] is not None) + bool(gated))


def _projections(of: Shapes) -> int:
    """Multiplications in the projections of mamba_inner."""
    batch, _, seqlen = of["xz"]
    weights = (of[f"{name}_weight"] for name in ("x_proj", "dt_proj", "out_proj"))
    multiplications: int = sum(prod(weight) for weight in weights if weight is not None)
    return int(batch * seqlen) * multiplications


def _scan_fwd(of: Shapes) -> int:
    return _SCAN * _states(of) + _around_the_scan(of)


def _scan_bwd(of: Shapes) -> int:
    return _SCAN_BWD * _states(of) + 2 * _around_the_scan(of)


def _conv_fwd(of: Shapes) -> int:
    width: int = of["weight" if "weight" in of else "conv_weight"][1]
    return 2 * _tokens(of) * width


def _conv_bwd(of: Shapes) -> int:
    """Gradients of x and of the weight; below an activation also the convolution again."""
    return (2 + bool(of["silu"])) * _conv_fwd(of)


def _inner_fwd(of: Shapes) -> int:
    return _conv_fwd(of) + 2 * _projections(of) + _scan_fwd(of)


def _inner_bwd(of: Shapes) -> int:
    """The convolution is made again in any case, since the projections need its output."""
    return 3 * _conv_fwd(of) + 4 * _projections(of) + _scan_bwd(of)


_FORMULAS: dict[str, Callable[[Shapes], int]] = {
    "selective_scan_fwd": _scan_fwd,
    "selective_scan_bwd": _scan_bwd,
    "selective_state_update": _scan_fwd,
    "causal_conv1d_fwd": _conv_fwd,
    "causal_conv1d_bwd": _conv_bwd,
    "causal_conv1d_update": _conv_fwd,
    "mamba_inner_fwd": _inner_fwd,
    "mamba_inner_bwd": _inner_bwd,
}


def register_flop_formulas() -> None:
    """Tell torch's counter about the ops, but not before something loads it: it loads Triton."""
    after_import("torch.utils.flop_counter", _register)


def _register() -> None:
    from torch.utils.flop_counter import flop_registry

    # Not by register_flop_formula: that of torch 2.4 files formulas where no counter looks.
    for name, formula in _FORMULAS.items():
        packet = getattr(torch.ops.statescan, name)
        flop_registry[packet] = _by_name(packet, formula)


def _by_name(packet: Any, formula: Callable[[Shapes], int]) -> Callable[..., int]:
    names = [argument.name for argument in packet.default._schema.arguments]

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return formula({n: v.shape if isinstance(v, Tensor) else v for n, v in named.items()})

    return count
