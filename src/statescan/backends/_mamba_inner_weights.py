# SPDX-License-Identifier: Apache-2.0
"""From the projected x_dbl of mamba_inner to the scan's B and C, and the gradients back.

dt and the projections themselves belong in ``_mamba_inner.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from statescan.backends._projections import bias_gradient
from statescan.backends._rms_norm import rms_norm, rms_norm_gradient


class Part(NamedTuple):
    """The columns of x_dbl (batch, seqlen, ...) that become B or C, and what is done to them.

    With complex weights the columns are real and imaginary parts in turn, and bias and norm act
    on them as they stand. ``dtype`` is that of the arithmetic.
    """

    columns: slice
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_eps: float
    is_complex: bool
    dtype: torch.dtype

    def load(self, x_dbl: Tensor) -> Tensor:
        """The scan's (batch, 1, dstate, seqlen) weights."""
        columns = x_dbl[..., self.columns]
        if self.bias is not None or self.norm_weight is not None or self.is_complex:
            columns = self._biased(x_dbl)
        if self.norm_weight is not None:
            columns = rms_norm(columns, self.norm_weight, self.norm_eps, -1)
        if self.is_complex:
            columns = torch.complex(columns[..., 0::2], columns[..., 1::2])
        return columns.transpose(1, 2).unsqueeze(1)

    def gradients(
        self, dweights: Tensor, x_dbl: Tensor, dx_dbl: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write the columns of ``dx_dbl``; return the gradients of the bias and the norm's weight.

        Args:
            dweights: (batch, 1, dstate, seqlen), gradient of what ``load`` gave.
            x_dbl: As for ``load``.
            dx_dbl: Like x_dbl.
        """
        dcolumns = dweights.squeeze(1).transpose(1, 2)
        if self.is_complex:
            dcolumns = torch.view_as_real(dcolumns.resolve_conj()).flatten(2)
        dbias = dnorm = None
        if self.norm_weight is not None:
            columns = self._biased(x_dbl)
            dcolumns, dnorm = rms_norm_gradient(
                dcolumns.to(self.dtype), columns, self.norm_weight, self.norm_eps, -1
            )
        if self.bias is not None:
            dbias = bias_gradient(dcolumns.transpose(1, 2), self.dtype)
        dx_dbl[..., self.columns] = dcolumns
        return dbias, dnorm

    def _biased(self, x_dbl: Tensor) -> Tensor:
        columns = x_dbl[..., self.columns].to(self.dtype)
        return columns if self.bias is None else columns + self.bias.to(self.dtype)
