# SPDX-License-Identifier: Apache-2.0
"""Addresses, strides and number formats of tensors as the fields of parameter structs want them.

Nothing that knows an op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of number formats that kernels look at while they run (``load_any``)."""

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""How instances are called by their format."""


def address(tensor: Tensor | None) -> int:
    """Where a tensor's first element lies; 0 when it is not given."""
    return 0 if tensor is None else tensor.data_ptr()


def strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    """A tensor's strides, zeros when it is not given."""
    return (0,) * axes if tensor is None else tensor.stride()


def dtype(tensor: Tensor | None) -> int:
    """A tensor's number format, 0 when it is not given."""
    return 0 if tensor is None else DTYPES[tensor.dtype]


def aligned(tensor: Tensor, elements: int, axes: Sequence[int]) -> bool:
    """Whether every index along ``axes`` leads to an address of ``elements`` elements' alignment.

    At most to 16 bytes, the largest vector there is.
    """
    size = tensor.element_size()
    unit = min(elements * size, 16)
    if tensor.data_ptr() % unit:
        return False
    shape, steps = tensor.shape, tensor.stride()
    return all(shape[axis] < 2 or steps[axis] * size % unit == 0 for axis in axes)
