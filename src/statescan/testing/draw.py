# SPDX-License-Identifier: Apache-2.0
"""Draws the tensors of a case from one seeded generator, and lays them out.

Which tensors an op takes is said in `inputs.py`.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from statescan.testing.cases import Case


def place(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor's values in another layout; see `Case.layout`."""
    if layout == "strided":
        parent = tensor.new_full([2 * size + 3 for size in tensor.shape], math.nan)
        view = parent[tuple(slice(1, 1 + 2 * size, 2) for size in tensor.shape)]
        return view.copy_(tensor)
    if layout == "expanded" and tensor.dim() > 2:
        return tensor[:1].expand(tensor.shape)
    if layout == "channel_last" and tensor.dim() > 2:
        return tensor.movedim(-1, 1).contiguous().movedim(1, -1)
    return tensor.contiguous()


class Source:
    """Draws tensors for one case; every draw advances one generator."""

    def __init__(
        self, case: Case, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        mixed = torch.bfloat16 if dtype in (torch.float32, torch.float64) else torch.float32
        self.parameter_dtype = mixed if case.has("mixed") else self.wide
        self.weight_dtype = mixed if case.has("mixed") else dtype
        self.generator = torch.Generator().manual_seed(seed + zlib.crc32(str(case).encode()))

    def size(self, *names: str) -> tuple[int, ...]:
        return tuple(self.case.sizes[name] for name in names)

    def groups(self, name: str) -> tuple[int, ...]:
        """The group axis of B or C, if it has one."""
        sizes = self.case.sizes
        ngroups = sizes.get(f"ngroups_of_{name}", sizes.get("ngroups"))
        return () if ngroups is None else (ngroups,)

    def normal(self, *shape: int, is_complex: bool = False) -> torch.Tensor:
        dtype = torch.complex128 if is_complex else torch.float64
        return torch.randn(shape, dtype=dtype, generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        drawn = torch.rand(shape, dtype=torch.float64, generator=self.generator)
        return low + (high - low) * drawn

    def finish(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Round to a dtype (its complex partner for complex values), move, lay out."""
        if tensor.is_complex():
            # complex32 has no arithmetic: half-precision cases carry complex64.
            double = dtype in (torch.float64, torch.complex128)
            dtype = torch.complex128 if double else torch.complex64
        return place(tensor.to(dtype).to(self.device), self.case.layout)

    def optional(self, flag: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The tensor if the case has the flag. It is drawn either way, so flags change no other."""
        return self.finish(tensor, dtype) if self.case.has(flag) else None

    def integers(self, values: tuple[int, ...] | None) -> torch.Tensor | None:
        if values is None:
            return None
        return self.index(values[: self.case.sizes["batch"]])

    def index(self, values: Sequence[Any]) -> torch.Tensor:
        dtype = torch.int64 if self.case.has("int64") else torch.int32
        return torch.tensor(values, dtype=dtype).to(self.device)

    def decay_rates(self, *channels: int) -> torch.Tensor:
        """Decay rates between -1 and about -dstate, as initialised; complex ones also rotate."""
        dstate = self.case.sizes["dstate"]
        rates = -torch.arange(1, dstate + 1) * self.uniform(0.8, 1.2, *channels, dstate)
        return torch.complex(rates / 2, -rates) if self.case.has("complex") else rates

    def dt(self, *shape: int) -> torch.Tensor:
        """Standard normal before a softplus; else positive, of the size that training reaches."""
        if self.case.has("dt_softplus"):
            return self.normal(*shape)
        return self.uniform(0.05, 0.5, *shape)

    def dt_bias(self, *channels: int) -> torch.Tensor:
        """Such that softplus of it lies between 0.01 and 0.3; small where no softplus follows."""
        if not self.case.has("dt_softplus"):
            return self.uniform(0.0, 0.2, *channels)
        step = torch.exp(self.uniform(math.log(0.01), math.log(0.3), *channels))
        return torch.log(torch.expm1(step))

    def packing(self) -> dict[str, Any]:
        """seq_idx and cu_seqlens."""
        runs, bounds = self.case.runs, self.case.bounds
        kwargs: dict[str, Any] = {}
        if runs is not None:
            rows = [[idx for idx, count in row for _ in range(count)] for row in runs]
            kwargs["seq_idx"] = self.index(rows)
        if bounds is not None:
            kwargs["cu_seqlens"] = self.index(bounds)
        return kwargs

    def poison(self, tensor: torch.Tensor) -> torch.Tensor:
        """NaN in the padding tokens (batch, ..., seqlen) of a tensor."""
        if self.case.runs is None:
            return tensor
        seq_idx = self.packing()["seq_idx"].cpu()
        pad = (seq_idx < 0).reshape(seq_idx.shape[0], *[1] * (tensor.dim() - 2), -1)
        return torch.where(pad, math.nan, tensor)

    def num_states(self) -> int:
        bounds = self.case.bounds
        return self.case.sizes["batch"] if bounds is None else len(bounds) - 1
