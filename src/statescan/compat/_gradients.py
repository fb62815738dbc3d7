# SPDX-License-Identifier: Apache-2.0
"""Decode steps in programs that leave grad mode on, as the originals allow them.

The originals cut the graph there without a word; here it is said once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_told: set[str] = set()


def without_graph(name: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as values, so that a step whose result carries no gradient may run.

    Warns once for each op when a gradient is lost by that.
    """
    if not torch.is_grad_enabled():
        return tensors
    wanting = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if wanting and name not in _told and not torch.compiler.is_compiling():
        _told.add(name)
        warnings.warn(
            f"{name}: an input requires grad, and a decode step has no gradient, here as in the "
            "original; the result is cut off the graph. Run it under torch.no_grad().",
            stacklevel=3,
        )
    return tuple(None if tensor is None else tensor.detach() for tensor in tensors)
