# SPDX-License-Identifier: Apache-2.0
"""Ways in which the same numbers can lie in memory, surrounded by NaN where there is a gap.

Only placement: no numbers are drawn here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

LAYOUTS = (
    *("contiguous", "channel_last", "every_other", "offset_1", "offset_3", "slice_of_wide"),
    *("axes_reversed", "equal_batch", "equal_channels", "equal_tokens", "one_number"),
)
DISTINCT = tuple(name for name in LAYOUTS if not name.startswith(("equal", "one")))
"""Those in which every element has memory of its own and keeps its value."""

_EQUAL = {"equal_batch": (0,), "equal_channels": (1,), "equal_tokens": (-1,)}


def lay_out(value: Any, layout: str) -> Any:
    """A tensor with the values of ``value`` (of its first entries for the equal_ layouts)."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if layout in _EQUAL or layout == "one_number":
        axes = _EQUAL.get(layout, tuple(range(value.dim())))
        for axis in axes:
            if axis < value.dim() and value.shape[axis] > 0:
                shape = value.shape
                value = value.narrow(axis, 0, 1).expand(shape)
        return value
    if layout == "channel_last":
        if value.dim() < 3:
            return value.t().contiguous().t() if value.dim() == 2 else value.clone()
        return value.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "axes_reversed":
        backwards = tuple(range(value.dim()))[::-1]
        return value.permute(backwards).contiguous().permute(backwards)
    return _in_parent(value, layout)


def _in_parent(value: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of a larger tensor whose other elements are NaN."""
    *lead, last = value.shape
    if layout == "every_other":
        parent = _nan(value, [2 * size + 3 for size in value.shape])
        view = parent[tuple(slice(1, 1 + 2 * size, 2) for size in value.shape)]
    elif layout.startswith("offset"):
        offset = int(layout.removeprefix("offset_"))
        view = _nan(value, [value.numel() + offset])[offset:].view(value.shape)
    elif layout == "slice_of_wide":
        view = _nan(value, [*lead, last + 5])[..., 3 : 3 + last]
    else:
        view = _nan(value, value.shape)
    return view.copy_(value)


def _nan(like: torch.Tensor, shape: Any) -> torch.Tensor:
    return torch.full(tuple(shape), math.nan, dtype=like.dtype)
