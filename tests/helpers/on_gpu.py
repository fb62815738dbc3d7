# SPDX-License-Identifier: Apache-2.0
"""Calls an op with its arguments moved to a GPU, every stride, offset and overlap kept.

So that a test which makes its tensors on the CPU judges a GPU's kernels unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from statescan.errors import BackendUnavailableError

WRITTEN = ("ssm_state", "conv_state", "intermediate_states", "out")
LARGEST = 2**30
"""Bytes of one storage; what lies wider apart has tests of its own."""


def skip_if_documented(reason: BackendUnavailableError) -> None:
    """Skip the test where kernels for GPUs are not meant to run a call: float64 and complex.

    Any other refusal is a failure: a suite that skips everything must not pass.
    """
    if "float64" in str(reason) or "complex" in str(reason):
        pytest.skip(str(reason))


class Mover:
    """Moves tensors to one device; those that share a storage share one there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor there, differentiably."""
        return _Moved.apply(tensor, self)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place in a copy of the whole storage."""
        old = tensor.untyped_storage()
        if old.nbytes() > LARGEST:
            pytest.skip(f"{old.nbytes() >> 20} MiB apart: tests/gpu/test_large.py has these")
        if old.data_ptr() not in self._storages:
            # The old one is kept, or another could come to lie where it was.
            self._storages[old.data_ptr()] = (old, _copied(old, self.device))
        there = self._storages[old.data_ptr()][1]
        empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mover: Mover) -> torch.Tensor:
        ctx.home = str(tensor.device)
        # A conjugate or negative that is only marked as one has no bits of its own to move.
        return mover.move(tensor.detach().resolve_conj().resolve_neg())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Mover(ctx.home).move(gradient.resolve_conj().resolve_neg()), None


def _copied(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    # Not .to(): on the same device that would be the same storage.
    return torch.empty_like(data, device=device).copy_(data).untyped_storage()


def moved(function: Callable[..., Any], device: str = "cuda") -> Callable[..., Any]:
    """The public function of an op, its tensors on ``device`` and its results back home.

    What it writes in place is copied back.
    """

    def call(*given: Any, **kwargs: Any) -> Any:
        mover = Mover(device)
        there = [mover(v) if isinstance(v, torch.Tensor) else v for v in given]
        named = {n: mover(v) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
        try:
            results = function(*there, **named)
        except BackendUnavailableError as reason:
            skip_if_documented(reason)
            raise
        for name in WRITTEN:
            home = kwargs.get(name)
            if home is not None and home.numel():
                home.copy_(named[name])
        if kwargs.get("out") is not None:
            return kwargs["out"]
        back = Mover("cpu")
        return tuple(map(back, results)) if isinstance(results, tuple) else back(results)

    return call
