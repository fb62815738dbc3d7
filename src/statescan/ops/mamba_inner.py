# SPDX-License-Identifier: Apache-2.0
"""The body of a Mamba-1 mixer in one op: public function, checks and registration.

Arithmetic belongs in ``backends/_mamba_inner.py`` and the convolution and scan that it joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from statescan.backends.outputs import compute_dtype, mamba_inner_fwd_outputs
from statescan.errors import ArgumentError, ShapeError
from statescan.ops import _shapes
from statescan.ops._packing import packed_dims
from statescan.ops._register import SequenceOp, register
from statescan.ops._shapes import pattern
from statescan.ops._values import check_cu_seqlens
from statescan.reference.mamba_inner import mamba_inner_ref

_NAME = "mamba_inner"
_INPUTS = (
    *("xz", "conv_weight", "conv_bias?", "x_proj_weight", "dt_proj_weight", "A", "B?", "C?"),
    *("D?", "dt_bias?", "b_proj_bias?", "c_proj_bias?", "out_proj_weight?", "out_proj_bias?"),
    *("b_norm_weight?", "c_norm_weight?", "dt_norm_weight?", "conv_initial_states?"),
    *("initial_states?", "seq_idx?", "cu_seqlens?"),
)
_ARGUMENTS = tuple(name.removesuffix("?") for name in _INPUTS)
_PATTERNS = {
    "xz": pattern("batch two_dim seqlen"),
    "conv_weight": pattern("dim width"),
    "conv_bias": pattern("dim"),
    "x_proj_weight": pattern("projected dim"),
    "dt_proj_weight": pattern("dim dt_rank"),
    "A": pattern("dim dstate"),
    "B": pattern("dim dstate"),
    "C": pattern("dim dstate"),
    "D": pattern("dim"),
    "dt_bias": pattern("dim"),
    "out_proj_weight": pattern("d_model dim"),
    "out_proj_bias": pattern("d_model"),
    "dt_norm_weight": pattern("dim"),
    "seq_idx": pattern("batch seqlen"),
    "cu_seqlens": pattern("num_bounds"),
    "initial_states": pattern("num_states dim dstate"),
    "conv_initial_states": pattern("num_states dim state_len"),
    **{
        n: pattern("part") for n in ("b_proj_bias", "c_proj_bias", "b_norm_weight", "c_norm_weight")
    },
}
_REAL = tuple(
    name
    for name in _ARGUMENTS
    if name not in ("A", "B", "C", "initial_states", "seq_idx", "cu_seqlens")
)


def _allocate(
    inputs: Sequence[Any], options: Sequence[Any], save_states: bool
) -> tuple[Tensor, ...]:
    xz, conv_weight, _, x_proj_weight, _, A = inputs[:6]
    compute = compute_dtype(*inputs[:19])
    return mamba_inner_fwd_outputs(
        *(xz, conv_weight, x_proj_weight, A, inputs[12], inputs[20]), save_states, compute
    )


def _reference(inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, ...]:
    dt_softplus, silu, norm_eps, reverse = options
    named = dict(zip(_ARGUMENTS, inputs))
    positional = [named.pop(name) for name in _ARGUMENTS[:6]]
    results = mamba_inner_ref(
        *positional,
        **named,
        dt_softplus=dt_softplus,
        activation="silu" if silu else None,
        norm_eps=norm_eps,
        reverse=reverse,
        return_final_states=True,
    )
    return tuple(results)


def _dims(inputs: Sequence[Any]) -> dict[str, int]:
    batch, _, seqlen = inputs[0].shape
    dim, width = inputs[1].shape
    sizes = {"batch": batch, "dim": dim, "seqlen": seqlen, "width": width}
    return sizes | {"dstate": inputs[5].shape[1], "dt_rank": inputs[4].shape[1]}


def _check_values(inputs: Sequence[Any]) -> None:
    check_cu_seqlens(_NAME, inputs[20], inputs[0].shape[2])


OP = SequenceOp(
    name=_NAME,
    inputs=_INPUTS,
    index_inputs=("seq_idx", "cu_seqlens"),
    options=(("dt_softplus", bool), ("silu", bool), ("norm_eps", float), ("reverse", bool)),
    num_outputs=3,
    num_saved=3,
    allocate=_allocate,
    reference=_reference,
    dims=_dims,
    check_values=_check_values,
)
_call = register(OP)


def mamba_inner(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_proj_weight: Tensor,
    dt_proj_weight: Tensor,
    A: Tensor,
    *,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    b_proj_bias: Tensor | None = None,
    c_proj_bias: Tensor | None = None,
    dt_softplus: bool = True,
    activation: str | None = "silu",
    out_proj_weight: Tensor | None = None,
    out_proj_bias: Tensor | None = None,
    b_norm_weight: Tensor | None = None,
    c_norm_weight: Tensor | None = None,
    dt_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    conv_initial_states: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    return_final_states: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Run everything between the two outer projections of a Mamba-1 mixer.

    With x and z the two halves of ``xz``::

        x = causal_conv1d(x, conv_weight, conv_bias, activation)
        r, B, C = parts of x_proj_weight @ x            B and C get their bias, then RMS norm
        dt = dt_proj_weight @ r                         then RMS norm over dim
        out = selective_scan(x, dt, A, B, C, D, z, dt_bias, dt_softplus)
        out = out_proj_weight @ out + out_proj_bias     only with out_proj_weight

    Less memory than the parts one by one: the backward makes the conv's output and dt again.

    Args:
        xz: (batch, 2 * dim, seqlen), x first, channel-first or channel-last.
        conv_weight: (dim, width).
        conv_bias: (dim,) or None.
        x_proj_weight: (dt_rank + dstate + dstate, dim): rows for dt, B and C. A part is absent
            when B or C is given; with complex A each has 2 * dstate rows, real and imaginary
            parts in turn.
        dt_proj_weight: (dim, dt_rank).
        A: (dim, dstate), real or complex.
        B: (dim, dstate), a constant B instead of a projected one.
        C: (dim, dstate), a constant C instead of a projected one.
        D: (dim,), the skip.
        dt_bias: (dim,), added to dt after its norm.
        b_proj_bias: As long as B's part, added to it.
        c_proj_bias: As long as C's part, added to it.
        dt_softplus: Pass dt + dt_bias through softplus.
        activation: Of the convolution: "silu", "swish" or None.
        out_proj_weight: (d_model, dim), projects the result.
        out_proj_bias: (d_model,).
        b_norm_weight: As long as B's part: RMS norm of B over its part.
        c_norm_weight: As long as C's part: RMS norm of C over its part.
        dt_norm_weight: (dim,): RMS norm of dt over dim, after its projection.
        norm_eps: Added to the mean square in the norms.
        conv_initial_states: (batch or num_seqs, dim, width - 1), see ``causal_conv1d``.
        initial_states: (batch or num_seqs, dim, dstate), see ``selective_scan``.
        seq_idx: (batch, seqlen), packing and padding, see ``selective_scan``.
        cu_seqlens: (num_seqs + 1,), packing, see ``selective_scan``.
        reverse: Walk each sequence from its last token to its first, conv and scan alike.
        return_final_states: Return the conv's and the scan's final states too.
        backend: Name of a backend, or "auto".

    Returns:
        out, (batch, dim, seqlen), or (batch, seqlen, d_model) with ``out_proj_weight``, in xz's
        dtype; with ``return_final_states`` (out, conv_final_states, final_states). All carry
        gradients.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument does not fit the others.
        BackendUnavailableError: the backend asked for cannot run this call.
        GradientError: an input carries a forward-mode tangent.

    Numerics:
        Projections run in xz's dtype (their weights are cast to it, float64 if any input is);
        conv, norms and scan in float32. Padding (seq_idx < 0) gives output 0, the bias of the
        output projection included.

    References:
        ``mamba_inner_fn`` of mamba-ssm, whose gradients of the norms and of the output bias are
        wrong (there the norms are left out of the backward).
    """
    inputs = (
        *(xz, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, A, B, C, D, dt_bias),
        *(b_proj_bias, c_proj_bias, out_proj_weight, out_proj_bias, b_norm_weight),
        *(c_norm_weight, dt_norm_weight, conv_initial_states, initial_states),
        *(seq_idx, cu_seqlens),
    )
    silu = _shapes.check_activation(_NAME, activation)
    _check(dict(zip(_ARGUMENTS, inputs)))
    options = (
        _shapes.check_flag(_NAME, "dt_softplus", dt_softplus),
        silu,
        _shapes.check_number(_NAME, "norm_eps", norm_eps),
        _shapes.check_flag(_NAME, "reverse", reverse),
    )
    _shapes.check_flag(_NAME, "return_final_states", return_final_states)
    out, conv_final_states, final_states = _call(backend, inputs, options)
    return (out, conv_final_states, final_states) if return_final_states else out


def _check(tensors: dict[str, Tensor | None]) -> None:
    """Shapes, dtypes and devices of one call."""
    known = packed_dims(_NAME, tensors["xz"], tensors)
    A = tensors["A"]
    if isinstance(A, Tensor) and A.dim() == 2:
        known["part"] = A.shape[1] * (2 if A.is_complex() else 1)
    weight = tensors["conv_weight"]
    if isinstance(weight, Tensor) and weight.dim() == 2:
        known["state_len"] = max(weight.shape[1] - 1, 0)
        known["two_dim"] = 2 * weight.shape[0]
    sizes = _shapes.bind(_NAME, _PATTERNS, tensors, known)
    _shapes.check_positive(_NAME, "conv_weight", "width", sizes["width"])
    parts = (tensors["B"] is None) + (tensors["C"] is None)
    needed = sizes["dt_rank"] + parts * sizes["part"]
    if sizes["projected"] != needed:
        raise ShapeError(
            f"{_NAME}: argument 'x_proj_weight' has {sizes['projected']} rows.\n"
            f"It must have {needed}: dt_rank {sizes['dt_rank']} and {parts} parts of "
            f"{sizes['part']} for B and C that are not given.\n"
            "Check dt_proj_weight (dim, dt_rank), A (dim, dstate), and whether B or C is constant."
        )
    for name, needs in (
        *(("b_proj_bias", "B"), ("c_proj_bias", "C")),
        *(("b_norm_weight", "B"), ("c_norm_weight", "C")),
    ):
        if tensors[name] is not None and tensors[needs] is not None:
            raise ArgumentError(
                f"{_NAME}: arguments '{name}' and '{needs}' are both given.\n"
                f"'{name}' acts on a projected {needs} only.\nLeave one of them out."
            )
    if tensors["out_proj_bias"] is not None and tensors["out_proj_weight"] is None:
        raise ArgumentError(
            f"{_NAME}: argument 'out_proj_bias' is given without 'out_proj_weight'.\n"
            "The bias belongs to the output projection.\nGive both, or neither."
        )
    _shapes.check_real(_NAME, tensors, _REAL)
    _shapes.check_index(_NAME, tensors, ("seq_idx", "cu_seqlens"))
    _shapes.check_one_kind(_NAME, tensors, ("A", "B", "C", "initial_states"))
