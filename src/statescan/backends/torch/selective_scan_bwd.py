# SPDX-License-Identifier: Apache-2.0
"""Gradients of the selective scan in torch, written out: no graph, no tensor of all states.

The forward is in ``selective_scan.py``; what both share is in the ``_selective_scan_*`` modules.

With h the states, a = exp(dt A) and v = dt x, for one sequence (conjugates for complex A left out):

    g[t]   = C[t] dy[t] + a[t+1] g[t+1]         gradient of h[t]
    p[t]   = g[t] a[t] h[t-1]                   gradient of dt[t] A
    dC[t]  = sum over dim of h[t] dy[t]         dB[t] = sum over dim of g[t] v[t]
    dx[t]  = dt[t] sum_n B[t] g[t] + D dy[t]    ddt[t] = x[t] sum_n B[t] g[t] + sum_n A p[t]
    dA     = sum over tokens of dt[t] p[t]

The chunks of time are visited from the last to the first. The states of a chunk are computed again
from the state before it; where saved states are further apart than chunks, one more walk from a
saved state finds those. The output before the gate is computed again too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from statescan.backends.outputs import compute_dtype, empty_gradients
from statescan.backends.torch._selective_scan_blocks import (
    fold,
    load_states,
    pieces,
    time_first,
    time_last,
)
from statescan.backends.torch._selective_scan_inputs import Memory, Scan, Tile, prepare
from statescan.backends.torch._selective_scan_steps import (
    Ends,
    accumulate,
    cross_back,
    fill_decay,
    walk,
    walk_back,
)
from statescan.backends.torch._selective_scan_weights import LoadedWeights
from statescan.backends.torch.sequences import Boundary


def selective_scan_bwd(
    dout: Tensor,
    dfinal_states: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_states: Tensor,
    dt_softplus: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states of ``statescan.selective_scan``."""
    compute = compute_dtype(x, dt, A, B, C, D, z, dt_bias, initial_states)
    gradients = empty_gradients(x, dt, A, B, C, D, z, dt_bias, initial_states)
    scan = prepare(x, dt, A, B, C, D, dt_bias, seq_idx, cu_seqlens, dt_softplus, reverse, compute)
    initial = None if initial_states is None else initial_states.transpose(1, 2)
    dinitial = None if initial_states is None else gradients[8].transpose(1, 2)
    backward = _Backward(
        scan=scan,
        dout=dout,
        x=x,
        z=z,
        dx=gradients[0],
        ddt=gradients[1],
        dB=gradients[3],
        dC=gradients[4],
        dz=gradients[6],
        entry=Ends(initial, None),
        exit=Ends(None if dfinal_states is None else dfinal_states.transpose(1, 2), dinitial),
        memory=Memory(scan, 3),
        sums=_Sums(scan),
    )
    for rows in scan.blocks.rows:
        backward.run(rows, chunk_states[rows])
    for states in scan.plan.untouched:
        backward.exit.pass_through(states)
    backward.sums.store(gradients)
    return gradients


class _Sums:
    """Gradients that are sums over all tokens, laid out as in blocks."""

    def __init__(self, scan: Scan) -> None:
        self.dA = torch.zeros_like(scan.A)
        self.dB = torch.zeros_like(scan.A)
        self.dC = torch.zeros_like(scan.A)
        self.dD = scan.A.new_zeros(scan.A.shape[1], dtype=scan.compute)
        self.ddt_bias = torch.zeros_like(self.dD)

    def store(self, gradients: tuple[Tensor, ...]) -> None:
        """Write them to the op's results, where those are wanted and are sums."""
        per_state = ((2, self.dA), (3, self.dB), (4, self.dC))
        for index, total in per_state:
            if gradients[index].dim() == 2:
                gradients[index].copy_(total.t())
        for index, total in ((5, self.dD), (7, self.ddt_bias)):
            if gradients[index].shape == total.shape:
                gradients[index].copy_(total)


@dataclass(frozen=True)
class _Backward:
    """A backward scan: its inputs, and where its results go.

    ``entry`` holds initial states, ``exit`` the gradients of final and of initial states.
    """

    scan: Scan
    dout: Tensor
    x: Tensor
    z: Tensor | None
    dx: Tensor
    ddt: Tensor
    dB: Tensor
    dC: Tensor
    dz: Tensor
    entry: Ends
    exit: Ends
    memory: Memory
    sums: _Sums

    def run(self, rows: slice, chunk_states: Tensor) -> None:
        """All gradients of some rows, from their last step to their first."""
        scan, seqlen = self.scan, self.scan.blocks.seqlen
        boundaries = scan.plan.boundaries(rows)
        carry = scan.A.new_zeros((rows.stop - rows.start, *scan.A.shape))
        last = boundaries.get(seqlen)
        if last is not None:
            carry = cross_back(last, carry, self.exit)
        for number in reversed(range(chunk_states.shape[1])):
            first = number * scan.chunk_size
            chunks = list(scan.blocks.chunks(first, min(first + scan.chunk_size, seqlen)))
            state = load_states(chunk_states[:, number])
            starts = self._walk_through(rows, chunks[:-1], state, boundaries)
            for (start, stop), state in zip(reversed(chunks), reversed(starts), strict=True):
                self._run_chunk(rows, start, stop, state, carry, boundaries)

    def _walk_through(
        self,
        rows: slice,
        chunks: list[tuple[int, int]],
        state: Tensor,
        boundaries: dict[int, Boundary],
    ) -> list[Tensor]:
        """The states before each of some chunks and after the last of them."""
        scan, found = self.scan, [state]
        for start, stop in chunks:
            B = scan.B.load(scan.plan, rows, start, stop)
            after = torch.empty_like(state)
            for channels in scan.blocks.channels:
                tile = Tile(rows, channels, start, stop)
                block = self._recompute(tile, B, found[-1], boundaries)
                after[..., channels] = block.states[-1]
            found.append(after)
        return found

    def _recompute(
        self, tile: Tile, B: LoadedWeights, state: Tensor, boundaries: dict[int, Boundary]
    ) -> _Block:
        """Step sizes, decay and states of a tile, from the state before it."""
        scan, channels = self.scan, tile.channels
        x = scan.load(self.x, tile)
        raw, dt = scan.load_step_size(tile)
        block = _Block(
            x=x,
            raw=raw,
            dt=dt,
            steps=time_first(dt, scan.compute),
            inputs=time_first(dt * x, scan.compute),
            decay=self.memory.view(0, tile),
            states=self.memory.view(1, tile, extra=1),
        )
        piece = self.memory.piece(tile)
        fill_decay(block.steps, scan.rate[:, channels], block.decay, piece)
        block.states[0] = state[..., channels]
        B.spread(block.inputs, channels, block.states[1:], piece)
        entered = walk(block.decay, block.states, boundaries, tile.start, self.entry.of(channels))
        block.entered.update(entered)
        return block

    def _run_chunk(
        self,
        rows: slice,
        start: int,
        stop: int,
        state: Tensor,
        carry: Tensor,
        boundaries: dict[int, Boundary],
    ) -> None:
        """Gradients of one chunk; ``carry`` goes from what it receives to what it hands on."""
        self.memory.next_chunk()
        scan, shape = self.scan, (rows.stop - rows.start, stop - start)
        B, C = (weights.load(scan.plan, rows, start, stop) for weights in (scan.B, scan.C))
        dB = self.sums.dB if scan.B.constant is not None else scan.B.new_gradient(*shape)
        dC = self.sums.dC if scan.C.constant is not None else scan.C.new_gradient(*shape)
        for channels in scan.blocks.channels:
            tile = Tile(rows, channels, start, stop)
            block = self._recompute(tile, B, state, boundaries)
            dy = self._through_gate(tile, C, block)
            self._through_states(tile, (B, C), (dB, dC), block, dy, carry, boundaries)
        if scan.B.constant is None:
            scan.B.store_gradient(self.dB, dB, scan.plan, rows, start, stop)
        if scan.C.constant is None:
            scan.C.store_gradient(self.dC, dC, scan.plan, rows, start, stop)

    def _through_gate(self, tile: Tile, C: LoadedWeights, block: _Block) -> Tensor:
        """Stores dz and returns the gradient of the output before the gate."""
        dout = self.scan.load(self.dout, tile)
        if self.z is None:
            return dout
        z = self.scan.load(self.z, tile)
        y = time_last(C.output(block.states[1:], tile.channels), self.dz)
        if self.scan.D is not None:
            y = y + self.scan.D[tile.channels] * block.x
        self.scan.store(self.dz, tile, torch.ops.aten.silu_backward(dout * y, z))
        return dout * F.silu(z)

    def _through_states(
        self,
        tile: Tile,
        weights: tuple[LoadedWeights, LoadedWeights],
        dweights: tuple[Tensor, Tensor],
        block: _Block,
        dy: Tensor,
        carry: Tensor,
        boundaries: dict[int, Boundary],
    ) -> None:
        """Everything else that a tile contributes, given the gradient of its y."""
        scan, channels = self.scan, tile.channels
        B, C = weights
        decay, states, g = block.decay, block.states, self.memory.view(2, tile)
        dy_first = time_first(dy, scan.compute)
        if g.is_complex():
            # y is twice a real part; gradients travel back along conjugates.
            dy_first.mul_(2)
            decay.conj_physical_()
            states.conj_physical_()
        piece = self.memory.piece(tile)
        scan.C.add_gradient(dweights[1], states[1:], dy_first, channels, g, piece)
        C.adjoint().spread(dy_first, channels, g, piece)
        carry[..., channels] = walk_back(
            decay, g, carry[..., channels], boundaries, tile.start, self.exit.of(channels)
        )
        for step, state in block.entered.items():
            states[step] = state.conj()
        for decay_piece, before, gradient in pieces(piece, decay, states[:-1], g):
            decay_piece.mul_(before).mul_(gradient)
        p, scratch = decay, states[1:]
        scan.B.add_gradient(dweights[0], g, block.inputs, channels, scratch, piece)
        dinput = B.adjoint().read(g, channels)
        accumulate(self.sums.dA[:, channels], p, block.steps)
        A = LoadedWeights(scan.A[None, None], None).adjoint()
        self._store(tile, block, dy, dinput, A.read(p, channels))

    def _store(self, tile: Tile, block: _Block, dy: Tensor, dinput: Tensor, dstep: Tensor) -> None:
        """dx and ddt of a tile, and its part of dD and ddt_bias.

        Args:
            tile: The tile.
            block: Its recomputed values.
            dy: Gradient of y, (rows, channels, steps).
            dinput: Gradient of dt x, (steps, rows, channels).
            dstep: Gradient of dt by way of the decay, likewise.
        """
        scan, channels = self.scan, tile.channels
        dinput, dstep = time_last(dinput, self.dx), time_last(dstep, self.dx)
        dx = block.dt * dinput
        if scan.D is not None:
            dx += scan.D[channels] * dy
            self.sums.dD[channels] += fold(fold(dy * block.x, 2), 0)
        scan.store(self.dx, tile, dx)
        ddt = block.x * dinput + dstep
        if scan.dt_softplus:
            ddt = torch.ops.aten.softplus_backward(ddt, block.raw, 1, 20)
        scan.store(self.ddt, tile, ddt)
        if scan.dt_bias is not None:
            self.sums.ddt_bias[channels] += fold(fold(ddt, 2), 0)


@dataclass(frozen=True)
class _Block:
    """What a tile's forward pass left: tokens as (rows, channels, steps), the rest time-first."""

    x: Tensor
    raw: Tensor
    dt: Tensor
    steps: Tensor
    inputs: Tensor
    decay: Tensor
    states: Tensor
    entered: dict[int, Tensor] = field(default_factory=dict)
