# SPDX-License-Identifier: Apache-2.0
"""One or a few steps of the SSM state in torch, in place.

Slots, padding rows and rollback belong in ``backends/_decode.py``, the two forms of the arguments
in ``_state_forms.py``.

What a row needs is read before anything of it is written, and rows are taken one block after the
other only where nothing that is written is read by another row.

One token is 18 calls of torch. Microseconds a call on a Xeon server with torch 2.11, batch 1,
dstate 16, all options, float32: 50 for 64 channels (70 with indices), 91 for 1536, 212 for 5120.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.backends._decode import Slots, find_slots
from statescan.backends.outputs import compute_dtype
from statescan.backends.torch._pointwise import multiply, silu, softplus, upcast
from statescan.backends.torch._state_forms import Step, Token, common_form

# State elements worked on at once, so that temporaries stay in a core's cache.
_CPU_BLOCK = 1 << 17


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_batch_indices: Tensor | None,
    dst_state_batch_indices: Tensor | None,
    intermediate_states: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    dt_softplus: bool,
    pad_slot_id: int,
) -> None:
    """``statescan.selective_state_update``; states and ``out`` are written in place."""
    batch = x.shape[0]
    slots = find_slots(
        batch, ssm_state.shape[0], state_batch_indices, dst_state_batch_indices, pad_slot_id
    )
    if slots is None:
        out.zero_()
        return
    tensors = (x, dt, A, B, C, D, z, dt_bias, intermediate_states)
    dtype = compute_dtype(ssm_state, *tensors)
    step = common_form(ssm_state, *tensors, out)
    rows, size = batch, ssm_state.numel() // max(ssm_state.shape[0], 1)
    if batch * size > _CPU_BLOCK and _rows_are_apart(slots, ssm_state, out, tensors):
        rows = max(_CPU_BLOCK // size, 1)
    if rows >= batch:
        _run(step, slots, num_accepted_tokens, dt_softplus, dtype)
        return
    for start in range(0, batch, rows):
        block = slice(start, start + rows)
        accepted = None if num_accepted_tokens is None else num_accepted_tokens[block]
        _run(*_take_rows(step, slots, block), accepted, dt_softplus, dtype)


def _rows_are_apart(
    slots: Slots, ssm_state: Tensor, out: Tensor, inputs: tuple[Tensor | None, ...]
) -> bool:
    """Whether it is certain that no row reads what another one writes."""
    if slots.rows is not None or slots.read is not slots.write or out.device.type != "cpu":
        return False
    *read, intermediate_states = (None if t is None else _storage(t) for t in inputs)
    written = [_storage(ssm_state), _storage(out)]
    if intermediate_states is not None:
        written.append(intermediate_states)
    return len(set(written)) == len(written) and not set(written) & set(read)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _take_rows(step: Step, slots: Slots, rows: slice) -> tuple[Step, Slots]:
    """A call on some of the rows."""
    tokens = [
        Token(
            *(t.x[rows], t.dt[rows], t.B[rows], t.C[rows]),
            *(None if t.z is None else t.z[rows], t.out[rows]),
        )
        for t in step.tokens
    ]
    kept = None if step.intermediate_states is None else step.intermediate_states[rows]
    step = step._replace(tokens=tokens, intermediate_states=kept)
    if slots.read is None:
        return step._replace(state=step.state[rows]), slots
    read = slots.read[rows]
    return step, slots._replace(read=read, write=read)


def _run(
    step: Step, slots: Slots, accepted: Tensor | None, dt_softplus: bool, dtype: torch.dtype
) -> None:
    """One call, or a block of its rows."""
    start = slots.start(step.state, step.intermediate_states, accepted)
    state, A = start, upcast(step.A, dtype)
    D, dt_bias = (None if t is None else upcast(t, dtype) for t in (step.D, step.dt_bias))
    results = []
    for number, token in enumerate(step.tokens):
        x, dt, B, C = (upcast(slots.take(t), dtype) for t in (token.x, token.dt, token.B, token.C))
        if dt_bias is not None:
            dt = dt + dt_bias
        if dt_softplus:
            dt = softplus(dt)
        state, result = _advance(state, x, dt, A, B, C)
        if D is not None:
            result.addcmul_(D, x)
        if token.z is not None:
            result.mul_(silu(upcast(slots.take(token.z), dtype)))
        results.append(result)
        if step.intermediate_states is not None:
            slots.record(step.intermediate_states, slice(number, number + 1), state.unsqueeze(1))
    slots.store(step.state, state if accepted is None else start)
    for token, result in zip(step.tokens, results):
        slots.finish(token.out, result)


def _advance(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor]:
    """The next state, in new memory, and the sum of C state over dstate."""
    decay = (dt.unsqueeze(-1) * A).exp_()
    fed = (dt * x).unsqueeze(-1)
    if decay.is_complex():
        state = multiply(decay, state) + fed * B
        return state, multiply(state, C).real.sum(-1).mul_(2.0)
    state = torch.mul(decay, state).addcmul_(fed, B)
    return state, (state * C).sum(-1)
