# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution over a sequence: public function, checks and registration.

Arithmetic belongs in ``backends/<name>/causal_conv1d.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from statescan.backends.outputs import causal_conv1d_fwd_outputs
from statescan.ops import _shapes
from statescan.ops._packing import packed_dims
from statescan.ops._register import SequenceOp, register
from statescan.ops._shapes import pattern
from statescan.ops._values import check_cu_seqlens
from statescan.reference.causal_conv1d import causal_conv1d_ref

_NAME = "causal_conv1d"
_INPUTS = ("x", "weight", "bias?", "initial_states?", "seq_idx?", "cu_seqlens?")
_PATTERNS = {
    "x": pattern("batch dim seqlen"),
    "weight": pattern("dim width"),
    "bias": pattern("dim"),
    "seq_idx": pattern("batch seqlen"),
    "cu_seqlens": pattern("num_bounds"),
}
_STATES_PATTERN = {"initial_states": pattern("num_states dim state_len")}


def _allocate(
    inputs: Sequence[Any], options: Sequence[Any], save_states: bool
) -> tuple[Tensor, ...]:
    return causal_conv1d_fwd_outputs(inputs[0], inputs[1], inputs[5])


def _reference(inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, ...]:
    x, weight, bias, initial_states, seq_idx, cu_seqlens = inputs
    silu, reverse = options
    results = causal_conv1d_ref(
        *(x, weight, bias),
        activation="silu" if silu else None,
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        return_final_states=True,
    )
    return tuple(results)


def _dims(inputs: Sequence[Any]) -> dict[str, int]:
    batch, dim, seqlen = inputs[0].shape
    return {"batch": batch, "dim": dim, "seqlen": seqlen, "width": inputs[1].shape[1]}


def _check_values(inputs: Sequence[Any]) -> None:
    check_cu_seqlens(_NAME, inputs[5], inputs[0].shape[2])


OP = SequenceOp(
    name=_NAME,
    inputs=_INPUTS,
    index_inputs=("seq_idx", "cu_seqlens"),
    options=(("silu", bool), ("reverse", bool)),
    num_outputs=2,
    num_saved=0,
    allocate=_allocate,
    reference=_reference,
    dims=_dims,
    check_values=_check_values,
)
_call = register(OP)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    return_final_states: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with its own short filter over the current and earlier tokens.

    For every channel::

        pre[t] = bias + sum over k < width of weight[k] * x[t - (width - 1) + k]
        out[t] = silu(pre[t]) with activation, else pre[t]

    where tokens before the first are the columns of ``initial_states``, or zero.

    Args:
        x: (batch, dim, seqlen), channel-first or channel-last, any strides.
        weight: (dim, width), any width from 1; the last tap meets the current token.
        bias: (dim,).
        activation: None, "silu" or "swish" (the same function).
        initial_states: (batch, dim, width - 1), the tokens before the first, newest last;
            (num_seqs, dim, width - 1) with cu_seqlens. With seq_idx it belongs to the first real
            sequence of each row.
        seq_idx: (batch, seqlen) int32 or int64. A run of equal ids is a sequence of its own and
            no tap reaches across; negative ids are padding: output 0, gradients 0.
        cu_seqlens: (num_seqs + 1,) int32 or int64 with batch 1: bounds of packed sequences.
        reverse: Convolve each sequence from its last token to its first; weights and state
            columns keep their order in that frame.
        return_final_states: Return the last width - 1 tokens of each sequence too.
        backend: Name of a backend, or "auto" (``statescan.explain`` tells which).

    Returns:
        out, (batch, dim, seqlen) in x's dtype and layout; with ``return_final_states`` also
        final_states, (batch or num_seqs, dim, width - 1) in x's dtype, filled from the left
        with ``initial_states`` or zeros when a sequence is shorter. Both carry gradients.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument does not fit the others.
        ArgumentError: an unknown activation, or cu_seqlens that do not fit.
        BackendUnavailableError: the backend asked for cannot run this call.
        GradientError: an input carries a forward-mode tangent.

    Numerics:
        float32 inside, float64 if any input is; any mix of float32, bfloat16 and float16 is
        taken. Equal inputs give equal bits on one machine. Second-order gradients run through
        the plain reference: right and slow.

    References:
        ``causal_conv1d_fn`` of causal-conv1d.
    """
    tensors = dict(x=x, weight=weight, bias=bias, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    sizes = _shapes.bind(_NAME, _PATTERNS, tensors)
    _shapes.check_positive(_NAME, "weight", "width", sizes["width"])
    known = packed_dims(_NAME, x, tensors)
    if initial_states is not None:
        known["dim"], known["state_len"] = sizes["dim"], sizes["width"] - 1
        tensors["initial_states"] = initial_states
        _shapes.bind(_NAME, _STATES_PATTERN, tensors, known, like=x)
        _shapes.check_real(_NAME, tensors, ("initial_states",))
    _shapes.check_real(_NAME, tensors, ("x", "weight", "bias"))
    _shapes.check_index(_NAME, tensors, ("seq_idx", "cu_seqlens"))
    silu = _shapes.check_activation(_NAME, activation)
    inputs = (x, weight, bias, initial_states, seq_idx, cu_seqlens)
    _shapes.check_flag(_NAME, "return_final_states", return_final_states)
    options = (silu, _shapes.check_flag(_NAME, "reverse", reverse))
    out, final_states = _call(backend, inputs, options)
    return (out, final_states) if return_final_states else out
