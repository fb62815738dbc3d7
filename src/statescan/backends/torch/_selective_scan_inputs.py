# SPDX-License-Identifier: Apache-2.0
"""The inputs of one selective scan in the forms that both directions need, and its block memory.

Loading and storing only: no recurrence, no gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from statescan.backends.outputs import scan_chunk_size, scan_state_dtype
from statescan.backends.torch._selective_scan_blocks import Blocks, cut
from statescan.backends.torch._selective_scan_steps import decay_rate
from statescan.backends.torch._selective_scan_weights import Weights
from statescan.backends.torch._sharing import UNSHARED, Sharing
from statescan.backends.torch.sequences import SequencePlan, plan_sequences


class Tile(NamedTuple):
    """A block: rows, channels and steps ``start`` to ``stop`` in the order of processing."""

    rows: slice
    channels: slice
    start: int
    stop: int


class StepSize(NamedTuple):
    """dt of a tile as (rows, channels, steps): before and after softplus."""

    raw: Tensor
    dt: Tensor


@dataclass(frozen=True)
class Scan:
    """One call, prepared.

    Attributes:
        compute: Dtype of real arithmetic.
        A: (dstate, dim), in the dtype of the states.
        rate: A as ``fill_decay`` wants it.
        B, C: See ``Weights``.
        D, dt_bias: (dim, 1) in ``compute``.
        dt, dt_softplus: As given.
        plan: Where sequences lie.
        blocks: How the work is cut.
        chunk_size: Steps between two saved states.
    """

    compute: torch.dtype
    A: Tensor
    rate: Tensor
    B: Weights
    C: Weights
    D: Tensor | None
    dt_bias: Tensor | None
    dt: Tensor
    dt_softplus: bool
    plan: SequencePlan
    blocks: Blocks
    chunk_size: int

    def load(self, tensor: Tensor, tile: Tile) -> Tensor:
        """Tokens of (batch, dim, seqlen) as (rows, channels, steps) in ``compute``; 0 at padding.

        Perhaps a view of the argument: not to be changed.
        """
        rows, channels, start, stop = tile
        piece = self.plan.take(tensor[rows, channels], rows, start, stop).to(self.compute)
        return self._mask(piece, tile)

    def load_step_size(self, tile: Tile) -> StepSize:
        """dt before and after bias and softplus; afterwards 0 at padding, which keeps the state."""
        raw = self.load(self.dt, tile)
        if self.dt_bias is not None:
            raw = raw + self.dt_bias[tile.channels]
        if not self.dt_softplus:
            return StepSize(raw, self._mask(raw, tile))
        return StepSize(raw, self._mask(F.softplus(raw), tile))

    def store(self, target: Tensor, tile: Tile, values: Tensor) -> None:
        """Write (rows, channels, steps) to the tile's place in (batch, dim, seqlen) ``target``."""
        rows, channels, start, stop = tile
        self.plan.put(target[rows, channels], rows, start, stop, values)

    def _mask(self, piece: Tensor, tile: Tile) -> Tensor:
        if self.plan.padding is None:
            return piece
        return piece.masked_fill(self.plan.padding[tile.rows, None, tile.start : tile.stop], 0)


class Memory:
    """Working memory of blocks, taken once a call: fresh pages cost more than the arithmetic.

    Also how many steps of a block one operation may cover, see ``piece``.
    """

    def __init__(self, scan: Scan, count: int) -> None:
        rows, channels = scan.blocks.largest
        self._dstate = scan.A.shape[0]
        elements = scan.blocks.steps * rows * channels * self._dstate
        # Complex products round differently at the ends of a thread's part: CPUs never share them.
        never = scan.A.is_complex() and scan.A.device.type == "cpu"
        self._sharing = None if never else Sharing(scan.A.device, elements)
        size = (min(scan.blocks.steps, scan.blocks.seqlen) + 1) * rows * channels * self._dstate
        self._parts = [scan.A.new_empty(size) for _ in range(count)]

    def view(self, number: int, tile: Tile, extra: int = 0) -> Tensor:
        """Part ``number`` as dense (steps + extra, rows, dstate, channels); undefined content."""
        rows, channels, start, stop = tile
        shape = (
            stop - start + extra,
            rows.stop - rows.start,
            self._dstate,
            channels.stop - channels.start,
        )
        return self._parts[number][: prod(shape)].view(shape)

    def piece(self, tile: Tile) -> int:
        """Steps that one operation covers: all, or as many as torch does not share with threads."""
        if self._sharing is not None and self._sharing.on:
            return tile.stop - tile.start
        rows, channels, _, _ = tile
        step: int = (rows.stop - rows.start) * self._dstate * (channels.stop - channels.start)
        return max(1, UNSHARED // max(1, step))

    def next_chunk(self) -> None:
        """Look again whether threads are free."""
        if self._sharing is not None:
            self._sharing.ask()


def prepare(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    reverse: bool,
    compute: torch.dtype,
) -> Scan:
    """The call in the form that both directions work on."""
    batch, dim, seqlen = x.shape
    dstate = A.shape[1]
    state = scan_state_dtype(A, compute)
    weights = Weights(B, dim, state), Weights(C, dim, state)
    chunk_size = scan_chunk_size(dstate)
    return Scan(
        compute=compute,
        A=A.t().to(state).contiguous(),
        rate=decay_rate(A, state),
        B=weights[0],
        C=weights[1],
        D=None if D is None else D.to(compute)[:, None],
        dt_bias=None if dt_bias is None else dt_bias.to(compute)[:, None],
        dt=dt,
        dt_softplus=dt_softplus,
        plan=plan_sequences(batch, seqlen, seq_idx, cu_seqlens, reverse),
        blocks=cut(x, dstate, chunk_size, lcm(weights[0].whole, weights[1].whole)),
        chunk_size=chunk_size,
    )
