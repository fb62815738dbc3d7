# SPDX-License-Identifier: Apache-2.0
"""The body of a Mamba-1 mixer, composed of a backend's own convolution and scan.

Any backend with those four functions has mamba_inner through here; no kernels of its own.

    x, z = xz                         x = conv(x)                 x_dbl = x_proj_weight x
    dt = norm(dt_proj_weight x_dbl)   B, C = norm(x_dbl + bias)   gated = scan(x, dt, B, C, z)
    out = out_proj_weight gated + bias

The forward keeps x_dbl and, where out_proj needs it, gated; the backward makes the convolution's
output and dt again. Projections run in xz's dtype, what is added to or normed after
them in the dtype of the arithmetic, and gradients of weights are summed in that dtype.

Padding: its x is 0 after the convolution, so it adds nothing to weight gradients; its x_dbl is set
to 1, since a norm of zeros need not have a gradient; its out and dout are selected away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends._mamba_inner_weights import Part
from statescan.backends._projections import bias_gradient, project, weight_gradient
from statescan.backends._rms_norm import rms_norm, rms_norm_gradient
from statescan.backends.outputs import (
    compute_dtype,
    empty_activation,
    empty_gradients,
    projected_outputs,
    projection_dtype,
)


class Functions(NamedTuple):
    """A backend's functions that mamba_inner is made of."""

    conv_fwd: Callable[..., tuple[Tensor, ...]]
    conv_bwd: Callable[..., tuple[Tensor, ...]]
    scan_fwd: Callable[..., tuple[Tensor, ...]]
    scan_bwd: Callable[..., tuple[Tensor, ...]]


class Inputs(NamedTuple):
    """The tensors of a call, in the order of the op."""

    xz: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    x_proj_weight: Tensor
    dt_proj_weight: Tensor
    A: Tensor
    B: Tensor | None
    C: Tensor | None
    D: Tensor | None
    dt_bias: Tensor | None
    b_proj_bias: Tensor | None
    c_proj_bias: Tensor | None
    out_proj_weight: Tensor | None
    out_proj_bias: Tensor | None
    b_norm_weight: Tensor | None
    c_norm_weight: Tensor | None
    dt_norm_weight: Tensor | None
    conv_initial_states: Tensor | None
    initial_states: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None


class Options(NamedTuple):
    """The options of a call, in the order of the op."""

    dt_softplus: bool
    silu: bool
    norm_eps: float
    reverse: bool


_NUM_GRADIENTS = Inputs._fields.index("seq_idx")


class _Call:
    """One call: its tensors, sizes and dtypes, and the steps that both directions take."""

    def __init__(self, functions: Functions, inputs: Inputs, options: Options) -> None:
        self.functions, self.inputs, self.options = functions, inputs, options
        self.dtype = compute_dtype(*inputs[:_NUM_GRADIENTS])
        self.work = projection_dtype(inputs.xz, self.dtype)
        self.dim, self.dt_rank = inputs.dt_proj_weight.shape
        self.x = inputs.xz[:, : self.dim].to(self.work)
        self.z = inputs.xz[:, self.dim :].to(self.work)
        self.padding = None if inputs.seq_idx is None else (inputs.seq_idx < 0).unsqueeze(2)
        width = inputs.A.shape[1] * (2 if inputs.A.is_complex() else 1)
        end = inputs.x_proj_weight.shape[0]
        rest = (options.norm_eps, inputs.A.is_complex(), self.dtype)
        self.B_part, self.C_part = (
            None if constant is not None else Part(slice(start, start + width), bias, norm, *rest)
            for constant, start, bias, norm in (
                (inputs.B, self.dt_rank, inputs.b_proj_bias, inputs.b_norm_weight),
                (inputs.C, end - width, inputs.c_proj_bias, inputs.c_norm_weight),
            )
        )

    @property
    def conv_arguments(self) -> tuple[Tensor | bool | None, ...]:
        """What both directions of the convolution take from x on."""
        inputs, options = self.inputs, self.options
        return (
            *(self.x, inputs.conv_weight, inputs.conv_bias, inputs.conv_initial_states),
            *(inputs.seq_idx, inputs.cu_seqlens, options.silu, options.reverse),
        )

    def project_inputs(self, x: Tensor) -> Tensor:
        """x_dbl (batch, seqlen, dt_rank and the parts of B and C)."""
        weight = self.inputs.x_proj_weight
        _, x_dbl = projected_outputs(self.inputs.xz, weight, None, self.dtype)
        project(weight, x, x_dbl.transpose(1, 2))
        return x_dbl if self.padding is None else x_dbl.masked_fill_(self.padding, 1.0)

    def low_rank_dt(self, x_dbl: Tensor) -> Tensor:
        """The columns of x_dbl that dt is made of, (batch, dt_rank, seqlen)."""
        return x_dbl[..., : self.dt_rank].transpose(1, 2)

    def project_dt(self, x: Tensor, x_dbl: Tensor) -> Tensor:
        """dt before its norm, in x's layout."""
        dt = empty_activation(x)
        project(self.inputs.dt_proj_weight, self.low_rank_dt(x_dbl), dt)
        return dt

    def scan_arguments(
        self, x: Tensor, projected_dt: Tensor, x_dbl: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The tensors of the scan."""
        inputs, dt = self.inputs, projected_dt
        if inputs.dt_norm_weight is not None:
            eps = self.options.norm_eps
            dt = rms_norm(dt.to(self.dtype), inputs.dt_norm_weight, eps, -2)
        B = inputs.B if self.B_part is None else self.B_part.load(x_dbl)
        C = inputs.C if self.C_part is None else self.C_part.load(x_dbl)
        return (
            *(x, dt, inputs.A, B, C, inputs.D, self.z, inputs.dt_bias, inputs.initial_states),
            *(inputs.seq_idx, inputs.cu_seqlens),
        )


def compose_fwd(
    functions: Functions, inputs: Inputs, options: Options, save_states: bool
) -> tuple[Tensor, ...]:
    """out, conv_final_states, final_states, x_dbl, chunk_states and gated of mamba_inner."""
    call = _Call(functions, inputs, options)
    xz = inputs.xz
    x, conv_final_states = functions.conv_fwd(*call.conv_arguments)
    x_dbl = call.project_inputs(x)
    arguments = call.scan_arguments(x, call.project_dt(x, x_dbl), x_dbl)
    gated, final_states, chunk_states = functions.scan_fwd(
        *arguments, options.dt_softplus, options.reverse, save_states
    )
    projected, _ = projected_outputs(xz, inputs.x_proj_weight, inputs.out_proj_weight, call.dtype)
    out = gated if projected is None else projected
    if inputs.out_proj_weight is not None:
        if inputs.out_proj_bias is not None:
            out.copy_(inputs.out_proj_bias)
        biased = inputs.out_proj_bias is not None
        project(inputs.out_proj_weight, gated, out.transpose(1, 2), add=biased)
        if call.padding is not None:
            out.masked_fill_(call.padding, 0.0)
    keep_gated = save_states and inputs.out_proj_weight is not None
    return (
        *(out.to(xz.dtype), conv_final_states.to(xz.dtype), final_states),
        x_dbl if save_states else x_dbl.new_empty((0,)),
        chunk_states,
        gated if keep_gated else gated.new_empty((0,)),
    )


def compose_bwd(
    functions: Functions,
    douts: tuple[Tensor, Tensor | None, Tensor | None],
    inputs: Inputs,
    saved: tuple[Tensor, Tensor, Tensor],
    options: Options,
) -> tuple[Tensor, ...]:
    """Gradients of the inputs from xz to initial_states; 0 elements where one is absent.

    Args:
        functions: The backend's.
        douts: Gradients of out, conv_final_states and final_states.
        inputs: As for the forward.
        saved: x_dbl, chunk_states and gated, from the forward.
        options: As for the forward.
    """
    call = _Call(functions, inputs, options)
    found = _Gradients(inputs)
    x_dbl, chunk_states, gated = saved
    x, _ = functions.conv_fwd(*call.conv_arguments)
    dgated = _output_gradient(call, found, douts[0], x, gated)
    projected_dt = call.project_dt(x, x_dbl)
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states = functions.scan_bwd(
        dgated,
        douts[2],
        *call.scan_arguments(x, projected_dt, x_dbl),
        chunk_states,
        options.dt_softplus,
        options.reverse,
    )
    found.put(A=dA, D=dD, dt_bias=ddt_bias, initial_states=dinitial_states)
    found.get("xz")[:, call.dim :] = dz
    _projection_gradients(call, found, (x, x_dbl, projected_dt), (dx, ddt, dB, dC))
    dconv_final_states = None if douts[1] is None else douts[1].to(call.work)
    dx, dweight, dbias, dstates = functions.conv_bwd(dx, dconv_final_states, *call.conv_arguments)
    found.get("xz")[:, : call.dim] = dx
    found.put(conv_weight=dweight, conv_bias=dbias, conv_initial_states=dstates)
    return found.all


class _Gradients:
    """The results of the backward, filled in by name."""

    def __init__(self, inputs: Inputs) -> None:
        self.all = empty_gradients(*inputs[:_NUM_GRADIENTS])
        self._by_name = dict(zip(Inputs._fields, self.all))

    def get(self, name: str) -> Tensor:
        """The memory for one gradient."""
        return self._by_name[name]

    def put(self, **gradients: Tensor | None) -> None:
        """Fill in gradients; None and absent inputs are passed over."""
        for name, gradient in gradients.items():
            if gradient is not None:
                self._by_name[name].copy_(gradient)


def _output_gradient(
    call: _Call, found: _Gradients, dout: Tensor, x: Tensor, gated: Tensor
) -> Tensor:
    """Gradient of the scan's output, through the output projection if there is one."""
    weight = call.inputs.out_proj_weight
    if weight is None:
        return dout
    if call.padding is not None:
        dout = dout.masked_fill(call.padding, 0.0)
    dtokens = dout.to(call.work).transpose(1, 2)
    found.put(out_proj_weight=weight_gradient(dtokens, gated, call.dtype))
    if call.inputs.out_proj_bias is not None:
        found.put(out_proj_bias=bias_gradient(dtokens, call.dtype))
    dgated = empty_activation(x)
    project(weight.t(), dtokens, dgated)
    return dgated


def _projection_gradients(
    call: _Call,
    found: _Gradients,
    values: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """From the scan's gradients back to x, whose gradient is completed in place.

    Args:
        call: The call.
        found: Receives the gradients of weights, biases and norms.
        values: x, x_dbl and dt before its norm.
        gradients: dx, ddt, dB and dC of the scan.
    """
    inputs = call.inputs
    x, x_dbl, projected_dt = values
    dx, ddt, dB, dC = gradients
    dx_dbl = torch.empty_like(x_dbl)
    if call.B_part is None:
        found.put(B=dB)
    else:
        dbias, dnorm = call.B_part.gradients(dB, x_dbl, dx_dbl)
        found.put(b_proj_bias=dbias, b_norm_weight=dnorm)
    if call.C_part is None:
        found.put(C=dC)
    else:
        dbias, dnorm = call.C_part.gradients(dC, x_dbl, dx_dbl)
        found.put(c_proj_bias=dbias, c_norm_weight=dnorm)
    if inputs.dt_norm_weight is not None:
        normed = projected_dt.to(call.dtype)
        eps = call.options.norm_eps
        ddt, dnorm = rms_norm_gradient(ddt, normed, inputs.dt_norm_weight, eps, -2)
        found.put(dt_norm_weight=dnorm)
    ddt = ddt.to(call.work)
    found.put(dt_proj_weight=weight_gradient(ddt, call.low_rank_dt(x_dbl), call.dtype))
    project(inputs.dt_proj_weight.t(), ddt, call.low_rank_dt(dx_dbl))
    dprojected = dx_dbl.transpose(1, 2)
    found.put(x_proj_weight=weight_gradient(dprojected, x, call.dtype))
    project(inputs.x_proj_weight.t(), dprojected, dx, add=True)
