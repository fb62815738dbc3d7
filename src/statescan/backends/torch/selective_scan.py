# SPDX-License-Identifier: Apache-2.0
"""Selective scan in torch: chunks of time that stay in cache, one operation a step.

Only the forward is here; gradients are in ``selective_scan_bwd.py``, and blocks, weights, steps and
sequences, which both share, in modules of their own.

Layout. A block holds some rows, channels and a chunk of time as [steps, rows, dstate, dim]: the
decay exp(dt A) of the chunk is one product and one exponential, its inputs dt B x are one product
more, and the recurrence is one ``addcmul_`` a step on a contiguous slice, in place on the inputs.
What belongs to single tokens (softplus, skip, gate) is done in the layout of x.

Memory. Blocks are at most about 1e6 elements, whatever seqlen is; two live at a time here and three
in the backward, taken once a call. Nothing of size batch x dim x seqlen x dstate exists. Forward
and backward of 1 x 1536 x 8192 x 16 in float32 grow the process by 1.07 times the inputs, outputs
and gradients, saved states included (all states alone would be 2.3 times those).

Threads. What is done to a chunk's tokens, and one step, is too small for torch to share. What is
done to a chunk's states is shared where torch's threads are free (``_sharing.py``), else done in
pieces. Results have equal bits whatever the number of threads: every sum has a fixed order, and
nothing is shared whose value depends on where a thread's part ends.

Sequences. Where one begins, the state is replaced, not multiplied by zero. Padding forms runs of
its own with inputs selected away, so inside it the saved states are zero; nobody reads those.
On an accelerator packing costs one or two synchronisations (``sequences.py``), else there is none.

Measured against the naive algorithm (1 x 1536 x 512 x 16, float32, softplus, D, gate; Zen 3, torch
2.13): forward 80 to 106 ms against 418 to 508 in one core's processor time (5 times); with two
threads on a machine shared with others 2.3 to 5.7 times in eight runs, 3.3 in the median, and
forward + backward 343 ms against 36.8 s (107 times). Tried and dropped:
``bmm`` for the sums (5 % faster, but its bits can depend on threads and its precision on TF32
settings), and several chunks in lockstep to spare calls at dim 256 (everything is walked twice,
which takes what it saves).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from statescan.backends.outputs import compute_dtype, selective_scan_fwd_outputs
from statescan.backends.torch._selective_scan_blocks import save_states, time_first, time_last
from statescan.backends.torch._selective_scan_inputs import Memory, Scan, Tile, prepare
from statescan.backends.torch._selective_scan_steps import Ends, cross, fill_decay, walk
from statescan.backends.torch._selective_scan_weights import LoadedWeights
from statescan.backends.torch.selective_scan_bwd import selective_scan_bwd
from statescan.backends.torch.sequences import Boundary

__all__ = ["selective_scan_bwd", "selective_scan_fwd"]


def selective_scan_fwd(
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
    dt_softplus: bool,
    reverse: bool,
    save_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, final_states and chunk_states of ``statescan.selective_scan``."""
    compute = compute_dtype(x, dt, A, B, C, D, z, dt_bias, initial_states)
    out, final_states, chunk_states = selective_scan_fwd_outputs(
        x, A, cu_seqlens, save_states, compute
    )
    scan = prepare(x, dt, A, B, C, D, dt_bias, seq_idx, cu_seqlens, dt_softplus, reverse, compute)
    ends = Ends(
        None if initial_states is None else initial_states.transpose(1, 2),
        final_states.transpose(1, 2),
    )
    forward = _Forward(scan, x, z, out, ends, Memory(scan, 2))
    for rows in scan.blocks.rows:
        forward.run(rows, chunk_states[rows] if save_states else None)
    for states in scan.plan.untouched:
        ends.pass_through(states)
    return out, final_states, chunk_states


@dataclass(frozen=True)
class _Forward:
    """A forward scan: its inputs, and where its results go."""

    scan: Scan
    x: Tensor
    z: Tensor | None
    out: Tensor
    ends: Ends
    memory: Memory

    def run(self, rows: slice, chunk_states: Tensor | None) -> None:
        """Scan some rows from their first step to their last."""
        scan = self.scan
        boundaries = scan.plan.boundaries(rows)
        state = scan.A.new_zeros((rows.stop - rows.start, *scan.A.shape))
        for start, stop in scan.blocks.chunks():
            if chunk_states is not None and start % scan.chunk_size == 0:
                save_states(chunk_states[:, start // scan.chunk_size], state)
            self.memory.next_chunk()
            weights = tuple(w.load(scan.plan, rows, start, stop) for w in (scan.B, scan.C))
            for channels in scan.blocks.channels:
                tile = Tile(rows, channels, start, stop)
                self._run_tile(tile, weights[0], weights[1], state, boundaries)
        last = boundaries.get(scan.blocks.seqlen)
        if last is not None:
            cross(last, state, self.ends)

    def _run_tile(
        self,
        tile: Tile,
        B: LoadedWeights,
        C: LoadedWeights,
        state: Tensor,
        boundaries: dict[int, Boundary],
    ) -> None:
        """Outputs of one tile; ``state`` (rows, dstate, dim) moves on to its last step."""
        scan, channels = self.scan, tile.channels
        x = scan.load(self.x, tile)
        dt = scan.load_step_size(tile).dt
        decay, states = self.memory.view(0, tile), self.memory.view(1, tile, extra=1)
        piece = self.memory.piece(tile)
        fill_decay(time_first(dt, scan.compute), scan.rate[:, channels], decay, piece)
        states[0] = state[..., channels]
        B.spread(time_first(dt * x, scan.compute), channels, states[1:], piece)
        walk(decay, states, boundaries, tile.start, self.ends.of(channels))
        state[..., channels] = states[-1]
        y = time_last(C.output(states[1:], channels), self.out)
        scan.store(self.out, tile, self._finish(y, x, tile))

    def _finish(self, y: Tensor, x: Tensor, tile: Tile) -> Tensor:
        """The skip and the gate."""
        if self.scan.D is not None:
            y = y + self.scan.D[tile.channels] * x
        if self.z is None:
            return y
        return y * F.silu(self.scan.load(self.z, tile))
