# SPDX-License-Identifier: Apache-2.0
"""The Mamba-1 mixer: parameters, their initial values, and how they are wired to the ops.

No kernel choice and no arithmetic of the scan or the convolution belongs here.
"""

from __future__ import annotations

import logging
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan import ops
from statescan.nn import checks
from statescan.nn.cache import InferenceCache, LayerCache
from statescan.nn.conv import convolve_with_module, step_with_module
from statescan.nn.initial_values import initial_A_log, initial_D, initialise_time_step
from statescan.nn.plain import is_plain
from statescan.nn.precision import FullPrecisionMixin, TimeStepProjection, full_precision_dtype
from statescan.ops._fused_decode import fused_mamba_step

_LINEARS = (nn.Linear, TimeStepProjection)
_CONVS = (nn.Conv1d,)
_log = logging.getLogger(__name__)


class Mamba(FullPrecisionMixin):
    """Selective state space mixer of the Mamba paper, with the originals' parameter names.

    ``A_log``, ``D`` and ``dt_proj.bias`` stay float32 under ``.to(dtype)``, and optimisers that
    look for ``_no_weight_decay`` leave them undecayed. A projection that is wrapped, hooked,
    quantised or otherwise not plain is called as a module; plain ones run in one fused op.

    Under FSDP2 a group of parameters has one dtype: keep the model in float32 and give
    ``fully_shard`` a ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``.

    Args:
        d_model: Width of the input and the output.
        d_state: States per channel.
        d_conv: Taps of the causal convolution.
        expand: d_inner / d_model.
        dt_rank: Rank of the time step's projection; "auto" is ceil(d_model / 16).
        dt_min, dt_max: Range, log-uniform, of the time steps at the start.
        dt_init: "random" or "constant" values of ``dt_proj.weight``.
        dt_scale: Factor on these values' range.
        dt_init_floor: Smallest time step at the start.
        conv_bias: Whether the convolution has a bias.
        bias: Whether ``in_proj`` and ``out_proj`` have one.
        use_fast_path: False always calls the projections as modules.
        layer_idx: Which entry of an ``InferenceCache`` belongs to this mixer.
        device, dtype: Of the parameters.
    """

    full_precision_names: ClassVar[tuple[str, ...]] = ("A_log", "D")
    _told = False

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | Literal["auto"] = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_sizes(d_model=d_model)
        checks.check_expand(expand)
        checks.check_dtype(dtype)
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.expand = expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.use_fast_path = use_fast_path
        self.layer_idx = layer_idx
        checks.check_sizes(
            d_state=d_state, d_conv=d_conv, d_inner=self.d_inner, dt_rank=self.dt_rank
        )
        # The order of these draws is the originals', so a seed gives the same model here.
        d_inner = self.d_inner
        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=bias, device=device, dtype=dtype)
        self.conv1d = nn.Conv1d(
            d_inner, d_inner, d_conv, groups=d_inner, padding=d_conv - 1, bias=conv_bias,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.x_proj = nn.Linear(
            d_inner, self.dt_rank + 2 * d_state, bias=False, device=device, dtype=dtype
        )
        self.dt_proj = TimeStepProjection(self.dt_rank, d_inner, device=device, dtype=dtype)
        initialise_time_step(
            self.dt_proj, dt_init, self.dt_rank**-0.5 * dt_scale, dt_min, dt_max, dt_init_floor
        )
        self.A_log = initial_A_log(d_inner, d_state, self.x_proj.weight)
        self.D = initial_D(d_inner, self.x_proj.weight)
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias, device=device, dtype=dtype)
        self.mark_full_precision()
        self.dt_proj.mark_full_precision()

    def forward(
        self,
        hidden_states: Tensor,
        cache: LayerCache | InferenceCache | None = None,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Mix hidden_states (batch, seqlen, d_model) along seqlen; ``cache`` is updated in place.

        With a cache the sequence continues from its states, so a prompt may come in chunks of any
        lengths. The states are values: no gradient flows from one call into the one before.

        Args:
            hidden_states: (batch, seqlen, d_model).
            cache: This layer's states, or those of all layers if ``layer_idx`` is set.
            seq_idx: (batch, seqlen) ids of packed sequences; negative ids are padding.
            cu_seqlens: (num_seqs + 1,) borders of packed sequences, for batch 1.

        Returns:
            (batch, seqlen, d_model) in the dtype of hidden_states.
        """
        checks.check_hidden_states(hidden_states, self.d_model, self.in_proj)
        layer = self._layer_cache(cache)
        if layer is None:
            return self._mix(hidden_states, None, None, seq_idx, cu_seqlens)[0]
        checks.check_cache(layer, hidden_states, cu_seqlens)
        packed = seq_idx is not None or cu_seqlens is not None
        if hidden_states.shape[1] == 1 and not packed and not torch.is_grad_enabled():
            return self.step(hidden_states, *layer)[0]
        conv_state, ssm_state = layer
        if torch.is_grad_enabled():
            # Backward needs the states as they were, and they are overwritten below.
            conv_state, ssm_state = conv_state.clone(), ssm_state.clone()
        older = conv_state.shape[-1] - (self.d_conv - 1)
        out, conv_final, ssm_final = self._mix(
            hidden_states, conv_state[..., older:], ssm_state, seq_idx, cu_seqlens
        )
        # Columns beyond the taps' reach are never read again by a forward or a step.
        layer.conv_state[..., :older].zero_()
        layer.conv_state[..., older:].copy_(conv_final.detach())
        layer.ssm_state.copy_(ssm_final.detach())
        return out

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mix one token; conv_state and ssm_state are updated in place and returned.

        Not differentiable: run it under ``torch.no_grad()``, or train with ``forward``.

        Args:
            hidden_states: (batch, 1, d_model).
            conv_state: (batch, d_inner, state_len >= d_conv - 1), newest input last.
            ssm_state: (batch, d_inner, d_state).
        """
        checks.check_step_input(hidden_states, self.d_model, self.in_proj)
        weights = self.step_weights()
        if weights is not None:
            fused = fused_mamba_step(hidden_states.squeeze(1), conv_state, ssm_state, weights)
            if fused is not None:
                return fused.unsqueeze(1), conv_state, ssm_state
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, dim=-1)
        if is_plain(self.conv1d, _CONVS):
            weight = self.conv1d.weight.squeeze(1)
            x = ops.causal_conv1d_update(x, conv_state, weight, self.conv1d.bias, activation="silu")
        else:
            x = F.silu(step_with_module(self.conv1d, self.d_conv, x, conv_state))
        dt, B, C = self.x_proj(x).split((self.dt_rank, self.d_state, self.d_state), dim=-1)
        dt_bias = None
        if is_plain(self.dt_proj, _LINEARS):
            dt, dt_bias = F.linear(dt, self.dt_proj.weight), self.dt_proj.bias
        else:
            dt = self.dt_proj(dt)
        out = ops.selective_state_update(
            ssm_state, x, dt, self._A(), B, C, D=self.D, z=z, dt_bias=dt_bias, dt_softplus=True
        )
        return self.out_proj(out).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int | None = None, dtype: torch.dtype | None = None
    ) -> LayerCache:
        """Zero states for ``batch_size`` rows; ``max_seqlen`` is accepted and not needed.

        Without ``dtype`` conv_state has the projections' dtype and ssm_state is float32, since
        rounding the recurrent state at every token adds up.
        """
        checks.check_batch_size(batch_size)
        device = self.A_log.device
        floating = (p.dtype for p in self.in_proj.parameters() if p.is_floating_point())
        conv_dtype = dtype or next(floating, self.A_log.dtype)
        ssm_dtype = dtype or full_precision_dtype(conv_dtype)
        return LayerCache(
            torch.zeros(batch_size, self.d_inner, self.d_conv - 1, device=device, dtype=conv_dtype),
            torch.zeros(batch_size, self.d_inner, self.d_state, device=device, dtype=ssm_dtype),
        )

    def _layer_cache(self, cache: LayerCache | InferenceCache | None) -> LayerCache | None:
        if not isinstance(cache, InferenceCache):
            return cache
        return cache[checks.check_layer(cache, self.layer_idx)]

    def step_weights(self) -> tuple[Tensor | None, ...] | None:
        """The parameters in the order of ``fused_mamba_step``.

        None if a projection must be called as a module.
        """
        if not (self._all_plain() and is_plain(self.in_proj, _LINEARS)):
            return None
        return (
            *(self.in_proj.weight, self.in_proj.bias),
            *(self.conv1d.weight.squeeze(1), self.conv1d.bias, self.x_proj.weight),
            *(self.dt_proj.weight, self.dt_proj.bias, self.A_log, self.D),
            *(self.out_proj.weight, self.out_proj.bias),
        )

    def _A(self) -> Tensor:  # noqa: N802, named after the tensor
        # A wrapper may have cast A_log behind our back; exp of a bfloat16 is off by percents.
        return -torch.exp(self.A_log if self.A_log.dtype.itemsize > 2 else self.A_log.float())

    def _mix(
        self,
        hidden_states: Tensor,
        conv_states: Tensor | None,
        ssm_states: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out (batch, seqlen, d_model) and both final states."""
        xz = self.in_proj(hidden_states).transpose(1, 2)
        if not self._all_plain():
            self._say_which_is_not()
            return self._mix_by_modules(xz, conv_states, ssm_states, seq_idx, cu_seqlens)
        return ops.mamba_inner(  # type: ignore[return-value]
            xz,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.x_proj.weight,
            self.dt_proj.weight,
            self._A(),
            D=self.D,
            dt_bias=self.dt_proj.bias,
            out_proj_weight=self.out_proj.weight,
            out_proj_bias=self.out_proj.bias,
            conv_initial_states=conv_states,
            initial_states=ssm_states,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_final_states=True,
        )

    def _all_plain(self) -> bool:
        return (
            self.use_fast_path
            and is_plain(self.conv1d, _CONVS)
            and is_plain(self.x_proj, _LINEARS)
            and getattr(self.x_proj, "bias", None) is None
            and is_plain(self.dt_proj, _LINEARS)
            and is_plain(self.out_proj, _LINEARS)
        )

    def _say_which_is_not(self) -> None:
        """Log once a mixer why the fused op is not used; a compiled call has no place for it."""
        if self._told or not self.use_fast_path or torch.compiler.is_compiling():
            return
        self._told = True
        kinds = {"conv1d": _CONVS, **dict.fromkeys(("x_proj", "dt_proj", "out_proj"), _LINEARS)}
        named = [name for name, kind in kinds.items() if not is_plain(getattr(self, name), kind)]
        _log.info(
            "Mamba: %s wrapped, hooked or not linear, so projections are called as modules "
            "instead of in one fused op",
            f"{', '.join(named) or 'x_proj has a bias and'} {'are' if len(named) > 1 else 'is'}",
        )

    def _mix_by_modules(
        self,
        xz: Tensor,
        conv_states: Tensor | None,
        ssm_states: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same mixing with every projection called, so that hooks and wrappers take part."""
        x, z = xz.chunk(2, dim=1)
        if is_plain(self.conv1d, _CONVS):
            x, conv_final = ops.causal_conv1d(
                x,
                self.conv1d.weight.squeeze(1),
                self.conv1d.bias,
                activation="silu",
                initial_states=conv_states,
                seq_idx=seq_idx,
                cu_seqlens=cu_seqlens,
                return_final_states=True,
            )
        else:
            convolved, conv_final = convolve_with_module(
                self.conv1d, self.d_conv, x, conv_states, seq_idx, cu_seqlens
            )
            x = F.silu(convolved)
        projected = self.x_proj(x.transpose(1, 2))
        dt, B, C = projected.split((self.dt_rank, self.d_state, self.d_state), dim=-1)
        out, ssm_final = ops.selective_scan(
            x,
            self.dt_proj(dt).transpose(1, 2),
            self._A(),
            B.transpose(1, 2),
            C.transpose(1, 2),
            D=self.D,
            z=z,
            dt_softplus=True,
            initial_states=ssm_states,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_final_states=True,
        )
        out = self.out_proj(out.transpose(1, 2))
        if seq_idx is not None:
            # A bias of the projection would otherwise give padding an output.
            out = torch.where((seq_idx < 0).unsqueeze(-1), 0.0, out)
        return out, conv_final, ssm_final
