# SPDX-License-Identifier: Apache-2.0
"""Mamba-1 selective scan over a sequence: public function, checks and registration.

Arithmetic belongs in ``backends/<name>/selective_scan.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from statescan.backends.outputs import compute_dtype, selective_scan_fwd_outputs
from statescan.errors import ShapeError
from statescan.ops import _shapes
from statescan.ops._packing import packed_dims
from statescan.ops._register import SequenceOp, register
from statescan.ops._shapes import pattern
from statescan.ops._values import check_cu_seqlens
from statescan.reference.selective_scan import selective_scan_ref

_NAME = "selective_scan"
_INPUTS = (
    *("x", "dt", "A", "B", "C", "D?", "z?", "dt_bias?"),
    *("initial_states?", "seq_idx?", "cu_seqlens?"),
)
_TOKENS = pattern("batch dim seqlen")
_PATTERNS = {
    "x": _TOKENS,
    "dt": _TOKENS,
    "A": pattern("dim dstate"),
    "B": (),
    "C": (),
    "D": pattern("dim"),
    "z": _TOKENS,
    "dt_bias": pattern("dim"),
    "seq_idx": pattern("batch seqlen"),
    "cu_seqlens": pattern("num_bounds"),
    "initial_states": pattern("num_states dim dstate"),
}
_PROJECTION_PATTERNS = {
    name: {
        2: pattern("dim dstate"),
        3: pattern("batch dstate seqlen"),
        4: pattern(f"batch ngroups_of_{name} dstate seqlen"),
    }
    for name in ("B", "C")
}
"""Patterns of B and C by rank: constant, per token, per token and group."""


def _allocate(
    inputs: Sequence[Any], options: Sequence[Any], save_states: bool
) -> tuple[Tensor, ...]:
    x, A, cu_seqlens = inputs[0], inputs[2], inputs[10]
    return selective_scan_fwd_outputs(x, A, cu_seqlens, save_states, compute_dtype(*inputs[:9]))


def _reference(inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, ...]:
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens = inputs
    dt_softplus, reverse = options
    results = selective_scan_ref(
        *(x, dt, A, B, C),
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        return_final_states=True,
    )
    return tuple(results)


def _dims(inputs: Sequence[Any]) -> dict[str, int]:
    batch, dim, seqlen = inputs[0].shape
    return {"batch": batch, "dim": dim, "seqlen": seqlen, "dstate": inputs[2].shape[1]}


def _check_values(inputs: Sequence[Any]) -> None:
    check_cu_seqlens(_NAME, inputs[10], inputs[0].shape[2])


OP = SequenceOp(
    name=_NAME,
    inputs=_INPUTS,
    index_inputs=("seq_idx", "cu_seqlens"),
    options=(("dt_softplus", bool), ("reverse", bool)),
    num_outputs=2,
    num_saved=1,
    allocate=_allocate,
    reference=_reference,
    dims=_dims,
    check_values=_check_values,
)
_call = register(OP)


def selective_scan(
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
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    return_final_states: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the selective state space recurrence of Mamba-1 along a sequence.

    For every channel, with ``step = dt + dt_bias`` (through softplus when ``dt_softplus``)::

        h[t] = exp(step[t] * A) * h[t-1] + step[t] * B[t] * x[t]        h[-1] = initial_states
        y[t] = sum over dstate of C[t] * h[t]  +  D * x[t]
        out[t] = y[t] * silu(z[t])                                      y[t] without z

    Args:
        x: (batch, dim, seqlen), channel-first or channel-last, any strides.
        dt: (batch, dim, seqlen), the step size before bias and softplus.
        A: (dim, dstate), the negative decay rates. Complex A makes the states complex; then B
            and C must be complex too, and y is twice the real part of the sum.
        B: How x enters the state: (batch, ngroups, dstate, seqlen) with neighbouring
            dim / ngroups channels in a group, (batch, dstate, seqlen), or (dim, dstate) constant.
        C: How y reads the state; each of B's shapes, chosen independently.
        D: (dim,), the skip from x to y.
        z: (batch, dim, seqlen), the gate.
        dt_bias: (dim,), added to dt.
        dt_softplus: Pass dt + dt_bias through softplus.
        initial_states: (batch, dim, dstate), or (num_seqs, dim, dstate) with cu_seqlens.
            Default zeros. With seq_idx it enters the first real sequence of each row.
        seq_idx: (batch, seqlen) int32 or int64. A run of equal ids is a sequence of its own;
            negative ids are padding, which does not exist: output 0, gradients 0, state unchanged.
        cu_seqlens: (num_seqs + 1,) int32 or int64 with batch 1: bounds of packed sequences,
            0 first, seqlen last; empty sequences are allowed.
        reverse: Walk each sequence from its last token to its first.
        return_final_states: Return the states after the last token too.
        backend: Name of a backend, or "auto" (``statescan.explain`` tells which).

    Returns:
        out, (batch, dim, seqlen) in x's dtype and layout; with ``return_final_states`` also
        final_states, (batch or num_seqs, dim, dstate), float32, float64 or complex. Both carry
        gradients, and every floating-point input receives one in its own dtype.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument does not fit the others.
        ArgumentError: cu_seqlens with batch > 1, wrong bounds, or together with seq_idx.
        BackendUnavailableError: the backend asked for cannot run this call.
        GradientError: an input carries a forward-mode tangent.

    Numerics:
        float32 inside, float64 if any input is; any mix of float32, bfloat16 and float16 is
        taken. softplus is exact in both tails. Equal inputs give equal bits on one machine.
        Second-order gradients run through the plain reference: right, slow, and with the
        memory of one state per token.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023),
        section 3 and algorithm 2; ``selective_scan_fn`` of mamba-ssm.
    """
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
    _check(dict(zip(OP.input_names, inputs)))
    B = B.unsqueeze(1) if B.dim() == 3 else B
    C = C.unsqueeze(1) if C.dim() == 3 else C
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
    _shapes.check_flag(_NAME, "return_final_states", return_final_states)
    options = (
        _shapes.check_flag(_NAME, "dt_softplus", dt_softplus),
        _shapes.check_flag(_NAME, "reverse", reverse),
    )
    out, final_states = _call(backend, inputs, options)
    return (out, final_states) if return_final_states else out


def _check(tensors: dict[str, Tensor | None]) -> None:
    """Shapes, dtypes and devices of one call."""
    patterns = dict(_PATTERNS)
    for name in ("B", "C"):
        ranks, tensor = _PROJECTION_PATTERNS[name], tensors[name]
        rank = tensor.dim() if isinstance(tensor, Tensor) else 3
        patterns[name] = ranks.get(rank, ranks[3])
    sizes = _shapes.bind(_NAME, patterns, tensors, packed_dims(_NAME, tensors["x"], tensors))
    for name in ("B", "C"):
        groups = sizes.get(f"ngroups_of_{name}")
        if groups is not None and (groups == 0 or sizes["dim"] % groups):
            raise ShapeError(
                f"{_NAME}: argument '{name}' has {groups} groups for dim {sizes['dim']}.\n"
                "ngroups must divide dim.\n"
                f"Give '{name}' as (batch, ngroups, dstate, seqlen) with such an ngroups."
            )
    _shapes.check_real(_NAME, tensors, ("x", "dt", "D", "z", "dt_bias"))
    _shapes.check_index(_NAME, tensors, ("seq_idx", "cu_seqlens"))
    _shapes.check_one_kind(_NAME, tensors, ("A", "B", "C", "initial_states"))
