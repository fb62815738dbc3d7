# SPDX-License-Identifier: Apache-2.0
"""The norms without weights that Falcon-Mamba's mixers put on dt, B and C.

They stand behind ``x_proj``, so that any mixer takes them without knowing; no other norm here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan.nn import Mamba


class NormedProjection(nn.Linear):
    """A mixer's ``x_proj`` whose three parts are each divided by their root mean square.

    Since it is no plain linear layer, mixers call it as a module, in the slower of their two ways.

    Args:
        in_features: Channels of the mixer.
        parts: dt_rank, d_state, d_state.
        eps: Added to the mean square.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, int, int],
        eps: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts), bias=False, device=device, dtype=dtype)
        self.parts, self.eps = parts, eps

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name torch.nn.Linear uses
        """dt, B and C (..., dt_rank + 2 d_state), computed in float32, in the input's dtype."""
        projected = super().forward(input)
        wide = projected if projected.dtype == torch.float64 else projected.float()
        normed = [F.rms_norm(part, (part.shape[-1],), None, self.eps)
                  for part in wide.split(self.parts, dim=-1)]  # fmt: skip
        return torch.cat(normed, dim=-1).to(projected.dtype)


def add_mixer_norms(mixer: nn.Module, eps: float) -> None:
    """Replace ``mixer.x_proj`` by one with norms and the same weight, in place."""
    if not isinstance(mixer, Mamba):
        raise TypeError(f"only nn.Mamba has dt, B and C to norm, not {type(mixer).__name__}")
    plain = mixer.x_proj
    parts = (mixer.dt_rank, mixer.d_state, mixer.d_state)
    normed = NormedProjection(mixer.d_inner, parts, eps, device="meta", dtype=plain.weight.dtype)
    normed.weight = plain.weight
    mixer.x_proj = normed
