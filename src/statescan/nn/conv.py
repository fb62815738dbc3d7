# SPDX-License-Identifier: Apache-2.0
"""Causal convolution with states and packing through a ``conv1d`` module that must be called.

The fast road is ``ops.causal_conv1d``; this one exists for wrapped and hooked modules only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from statescan.ops import _shapes
from statescan.ops._packing import packed_dims
from statescan.ops._shapes import pattern
from statescan.ops._values import check_cu_seqlens

_PATTERNS = {
    "x": pattern("batch dim seqlen"),
    "seq_idx": pattern("batch seqlen"),
    "cu_seqlens": pattern("num_bounds"),
}


class _Run(NamedTuple):
    """Tokens start:stop of a row; ``first`` says whether the initial state enters there."""

    row: int
    start: int
    stop: int
    state: int
    first: bool


def convolve_with_module(
    conv: nn.Module,
    width: int,
    x: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Convolve x (batch, dim, seqlen) by calling ``conv``, which pads width - 1 on both sides.

    Returns:
        The convolved x without activation, and the last width - 1 inputs of each sequence.
    """
    _check_packing({"x": x, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens})
    if initial_states is None:
        num_states = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_states = x.new_zeros(num_states, x.shape[1], width - 1)
    if seq_idx is None and cu_seqlens is None:
        return _convolve_one(conv, width, x, initial_states)
    return _convolve_runs(conv, width, x, initial_states, _runs(seq_idx, cu_seqlens))


def _check_packing(tensors: dict[str, Tensor | None]) -> None:
    """The ops' own checks, since what comes first here is the module and no op."""
    name, x = "Mamba.forward", tensors["x"]
    sizes = _shapes.bind(name, _PATTERNS, tensors, packed_dims(name, x, tensors))
    _shapes.check_index(name, tensors, ("seq_idx", "cu_seqlens"))
    check_cu_seqlens(name, tensors["cu_seqlens"], sizes["seqlen"])


def step_with_module(conv: nn.Module, width: int, x: Tensor, conv_state: Tensor) -> Tensor:
    """Convolve one token x (batch, dim) by calling ``conv``; conv_state is updated in place."""
    reach = conv_state[..., conv_state.shape[-1] - (width - 1) :]
    out, _ = _convolve_one(conv, width, x.unsqueeze(-1), reach)
    shifted = torch.cat((conv_state, x.unsqueeze(-1).to(conv_state.dtype)), dim=-1)[..., 1:]
    conv_state.copy_(shifted.detach())
    return out.squeeze(-1)


def _convolve_one(conv: nn.Module, width: int, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    window = torch.cat((state.to(x.dtype), x), dim=-1)
    seqlen = x.shape[-1]
    if seqlen == 0:
        return x, window
    out: Tensor = conv(window)
    return out[..., width - 1 : width - 1 + seqlen], window[..., seqlen:]


def _convolve_runs(
    conv: nn.Module, width: int, x: Tensor, initial_states: Tensor, runs: list[_Run]
) -> tuple[Tensor, Tensor]:
    """One call a sequence: slow, but a module cannot be told where sequences end."""
    first = initial_states.to(x.dtype)
    finals = list(first.unbind(0))
    pieces = []
    for run in runs:
        if run.state < 0:
            pieces.append(torch.zeros_like(x[run.row : run.row + 1, :, run.start : run.stop]))
            continue
        state = first[run.state : run.state + 1]
        tokens = x[run.row : run.row + 1, :, run.start : run.stop]
        out, final = _convolve_one(
            conv, width, tokens, state if run.first else torch.zeros_like(state)
        )
        pieces.append(out)
        finals[run.state] = final.squeeze(0)
    if not pieces:
        return x, first
    out = torch.cat([piece.squeeze(0) for piece in pieces], dim=-1)
    batch, dim, seqlen = x.shape
    out = out.reshape(dim, batch, seqlen).transpose(0, 1)
    return out, torch.stack(finals) if finals else first


def _runs(seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> list[_Run]:
    """Cut every row into sequences and paddings (state -1), in order and without gaps."""
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist()
        pairs = pairwise(borders)
        return [_Run(0, start, stop, i, True) for i, (start, stop) in enumerate(pairs)]
    runs = []
    ids = [] if seq_idx is None else seq_idx.tolist()
    for row, row_ids in enumerate(ids):
        start, first = 0, True
        for stop in range(1, len(row_ids) + 1):
            if stop < len(row_ids) and row_ids[stop] == row_ids[start]:
                continue
            real = row_ids[start] >= 0
            runs.append(_Run(row, start, stop, row if real else -1, first and real))
            first = first and not real
            start = stop
    return runs
