# SPDX-License-Identifier: Apache-2.0
"""The residual block around a mixer: add, then norm, then mix.

Neither the mixer's nor the norm's arithmetic belongs here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from statescan.nn.cache import InferenceCache, LayerCache
from statescan.nn.norm import RMSNorm


class Block(nn.Module):
    """Add → norm → mixer; the sum so far travels beside the hidden states, unnormalised.

    Args:
        dim: Width of the hidden states.
        mixer_cls: Called with ``dim``; makes the mixer.
        norm_cls: Called with ``dim``; makes the norm.
        residual_in_fp32: Keep the running sum in float32 even in a half-precision model.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = RMSNorm,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        cache: LayerCache | InferenceCache | None = None,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mixer's output and the sum that the next block adds it to.

        ``cache``, if given, is updated in place by the mixer.
        """
        dtype = hidden_states.dtype
        residual = hidden_states if residual is None else hidden_states + residual
        if self.residual_in_fp32 and residual.dtype.itemsize < 4:
            residual = residual.float()
        normed = self.norm(residual).to(dtype)
        mixed = self.mixer(normed, cache, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
        return mixed, residual

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int | None = None, dtype: object = None
    ) -> LayerCache:
        """The mixer's empty states for ``batch_size`` rows."""
        cache: LayerCache = self.mixer.allocate_inference_cache(  # type: ignore[operator]
            batch_size, max_seqlen, dtype
        )
        return cache
