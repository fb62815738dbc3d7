# SPDX-License-Identifier: Apache-2.0
"""Tensors that span far more memory than a machine has, of which only a little is ever touched.

They lie in sparse files, whose untouched pages cost neither memory nor disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def sparse(folder: Path, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of ``size`` zeros."""
    path = folder / f"sparse_{len(list(folder.iterdir()))}"
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


def spread(folder: Path, tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The values of ``tensor`` in a view of these strides (in elements)."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    memory = sparse(folder, reach + 1, tensor.dtype)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)
