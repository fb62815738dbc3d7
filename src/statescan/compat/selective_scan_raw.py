# SPDX-License-Identifier: Apache-2.0
"""The raw extension modules of the scan: ``selective_scan_cuda`` and those of VMamba's forks.

Programs that import them directly write their own autograd functions around ``fwd`` and ``bwd``;
here both are the ops of statescan, on any device. Nothing is computed that an op does not do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from statescan.compat.selective_scan import selective_scan_fn

CHUNK = 2048
"""Tokens between two checkpoints of the original, whose shape programs read."""


def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    z_: Tensor | None,
    delta_bias_: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor]:
    """``selective_scan_cuda.fwd``: [out before the gate, checkpoints] and, with z, the gated out.

    Checkpoints are (batch, dim, chunks of 2048 tokens, 2 * dstate) in A's dtype: the decay since
    the first token and the state at each chunk's end, in turn.
    """
    with torch.no_grad():
        out, states = _chunks(u, delta, A, B, C, D_, delta_bias_, delta_softplus)
        decay = _decays(delta, A, delta_bias_, delta_softplus)
        checkpoints = torch.stack((decay, states.to(A.dtype)), dim=-1).flatten(-2)
        if z_ is None:
            return [out, checkpoints]
        gated = out.float() * F.silu(z_.float())
        return [out, checkpoints, gated.to(out.dtype)]


def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    z_: Tensor | None,
    delta_bias_: Tensor | None,
    dout: Tensor,
    x_: Tensor | None,
    out_: Tensor | None,
    dz_: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Tensor | None]:
    """``selective_scan_cuda.bwd``: [du, ddelta, dA, dB, dC, dD, ddelta_bias] and what z adds.

    With z, dz follows (written into ``dz_`` if that is given) and, with ``recompute_out_z``, the
    gated output. ``x_`` and ``out_`` are not needed: states are made again from the inputs.
    """
    inputs = (u, delta, A, B, C, D_, delta_bias_, z_)
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        u, delta, A, B, C, D, delta_bias, z = leaves  # type: ignore[assignment]
        out = selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
        assert isinstance(out, Tensor)
        given = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(out, given, dout.to(out.dtype)))
    grads = [None if leaf is None else next(found) for leaf in leaves]
    results, dz = grads[:7], grads[7]
    if dz is not None:
        results.append(dz if dz_ is None else dz_.copy_(dz))
    if recompute_out_z:
        results.append(out.detach() if z_ is not None else None)
    return results


def fwd_ungated(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    delta_bias_: Tensor | None,
    delta_softplus: bool,
    nrows: int = 1,
    out_float: bool = False,
) -> list[Tensor]:
    """``fwd`` of VMamba's ``selective_scan_cuda_core``, ``_nrow`` and ``_oflex``: no gate.

    ``nrows`` chose a launch shape there and changes nothing here; ``out_float`` (of ``_oflex``)
    asks for a float32 output. Their A may be without dstate, (dim,), as in ``_ndstate``.
    """
    A, B, C = _with_dstate(A, B, C)
    wide = u.float() if out_float else u
    return fwd(wide, delta, A, B, C, D_, None, delta_bias_, delta_softplus)


def bwd_ungated(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    delta_bias_: Tensor | None,
    dout: Tensor,
    x_: Tensor | None,
    delta_softplus: bool,
    nrows: int = 1,
) -> list[Tensor | None]:
    """``bwd`` of the same modules: [du, ddelta, dA, dB, dC, dD, ddelta_bias]."""
    wide = _with_dstate(A, B, C)
    results = bwd(
        *(u, delta, *wide, D_, None, delta_bias_, dout, x_, None, None, delta_softplus, False)
    )
    for place, original in ((2, A), (3, B), (4, C)):
        grad = results[place]
        assert grad is not None
        results[place] = grad.reshape(original.shape)
    return results


def _with_dstate(A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The forms of ``_ndstate``: A (dim,), B and C (batch, ngroups, seqlen)."""
    if A.dim() == 1:
        return A.unsqueeze(1), B.unsqueeze(2), C.unsqueeze(2)
    return A, B, C


def _chunks(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Output without gate, and the state after every chunk: (batch, dim, chunks, dstate)."""
    outs: list[Tensor] = []
    states: list[Tensor] = []
    state: Tensor | None = None
    per_token = 2 if A.is_complex() else 1
    for start in range(0, max(u.shape[-1], 1), CHUNK):
        part = slice(start, start + CHUNK)
        wide = slice(start * per_token, (start + CHUNK) * per_token)
        out, state = selective_scan_fn(
            u[..., part],
            delta[..., part],
            A,
            B[..., wide] if B.dim() > 2 else B,
            C[..., wide] if C.dim() > 2 else C,
            D=D,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
            return_last_state=True,
            initial_states=state,
        )
        outs.append(out)
        states.append(state)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
    return out, torch.stack(states, dim=2)


def _decays(delta: Tensor, A: Tensor, delta_bias: Tensor | None, delta_softplus: bool) -> Tensor:
    """Product of all decays up to every chunk's end: (batch, dim, chunks, dstate)."""
    step = delta.float() if delta_bias is None else delta.float() + delta_bias.float()[:, None]
    step = F.softplus(step) if delta_softplus else step
    seqlen = delta.shape[-1]
    ends = [min(start + CHUNK, seqlen) - 1 for start in range(0, max(seqlen, 1), CHUNK)]
    total = step.cumsum(-1)[..., ends] if seqlen else step.new_zeros(*step.shape[:-1], 1)
    return torch.exp(total.unsqueeze(-1) * A.unsqueeze(1))
