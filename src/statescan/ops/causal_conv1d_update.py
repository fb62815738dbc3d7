# SPDX-License-Identifier: Apache-2.0
"""One decode step of the causal convolution: public function, checks and registration.

Arithmetic belongs in ``backends/<name>/causal_conv1d_update.py``.
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
from statescan.ops._values import check_accepted, check_seen, check_slots

_NAME = "causal_conv1d_update"
_SCHEMA = (
    f"{_NAME}(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, "
    "Tensor? cache_seqlens, Tensor? conv_state_indices, Tensor? dst_conv_state_indices, "
    "Tensor(b!)? intermediate_states, Tensor? num_accepted_tokens, Tensor(c!) out, "
    "bool silu, int pad_slot_id, str backend) -> ()"
)
_ROWS = pattern("batch")
_INDEX_NAMES = (
    *("cache_seqlens", "conv_state_indices"),
    *("dst_conv_state_indices", "num_accepted_tokens"),
)


def _patterns(with_tokens: bool) -> dict[str, tuple[str, ...]]:
    x = pattern("batch dim ntokens" if with_tokens else "batch dim")
    return {
        "x": x,
        "conv_state": pattern("slots dim state_len"),
        "weight": pattern("dim width"),
        "bias": pattern("dim"),
        "out": x,
        "intermediate_states": pattern("batch kept_tokens dim state_len"),
        **dict.fromkeys(_INDEX_NAMES, _ROWS),
    }


_PATTERNS = {False: _patterns(False), True: _patterns(True)}


def request(args: Sequence[Any]) -> OpRequest:
    """The call without its tensors; ``args`` in the order of the schema."""
    x, conv_state, weight = args[:3]
    names = ("bias", "cache_seqlens", "conv_state_indices", "dst_conv_state_indices")
    optional = dict(zip((*names, "intermediate_states", "num_accepted_tokens"), args[3:9]))
    dims = {"batch": x.shape[0], "dim": x.shape[1], "width": weight.shape[1]}
    dims["state_len"] = conv_state.shape[2]
    dims["ntokens"] = x.shape[2] if x.dim() == 3 else 1
    named = dict(x=x, conv_state=conv_state, weight=weight, **optional)
    return update_request(_NAME, named, dims, {"silu": args[10]})


def _check_values(args: Sequence[Any]) -> None:
    conv_state, seen, indices, destinations, kept, accepted = (*args[1:2], *args[4:9])
    pad_slot_id, slots = args[11], conv_state.shape[0]
    check_slots(_NAME, "conv_state_indices", indices, destinations, slots, pad_slot_id)
    kept_tokens = 0 if kept is None else kept.shape[1]
    check_accepted(_NAME, accepted, kept_tokens, (indices, destinations), pad_slot_id)
    check_seen(_NAME, seen, (indices, destinations), pad_slot_id)
    written = {"conv_state": conv_state, "intermediate_states": kept, "out": args[9]}
    check_writable(_NAME, written)


op, _make_plan = register_update(_NAME, _SCHEMA, request, _check_values)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    dst_conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    intermediate_states: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve a few new tokens; writes ``conv_state``, ``intermediate_states``, ``out`` in place.

    For every channel, over the tokens kept in its row of ``conv_state`` and the new ones::

        pre[t] = bias + sum over k < width of weight[k] * token[t - (width - 1) + k]
        out[t] = silu(pre[t]) with activation, else pre[t]

    Args:
        x: (batch, dim), or (batch, dim, ntokens) for several tokens.
        conv_state: (slots, dim, state_len), state_len >= width - 1, updated in place. Newest
            token in the last column; with ``cache_seqlens`` a ring.
        weight: (dim, width), any width from 1.
        bias: (dim,).
        activation: None, "silu" or "swish" (the same function).
        cache_seqlens: (batch,) tokens seen before this call. Token t of the call is written to
            column ``(cache_seqlens + t) % state_len``; the taps read the width - 1 before it.
        conv_state_indices: (batch,) the slot of each row; without it row b uses slot b. A
            negative one, or ``pad_slot_id``, marks a padding row: output 0, no state touched.
        dst_conv_state_indices: (batch,) the slot that receives the new state, when another.
        pad_slot_id: A further value that marks padding rows.
        intermediate_states: (batch, kept_tokens, dim, state_len), kept_tokens >= ntokens; its
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
        float32 inside, float64 if any input is; states keep their dtype, any mix is taken.

    References:
        ``causal_conv1d_update`` of causal-conv1d.
    """
    silu = _shapes.check_activation(_NAME, activation)
    options = (silu, pad_slot_id, backend)
    key = plan = None
    # The tensors whose values decide what a call does are not for a plan.
    if (
        cache_seqlens is conv_state_indices is dst_conv_state_indices is None
        and intermediate_states is num_accepted_tokens is None
    ):
        listed = (x, conv_state, weight, bias, out)
        given = [tensor for tensor in listed if tensor is not None]
        key, plan = find_plan(_NAME, given, (*options, bias is None, out is None))
        # An output over an input is for the long road, which looks at how they overlap.
        if plan is not None and (out is None or not overlaps(out, *listed[:4])):
            result, written = out, [conv_state]
            if result is None:
                result = torch.empty_like(x)
                given.append(result)
            else:
                written.append(result)
            if run_plan(plan, given, written):
                return result
    tensors = dict(
        x=x,
        conv_state=conv_state,
        weight=weight,
        bias=bias,
        out=out,
        cache_seqlens=cache_seqlens,
        conv_state_indices=conv_state_indices,
        dst_conv_state_indices=dst_conv_state_indices,
        intermediate_states=intermediate_states,
        num_accepted_tokens=num_accepted_tokens,
    )
    _check(tensors)
    _shapes.check_integer(_NAME, "pad_slot_id", pad_slot_id)
    _shapes.check_backend(_NAME, backend)
    refuse_gradients(_NAME, (x, conv_state, weight, bias, intermediate_states, out))
    if out is None:
        out = torch.empty_like(x)
    arguments = (
        *(x, conv_state, weight, bias, cache_seqlens, conv_state_indices),
        *(dst_conv_state_indices, intermediate_states, num_accepted_tokens, out, *options),
    )
    op(*arguments)
    if key is not None:
        keep_plan(key, partial(_make_plan, arguments))
    return out


def _check(tensors: dict[str, Tensor | None]) -> None:
    """Shapes, dtypes and devices of one call."""
    x = tensors["x"]
    with_tokens = isinstance(x, Tensor) and x.dim() == 3
    sizes = _shapes.bind(_NAME, _PATTERNS[with_tokens], tensors)
    width, state_len = sizes["width"], sizes["state_len"]
    _shapes.check_positive(_NAME, "weight", "width", width)
    if state_len < width - 1:
        raise ShapeError(
            f"{_NAME}: argument 'conv_state' has state_len {state_len} for width {width}.\n"
            f"It must keep at least width - 1 = {width - 1} tokens.\n"
            f"Allocate it as (slots, dim, {width - 1}) or longer."
        )
    if tensors["cache_seqlens"] is not None:
        _shapes.check_positive(_NAME, "conv_state", "state_len", state_len)
    ntokens = sizes.get("ntokens", 1)
    if sizes.get("kept_tokens", ntokens) < ntokens:
        raise ShapeError(
            f"{_NAME}: argument 'intermediate_states' keeps {sizes['kept_tokens']} tokens "
            f"and x carries {ntokens}.\nIt must keep at least as many.\n"
            f"Allocate it as (batch, {ntokens}, dim, state_len)."
        )
    indices = tensors["conv_state_indices"]
    check_rows(
        *(_NAME, "conv_state", "conv_state_indices"),
        *(sizes["batch"], sizes["slots"], indices is not None),
    )
    check_rollback(_NAME, tensors["num_accepted_tokens"], tensors["intermediate_states"])
    names = ("x", "conv_state", "weight", "bias", "intermediate_states", "out")
    _shapes.check_real(_NAME, tensors, names)
    _shapes.check_index(_NAME, tensors, _INDEX_NAMES)
