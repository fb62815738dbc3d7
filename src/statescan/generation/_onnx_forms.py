# SPDX-License-Identifier: Apache-2.0
"""The sequence ops written out in torch operations that ONNX has a form for.

For export only: the recurrence is torch's own scan over a body, which runs slowly elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from statescan.errors import BackendUnavailableError
from statescan.reference.discretize import compute_dtype

_SCAN_ARGUMENTS = ("combine_fn", "init", "xs", "additional_inputs")


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The sequence ops in terms of torch's own, for ``ExportedProgram.run_decompositions``."""
    _scan_op()
    return {getattr(torch.ops.statescan, name).default: call for name, call in FORMS.items()}


def _scan_op() -> Callable[..., Any]:
    """torch's scan over a body function, which its exporter turns into an ONNX Scan."""
    scan = of_torch("torch._higher_order_ops.scan", "scan_op")
    takes = tuple(inspect.signature(type(scan).__call__).parameters)[1:]
    if takes != _SCAN_ARGUMENTS:
        # Arguments are passed by position: in another order they would be taken for each other.
        raise _too_old(f"its scan takes {', '.join(takes)}")
    return scan


def of_torch(module: str, name: str) -> Callable[..., Any]:
    """A part of torch that has no public name and that older ones lack."""
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _too_old(str(error)) from error
    return found


def _too_old(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"ONNX export: torch {torch.__version__} cannot translate a scan to ONNX ({reason}).\n"
        "It needs a torch whose ONNX exporter knows torch.ops.higher_order.scan.\n"
        "Upgrade torch; 2.13 is known to work."
    )


def _causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: None,
    cu_seqlens: None,
    silu: bool,
    reverse: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(x, weight, bias, initial_states)
    dim, width = weight.shape
    tokens = x.flip(-1) if reverse else x
    if initial_states is None:
        initial_states = x.new_zeros(x.shape[0], dim, width - 1)
    window = torch.cat((initial_states.to(compute), tokens.to(compute)), dim=-1)
    wide_bias = None if bias is None else bias.to(compute)
    y = F.conv1d(window, weight.to(compute).unsqueeze(1), wide_bias, groups=dim)
    y = F.silu(y) if silu else y
    out = (y.flip(-1) if reverse else y).to(x.dtype)
    return out, window[..., x.shape[2] :].to(x.dtype)


def _selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: None,
    cu_seqlens: None,
    dt_softplus: bool,
    reverse: bool,
    save_states: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    compute = compute_dtype(x, dt, A, B, C, D, z, dt_bias, initial_states)
    wide, dt = x.to(compute), dt.to(compute)
    dt = dt if dt_bias is None else dt + dt_bias.to(compute).unsqueeze(-1)
    dt = F.softplus(dt) if dt_softplus else dt
    if initial_states is None:
        state = torch.zeros(x.shape[0], *A.shape, dtype=compute)
    else:
        state = initial_states.to(compute)
    inputs = [wide.permute(2, 0, 1), dt.permute(2, 0, 1)]
    inputs += [_weights_by_token(weight.to(compute), wide) for weight in (B, C)]
    if reverse:
        inputs = [tensor.flip(0) for tensor in inputs]
    final_states, y = _scan_op()(_step, [state], inputs, (A.to(compute),))
    y = (y.flip(0) if reverse else y).permute(1, 2, 0)
    y = y if D is None else y + D.to(compute).unsqueeze(-1) * wide
    y = y if z is None else y * F.silu(z.to(compute))
    return y.to(x.dtype), final_states, x.new_zeros(0)


def _step(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor) -> list[Tensor]:
    """One token of the recurrence; B and C are (batch, dim or 1, dstate)."""
    state = torch.exp(dt.unsqueeze(-1) * A) * state + (dt * x).unsqueeze(-1) * B
    return [state, (state * C).sum(dim=-1)]


def _weights_by_token(weight: Tensor, x: Tensor) -> Tensor:
    """B or C as (seqlen, batch or 1, dim or 1, dstate)."""
    if weight.dim() == 2:
        return weight.expand(x.shape[2], 1, *weight.shape)
    groups = weight.shape[1]
    by_token = weight.permute(3, 0, 1, 2)
    return by_token if groups == 1 else by_token.repeat_interleave(x.shape[1] // groups, dim=2)


def _mamba_inner(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_proj_weight: Tensor,
    dt_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    names = (
        *("D", "dt_bias", "b_proj_bias", "c_proj_bias", "out_proj_weight", "out_proj_bias"),
        *("b_norm_weight", "c_norm_weight", "dt_norm_weight", "conv_initial_states"),
        *("initial_states", "seq_idx", "cu_seqlens", "dt_softplus", "silu", "norm_eps", "reverse"),
    )
    given: Mapping[str, Any] = dict(zip(names, rest))
    tensors = (v for v in (xz, A, *rest) if isinstance(v, Tensor) and v.is_floating_point())
    wide = xz.to(torch.float64) if compute_dtype(*tensors) == torch.float64 else xz
    dim, dt_rank = dt_proj_weight.shape
    eps, reverse = given["norm_eps"], given["reverse"]
    x, conv_final = _causal_conv1d(
        *(wide[:, :dim], conv_weight, conv_bias, given["conv_initial_states"], None, None),
        *(given["silu"], reverse),
    )
    projected = F.linear(x.transpose(1, 2), x_proj_weight.to(wide.dtype))
    dt = F.linear(projected[..., :dt_rank], dt_proj_weight.to(wide.dtype))
    dt = _normed(dt, None, given["dt_norm_weight"], eps)
    first, last = projected[..., dt_rank : dt_rank + A.shape[1]], projected[..., -A.shape[1] :]
    if B is None:
        B = _normed(first, given["b_proj_bias"], given["b_norm_weight"], eps)
        B = B.transpose(1, 2).unsqueeze(1)
    if C is None:
        C = _normed(last, given["c_proj_bias"], given["c_norm_weight"], eps)
        C = C.transpose(1, 2).unsqueeze(1)
    out, final, _ = _selective_scan(
        *(x, dt.transpose(1, 2), A, B, C, given["D"], wide[:, dim:], given["dt_bias"]),
        *(given["initial_states"], None, None, given["dt_softplus"], reverse, False),
    )
    if given["out_proj_weight"] is not None:
        bias = given["out_proj_bias"]
        out = F.linear(
            out.transpose(1, 2),
            given["out_proj_weight"].to(wide.dtype),
            None if bias is None else bias.to(wide.dtype),
        )
    saved = (xz.new_zeros(0), xz.new_zeros(0), xz.new_zeros(0))
    return out.to(xz.dtype), conv_final.to(xz.dtype), final, *saved


def _normed(columns: Tensor, bias: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """Columns of the projection plus their bias, over their root mean square."""
    if bias is None and weight is None:
        return columns
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))
    wide = wide if bias is None else wide + bias
    if weight is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight


FORMS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fwd": _causal_conv1d,
    "selective_scan_fwd": _selective_scan,
    "mamba_inner_fwd": _mamba_inner,
}
