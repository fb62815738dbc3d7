# SPDX-License-Identifier: Apache-2.0
"""One decode step of the SSM state, Mamba-1 and headed form: public function and registration.

Arithmetic belongs in ``backends/<name>/selective_state_update.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from statescan.backends.base import OpRequest
from statescan.backends.outputs import overlaps
from statescan.errors import ShapeError
from statescan.ops import _shapes
from statescan.ops._plans import find_plan, keep_plan, run_plan
from statescan.ops._shapes import pattern
from statescan.ops._update import (
    check_rollback,
    check_rows,
    check_writable,
    refuse_gradients,
    register_update,
    update_request,
)
from statescan.ops._values import check_accepted, check_slots

_NAME = "selective_state_update"
_SCHEMA = (
    f"{_NAME}(Tensor(a!) ssm_state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
    "Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? state_batch_indices, "
    "Tensor? dst_state_batch_indices, Tensor(b!)? intermediate_states, "
    "Tensor? num_accepted_tokens, Tensor(c!) out, bool dt_softplus, int pad_slot_id, "
    "str backend) -> ()"
)
_ARGUMENTS = (
    *("ssm_state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_batch_indices"),
    *("dst_state_batch_indices", "intermediate_states", "num_accepted_tokens"),
)
_ROWS = pattern("batch")
_INDEX_NAMES = ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens")


def _patterns(headed: bool, with_tokens: bool, grouped: dict[str, bool]) -> dict[str, Any]:
    """Shapes of one form; B and C may leave out the axis of groups."""
    tokens = " ntokens" * with_tokens
    channels = "nheads headdim" if headed else "dim"
    x = pattern(f"batch{tokens} {channels}" if headed else f"batch {channels}{tokens}")
    found = {"ssm_state": pattern(f"slots {channels} dstate"), "x": x, "dt": x}
    found["A"] = pattern(f"{channels} dstate")
    for name, has_groups in grouped.items():
        group = f" ngroups_of_{name}" * has_groups
        found[name] = pattern(
            f"batch{tokens}{group} dstate" if headed else f"batch{group} dstate{tokens}"
        )
    found |= {"D": pattern(channels), "z": x, "dt_bias": pattern(channels), "out": x}
    found["intermediate_states"] = pattern(f"batch kept_tokens {channels} dstate")
    return found | dict.fromkeys(_INDEX_NAMES, _ROWS)


_PATTERNS = {
    (headed, with_tokens, b, c): _patterns(headed, with_tokens, {"B": b, "C": c})
    for headed in (False, True)
    for with_tokens in (False, True)
    for b in (False, True)
    for c in (False, True)
}


def request(args: Sequence[Any]) -> OpRequest:
    """The call without its tensors; ``args`` in the order of the schema."""
    named = dict(zip(_ARGUMENTS, args))
    state, x = named["ssm_state"], named["x"]
    dims = {"batch": x.shape[0], "dstate": state.shape[-1]}
    if state.dim() == 4:
        dims |= {"nheads": state.shape[1], "headdim": state.shape[2]}
        dims["ntokens"] = x.shape[1] if x.dim() == 4 else 1
    else:
        dims |= {"dim": state.shape[1], "ntokens": x.shape[2] if x.dim() == 3 else 1}
    return update_request(_NAME, named, dims, {"dt_softplus": args[14]})


def _check_values(args: Sequence[Any]) -> None:
    state, indices, destinations, kept, accepted = (*args[:1], *args[9:13])
    pad_slot_id, slots = args[15], state.shape[0]
    check_slots(_NAME, "state_batch_indices", indices, destinations, slots, pad_slot_id)
    kept_tokens = 0 if kept is None else kept.shape[1]
    check_accepted(_NAME, accepted, kept_tokens, (indices, destinations), pad_slot_id)
    written = {"ssm_state": state, "intermediate_states": kept, "out": args[13]}
    check_writable(_NAME, written)


op, _make_plan = register_update(_NAME, _SCHEMA, request, _check_values)


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    intermediate_states: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Advance SSM states by a few tokens; writes ``ssm_state``, ``intermediate_states``, ``out``.

    For every channel, with ``step = dt + dt_bias`` (through softplus when ``dt_softplus``)::

        state = exp(step * A) * state + step * B * x
        out   = (sum over dstate of C * state  +  D * x) * silu(z)       no gate without z

    The rank of ``ssm_state`` chooses the form: Mamba-1 (slots, dim, dstate), or headed
    (slots, nheads, headdim, dstate). Any tensor may be an expanded view with strides of 0.

    Args:
        ssm_state: The pool of states, updated in place in its own dtype.
        x: (batch, dim) or (batch, dim, ntokens); headed (batch, nheads, headdim) or
            (batch, ntokens, nheads, headdim).
        dt: Like x.
        A: (dim, dstate); headed (nheads, headdim, dstate). Complex A needs complex B, C and
            ssm_state, and takes twice the real part of the sum.
        B: (batch, dstate[, ntokens]) or (batch, ngroups, dstate[, ntokens]); headed
            (batch[, ntokens], dstate) or (batch[, ntokens], ngroups, dstate). Constant B is
            ngroups = dim.
        C: Each of B's shapes, chosen independently.
        D: (dim,); headed (nheads, headdim).
        z: Like x, the gate.
        dt_bias: Like D.
        dt_softplus: Pass dt + dt_bias through softplus.
        state_batch_indices: (batch,) the slot of each row; without it row b uses slot b. A
            negative one, or ``pad_slot_id``, marks a padding row: output 0, no state touched.
        dst_state_batch_indices: (batch,) the slot that receives the new state, when another.
        pad_slot_id: A further value that marks padding rows.
        intermediate_states: (batch, kept_tokens, *state of a slot), kept_tokens >= ntokens; its
            first ntokens entries receive the state after each token.
        num_accepted_tokens: (batch,) how many tokens of the previous speculative call stand:
            a row starts from ``intermediate_states[b, n - 1]`` for n >= 1, from its slot for 0. In
            this mode the destination slot receives that starting state, so the next call can still
            accept any number of this call's tokens; ntokens 0 only commits.
        out: Like x; receives the result.
        backend: Name of a backend, or "auto".

    Returns:
        ``out`` if given, else a new tensor like x.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument does not fit the others.
        SlotIndexError: a slot outside the pool, or two rows writing one slot (checked for CPU
            tensors; on an accelerator the caller answers for it).
        GradientError: an input requires grad while grad mode is on, or torch.func is active.

    Numerics:
        float32 inside, float64 if any input is; softplus exact in both tails, as in
        ``selective_scan``, so that a step equals a token of the scan.

    References:
        ``selective_state_update`` of mamba-ssm.
    """
    options = (dt_softplus, pad_slot_id, backend)
    key = plan = None
    # The tensors whose values decide what a call does are not for a plan.
    if (
        state_batch_indices is dst_state_batch_indices is None
        and intermediate_states is num_accepted_tokens is None
    ):
        listed = (ssm_state, x, dt, A, B, C, D, z, dt_bias, out)
        given = [tensor for tensor in listed if tensor is not None]
        absent = (D is None, z is None, dt_bias is None, out is None)
        key, plan = find_plan(_NAME, given, options + absent)
        # An output over an input is for the long road, which looks at how they overlap.
        if plan is not None and (out is None or not overlaps(out, *listed[:9])):
            result, written = out, [ssm_state]
            if result is None:
                result = torch.empty_like(x)
                given.append(result)
            else:
                written.append(result)
            if run_plan(plan, given, written):
                return result
    tensors = dict(
        ssm_state=ssm_state,
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        out=out,
        state_batch_indices=state_batch_indices,
        dst_state_batch_indices=dst_state_batch_indices,
        intermediate_states=intermediate_states,
        num_accepted_tokens=num_accepted_tokens,
    )
    _check(tensors)
    _shapes.check_flag(_NAME, "dt_softplus", dt_softplus)
    _shapes.check_integer(_NAME, "pad_slot_id", pad_slot_id)
    _shapes.check_backend(_NAME, backend)
    refuse_gradients(_NAME, tuple(tensors.values()))
    if out is None:
        out = torch.empty_like(x)
    states = (intermediate_states, num_accepted_tokens)
    arguments = (
        *(ssm_state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices),
        *(dst_state_batch_indices, *states, out, *options),
    )
    op(*arguments)
    if key is not None:
        keep_plan(key, partial(_make_plan, arguments))
    return out


def _form(tensors: dict[str, Tensor | None]) -> tuple[bool, bool, bool, bool]:
    """(headed, with tokens, B has groups, C has groups), read off the ranks."""
    ranks = {n: t.dim() if isinstance(t, Tensor) else 0 for n, t in tensors.items()}
    headed = ranks["ssm_state"] == 4
    with_tokens = ranks["x"] == (4 if headed else 3)
    plain = 3 if with_tokens else 2
    return headed, with_tokens, ranks["B"] > plain, ranks["C"] > plain


def _check(tensors: dict[str, Tensor | None]) -> None:
    """Shapes, dtypes and devices of one call."""
    sizes = _shapes.bind(_NAME, _PATTERNS[_form(tensors)], tensors)
    axis = "nheads" if "nheads" in sizes else "dim"
    for name in ("B", "C"):
        groups = sizes.get(f"ngroups_of_{name}", 1)
        if groups == 0 or sizes[axis] % groups:
            raise ShapeError(
                f"{_NAME}: argument '{name}' has {groups} groups for {axis} {sizes[axis]}.\n"
                f"ngroups must divide {axis}.\nGive '{name}' with such a number of groups."
            )
    ntokens = sizes.get("ntokens", 1)
    if sizes.get("kept_tokens", ntokens) < ntokens:
        raise ShapeError(
            f"{_NAME}: argument 'intermediate_states' keeps {sizes['kept_tokens']} tokens "
            f"and x carries {ntokens}.\nIt must keep at least as many.\n"
            f"Allocate it as (batch, {ntokens}, *one slot's state)."
        )
    check_rows(
        *(_NAME, "ssm_state", "state_batch_indices", sizes["batch"], sizes["slots"]),
        tensors["state_batch_indices"] is not None,
    )
    check_rollback(_NAME, tensors["num_accepted_tokens"], tensors["intermediate_states"])
    _shapes.check_real(_NAME, tensors, ("x", "dt", "D", "z", "dt_bias", "out"))
    _shapes.check_index(_NAME, tensors, _INDEX_NAMES)
    names = ("A", "B", "C", "ssm_state", "intermediate_states")
    _shapes.check_one_kind(_NAME, tensors, names)
