# SPDX-License-Identifier: Apache-2.0
"""Names of Mamba-2, Mamba-3 and attention: importable, and refused with the reason when used.

A missing name would fail at an import that a program may never need, or send it to a slow path
without a word. Signatures are the originals', because programs look at them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from statescan.errors import NotServedError

_NO_LIMIT = (0.0, float("inf"))


def _refuse(name: str) -> NoReturn:
    raise NotServedError(
        f"{name} is not served by this version of statescan.\n"
        "It serves the ops, modules and models of Mamba-1 and the causal convolution.\n"
        "Use a Mamba-1 model, or statescan.compat.uninstall() and mamba-ssm itself."
    )


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> NoReturn:
    """Of Mamba-2: not served; raises NotServedError."""
    _refuse("mamba_chunk_scan_combined")


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> NoReturn:
    """Of Mamba-2: not served; raises NotServedError."""
    _refuse("mamba_chunk_scan")


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> NoReturn:
    """Of Mamba-2: not served; raises NotServedError."""
    _refuse("mamba_split_conv1d_scan_combined")


def mamba_split_conv1d_scan_ref(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> NoReturn:
    """Of Mamba-2: not served; raises NotServedError."""
    _refuse("mamba_split_conv1d_scan_ref")


def mamba_conv1d_scan_ref(
    xBC: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
) -> NoReturn:
    """Of Mamba-2: not served; raises NotServedError."""
    _refuse("mamba_conv1d_scan_ref")


def ssd_chunk_scan_combined_ref(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> NoReturn:
    """Of Mamba-2: not served; raises NotServedError."""
    _refuse("ssd_chunk_scan_combined_ref")


def ssd_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
) -> NoReturn:
    """Of Mamba-2: not served; raises NotServedError."""
    _refuse("ssd_selective_scan")


class _Refused(nn.Module):
    """A module that says that it is not served when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(type(self).__name__)


class Mamba2(_Refused):
    """The Mamba-2 mixer: not served."""


class Mamba2Simple(_Refused):
    """The Mamba-2 mixer without inference: not served."""


class Mamba3(_Refused):
    """The Mamba-3 mixer: not served."""


class MHA(_Refused):
    """Attention in hybrid models: not served."""
