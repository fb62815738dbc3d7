# SPDX-License-Identifier: Apache-2.0
"""One or a few steps of the SSM state in torch, in place.

Slots, padding rows and rollback belong in ``backends/_decode.py``, the two forms of the arguments
in ``_state_forms.py``.

What a row needs is read before anything of it is written, and rows are taken one block after the
other only where nothing that is written is read by another row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.backends._decode import Slots, find_slots
from statescan.backends.outputs import compute_dtype
from statescan.backends.torch._pointwise import multiply, silu_
from statescan.backends.torch._state_forms import Step, common_form
from statescan.backends.torch._step_size import softplus

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
    """``statescan.selective_state_update``; writes ``ssm_state``, ``intermediate_states``, ``out``."""
    batch = x.shape[0]
    slots = find_slots(
        batch, ssm_state.shape[0], state_batch_indices, dst_state_batch_indices, pad_slot_id
    )
    if slots is None:
        out.zero_()
        return
    step = common_form(ssm_state, x, dt, A, B, C, D, z, dt_bias, intermediate_states, out)
    dtype = compute_dtype(*step[:-1])
    rows = batch
    if batch * step.state[0].numel() > _CPU_BLOCK and _rows_are_apart(step, slots):
        rows = max(_CPU_BLOCK // step.state[0].numel(), 1)
    if rows == batch:
        _run(step, slots, num_accepted_tokens, dt_softplus, dtype)
        return
    for start in range(0, batch, rows):
        block = slice(start, start + rows)
        accepted = None if num_accepted_tokens is None else num_accepted_tokens[block]
        _run(*_take_rows(step, slots, block), accepted, dt_softplus, dtype)


def _rows_are_apart(step: Step, slots: Slots) -> bool:
    """Whether no row reads what another one writes, for certain."""
    if slots.rows is not None or slots.read is not slots.write or step.x.device.type != "cpu":
        return False
    written = [step.state, step.out]
    read = [step.x, step.dt, step.A, step.B, step.C, step.D, step.z, step.dt_bias]
    if step.intermediate_states is not None:
        written.append(step.intermediate_states)
    storages = [{t.untyped_storage().data_ptr() for t in ts if t is not None} for ts in (written, read)]
    return len(storages[0]) == len(written) and storages[0].isdisjoint(storages[1])


def _take_rows(step: Step, slots: Slots, rows: slice) -> tuple[Step, Slots]:
    """A call on some of the rows."""

    def take(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    some = step._replace(
        **{name: take(getattr(step, name)) for name in ("x", "dt", "B", "C", "z", "out")},
        intermediate_states=take(step.intermediate_states),
    )
    if slots.read is None:
        return some._replace(state=step.state[rows]), slots
    return some, slots._replace(read=slots.read[rows], write=slots.read[rows])


def _run(
    step: Step, slots: Slots, accepted: Tensor | None, dt_softplus: bool, dtype: torch.dtype
) -> None:
    """One call, or a block of its rows."""
    start = slots.start(step.state, step.intermediate_states, accepted)
    state = _upcast(start, dtype)
    A = _upcast(step.A, dtype)
    x, dt, B, C = (_upcast(slots.take(t), dtype) for t in (step.x, step.dt, step.B, step.C))
    z = None if step.z is None else _upcast(slots.take(step.z), dtype)
    D = None if step.D is None else step.D.to(dtype)
    if step.dt_bias is not None:
        dt = dt + step.dt_bias.to(dtype)
    if dt_softplus:
        dt = softplus(dt)
    results = []
    for token in range(x.shape[1]):
        x_now = x[:, token]
        state, result = _advance(state, x_now, dt[:, token], A, B[:, token], C[:, token])
        if D is not None:
            result.addcmul_(D, x_now)
        if z is not None:
            result.mul_(silu_(z[:, token].clone()))
        results.append(result)
        if step.intermediate_states is not None:
            history = state.unsqueeze(1)
            slots.record(step.intermediate_states, slice(token, token + 1), history)
    slots.store(step.state, state if accepted is None else start)
    if results:
        slots.finish(step.out, torch.stack(results, 1))


def _upcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the arithmetic, complex staying complex."""
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def _advance(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor]:
    """The next state, in new memory, and the sum of C state over dstate."""
    decay = (dt.unsqueeze(-1) * A).exp_()
    fed = (dt * x).unsqueeze(-1)
    if state.is_complex():
        state = multiply(decay, state) + fed * B
        return state, multiply(state, C).real.sum(-1).mul_(2.0)
    state = torch.mul(decay, state).addcmul_(fed, B)
    return state, (state * C).sum(-1)
