# SPDX-License-Identifier: Apache-2.0
"""Other packages that compute the same ops, if they can be imported here.

On a GPU the originals' kernels are timed, on the CPU the plain functions that they ship.

A package is imported only when it is about to be timed; what fails is kept as the reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from statescan.cli._workloads import Call


@dataclass(frozen=True)
class Peer:
    """One op of another package.

    Attributes:
        name: As shown in tables.
        op: Our op with the same result.
        package: The distribution to install.
        module: Where ``function`` is.
        adapt: Makes a call with our argument names of the function.
    """

    name: str
    op: str
    package: str
    module: str
    function: str
    adapt: Callable[[Callable[..., Any]], Call]

    def load(self) -> tuple[Call | None, str]:
        """The call, or None and why it cannot be imported."""
        try:
            function = getattr(importlib.import_module(self.module), self.function)
        except Exception as error:  # noqa: BLE001, packages with compiled parts fail in any way
            lines = str(error).strip().splitlines() or [""]
            return None, f"{type(error).__name__}: {lines[0]}"
        return self.adapt(function), ""

    def version(self) -> str | None:
        """Of the installed distribution."""
        return installed_version(self.package)


def installed_version(package: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def peers_of(op: str, device_type: str = "cpu") -> tuple[Peer, ...]:
    """The peers of an op on such a device, importable or not."""
    known = _PEERS if device_type == "cpu" else _GPU_PEERS
    return tuple(peer for peer in known if peer.op == op)


def _mamba_ssm_scan(function: Callable[..., Any]) -> Call:
    def call(*, x: Tensor, dt: Tensor, dt_bias: Tensor, **inputs: Tensor) -> Tensor:
        out: Tensor = function(x, dt, delta_bias=dt_bias, delta_softplus=True, **inputs)
        return out

    return call


def _mamba_ssm_update(function: Callable[..., Any]) -> Call:
    def call(*, ssm_state: Tensor, **inputs: Tensor) -> Tensor:
        out: Tensor = function(ssm_state, dt_softplus=True, **inputs)
        return out

    return call


def _mamba_ssm_inner(function: Callable[..., Any]) -> Call:
    def call(**given: Tensor) -> Tensor:
        out: Tensor = function(
            given["xz"],
            given["conv_weight"].unsqueeze(1),
            given["conv_bias"],
            given["x_proj_weight"],
            given["dt_proj_weight"],
            given["out_proj_weight"],
            None,
            given["A"],
            D=given["D"],
            delta_bias=given["dt_bias"],
            delta_softplus=True,
        )
        return out

    return call


def _causal_conv1d(function: Callable[..., Any]) -> Call:
    def call(*, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = function(x, weight, bias, activation="silu")
        return out

    return call


def _causal_conv1d_update(function: Callable[..., Any]) -> Call:
    def call(*, x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = function(x, conv_state, weight, bias, activation="silu")
        return out

    return call


def _parallel_scan(function: Callable[..., Any]) -> Call:
    """A scan over (batch, seqlen, dim, dstate) factors and inputs, and what goes around it."""

    def call(
        *,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        dt_bias: Tensor,
    ) -> Tensor:
        step = F.softplus(dt + dt_bias.unsqueeze(-1)).transpose(1, 2)
        decay = torch.exp(step.unsqueeze(-1) * A)
        entering = (step * x.transpose(1, 2)).unsqueeze(-1) * B.transpose(1, 2).unsqueeze(2)
        states = function(decay, entering.to(decay.dtype))
        weights = C.transpose(1, 2).unsqueeze(-1).to(states.dtype)
        y = (states @ weights).squeeze(-1).transpose(1, 2) + D.unsqueeze(-1) * x
        out: Tensor = (y * F.silu(z)).to(x.dtype)
        return out

    return call


_SSM, _CONV = "mamba_ssm", "causal_conv1d"
_SCAN = "mamba_ssm.ops.selective_scan_interface"
_STEP = "mamba_ssm.ops.triton.selective_state_update"
_TAPS = "causal_conv1d.causal_conv1d_interface"
_MAMBAPY = Peer("mambapy pscan", "selective_scan", "mambapy", "mambapy.pscan", "pscan",
                _parallel_scan)  # fmt: skip
_PEERS = (
    Peer("mamba_ssm ref", "selective_scan", _SSM, _SCAN, "selective_scan_ref", _mamba_ssm_scan),
    _MAMBAPY,
    Peer("mamba_ssm ref", "selective_state_update", _SSM, _STEP, "selective_state_update_ref",
         _mamba_ssm_update),
    Peer("causal_conv1d ref", "causal_conv1d", _CONV, _TAPS, "causal_conv1d_ref", _causal_conv1d),
    Peer("causal_conv1d ref", "causal_conv1d_update", _CONV, _TAPS, "causal_conv1d_update_ref",
         _causal_conv1d_update),
    Peer("mamba_ssm ref", "mamba_inner", _SSM, _SCAN, "mamba_inner_ref", _mamba_ssm_inner),
)  # fmt: skip
_GPU_PEERS = (
    Peer("mamba_ssm", "selective_scan", _SSM, _SCAN, "selective_scan_fn", _mamba_ssm_scan),
    _MAMBAPY,
    Peer("mamba_ssm", "selective_state_update", _SSM, _STEP, "selective_state_update",
         _mamba_ssm_update),
    Peer("causal_conv1d", "causal_conv1d", _CONV, "causal_conv1d", "causal_conv1d_fn",
         _causal_conv1d),
    Peer("causal_conv1d", "causal_conv1d_update", _CONV, "causal_conv1d", "causal_conv1d_update",
         _causal_conv1d_update),
    Peer("mamba_ssm", "mamba_inner", _SSM, _SCAN, "mamba_inner_fn", _mamba_ssm_inner),
)  # fmt: skip
