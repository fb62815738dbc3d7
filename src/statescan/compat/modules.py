# SPDX-License-Identifier: Apache-2.0
"""``Mamba``, ``Block`` and ``GatedMLP`` with mamba_ssm's signatures and parameter names.

The mixer is ``nn.Mamba``; here it learns where the originals keep their inference states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan import nn as own
from statescan.compat.layer_norm import RMSNorm, layer_norm_fn
from statescan.errors import ArgumentError
from statescan.nn import LayerCache

Norm = Callable[[int], nn.Module]


class Mamba(own.Mamba):
    """``statescan.nn.Mamba`` whose states live in an ``InferenceParams``.

    Constructor, parameters and their initial values are the originals'. Unlike there, a prompt
    may come in chunks, packed sequences are taken, and the SSM state is float32 whatever the
    dtype of the parameters, since rounding it at every token adds up.
    """

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: Any = None,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Mix hidden_states (batch, seqlen, d_model).

        Args:
            hidden_states: (batch, seqlen, d_model).
            inference_params: Keeps this layer's states under ``layer_idx`` in
                ``key_value_memory_dict``; they are updated in place. At ``seqlen_offset`` 0 they
                start from zero.
            seq_idx, cu_seqlens: Packed sequences, as ``statescan.nn.Mamba`` takes them.
        """
        if inference_params is None:
            return super().forward(hidden_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
        starting = inference_params.seqlen_offset == 0
        states = self._get_states_from_cache(
            inference_params, hidden_states.shape[0], initialize_states=starting
        )
        return super().forward(
            hidden_states, LayerCache(*states), seq_idx=seq_idx, cu_seqlens=cu_seqlens
        )

    def allocate_inference_cache(  # type: ignore[override]
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Zero states: (batch, d_inner, d_conv) in ``dtype``, and (batch, d_inner, d_state).

        The second is float32, or float64 for a float64 mixer. ``max_seqlen`` and further keywords
        are taken for the originals' sake and not needed.
        """
        conv_state, ssm_state = super().allocate_inference_cache(batch_size, max_seqlen)
        shape = (batch_size, self.d_inner, self.d_conv)
        return conv_state.new_zeros(shape, dtype=dtype or conv_state.dtype), ssm_state

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, Tensor]:
        """This layer's rows of the states, made at the first use."""
        if self.layer_idx is None:
            raise ArgumentError(
                "Mamba: inference_params is given to a mixer without layer_idx.\n"
                "States are kept by layer.\n"
                "Pass layer_idx= to the constructor."
            )
        memory = inference_params.key_value_memory_dict
        if self.layer_idx not in memory:
            memory[self.layer_idx] = self.allocate_inference_cache(
                batch_size, inference_params.max_seqlen
            )
        first = getattr(inference_params, "batch_size_offset", 0)
        conv_state, ssm_state = (
            state[first : first + batch_size] for state in memory[self.layer_idx]
        )
        if initialize_states:
            conv_state.zero_()
            ssm_state.zero_()
        return conv_state, ssm_state


class Block(nn.Module):
    """Add → norm → mixer, and once more with an MLP where there is one.

    The sum travels beside the hidden states, so that it and the norm may be one step.

    Args:
        dim: Width of the hidden states.
        mixer_cls, mlp_cls, norm_cls: Called with ``dim``; ``nn.Identity`` as mlp_cls means none.
        fused_add_norm: Add and normalise in one function, whose sum keeps the residual's dtype.
        residual_in_fp32: Keep the sum in float32.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module],
        norm_cls: Norm = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)
        self.mlp: nn.Module | None = None
        if mlp_cls is not nn.Identity:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        if fused_add_norm and not isinstance(self.norm, (nn.LayerNorm, RMSNorm)):
            raise ArgumentError(
                f"Block: norm_cls makes a {type(self.norm).__name__} with fused_add_norm=True.\n"
                "It must make torch.nn.LayerNorm or the RMSNorm of layer_norm.\n"
                "Use one of them, or fused_add_norm=False."
            )

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        inference_params: Any = None,
        **mixer_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """The mixer's (or MLP's) output, and the sum that the next block adds it to."""
        hidden_states, residual = self._add_norm(self.norm, hidden_states, residual)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = self._add_norm(self.norm2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Any:
        """The mixer's empty states."""
        allocate: Any = self.mixer.allocate_inference_cache
        return allocate(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def _add_norm(
        self, norm: nn.Module, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return add_norm(
            *(norm, hidden_states, residual, self.fused_add_norm, self.residual_in_fp32)
        )


class BlockV1(Block):
    """``Block`` as version 1 of mamba_ssm had it in ``modules.mamba_simple``: without an MLP."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        norm_cls: Norm = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)


class GatedMLP(nn.Module):
    """``fc2(value * activation(gate))``, where ``fc1`` makes value and gate.

    Args:
        in_features, hidden_features, out_features: Widths; hidden is 8/3 of in by default.
        activation: Of the gate.
        bias: Whether the linear maps have one.
        multiple_of: hidden_features is rounded up to a multiple of it.
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        width = int(8 * in_features / 3) if hidden_features is None else hidden_features
        width = -(-width // multiple_of) * multiple_of
        self.fc1 = nn.Linear(in_features, 2 * width, bias=bias, **placed)
        self.activation = activation
        out = in_features if out_features is None else out_features
        self.fc2 = nn.Linear(width, out, bias=bias, **placed)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        value, gate = self.fc1(x).chunk(2, dim=-1)
        out: Tensor = self.fc2(value * self.activation(gate))
        return out


def add_norm(
    norm: nn.Module,
    hidden_states: Tensor,
    residual: Tensor | None,
    fused: bool,
    residual_in_fp32: bool,
) -> tuple[Tensor, Tensor]:
    """``norm(hidden_states + residual)`` and the sum, in the dtypes of the originals' two ways."""
    if fused:
        weight, bias = norm.weight, norm.bias
        normed, total = layer_norm_fn(
            *(hidden_states, weight, bias),  # type: ignore[arg-type]
            residual=residual,
            prenorm=True,
            residual_in_fp32=residual_in_fp32,
            eps=norm.eps,  # type: ignore[arg-type]
            is_rms_norm=isinstance(norm, RMSNorm),
        )
        return normed, total  # type: ignore[return-value]
    total = hidden_states if residual is None else hidden_states + residual
    normed = norm(total.to(norm.weight.dtype))  # type: ignore[arg-type]
    return normed, total.float() if residual_in_fp32 else total
