# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel for a linear layer on a few vectors, such as the head of a decode step.

The algorithm is described in ``kernels/cpu/vector_linear.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from statescan.backends.cpu import abi, threads
from statescan.backends.cpu._workspace import floats

MOST_ROWS = 16
"""Vectors at a time: with more, a blocked matrix product reads the weights less often."""

_TASK_ROWS = 64


def matrix(weight: Tensor) -> tuple[int, ...] | None:
    """``struct statescan_matrix`` without its address; None for layouts that it cannot describe."""
    if weight.dtype not in abi.DTYPES or (weight.stride(1) != 1 and weight.shape[1] > 1):
        return None
    return (0, weight.stride(0), weight.shape[1], abi.DTYPES[weight.dtype])


def vector(bias: Tensor | None) -> tuple[int, ...]:
    """``struct statescan_tensor`` of a bias, without its address."""
    return abi.ABSENT if bias is None else (0, 0, bias.stride(0), 0, abi.DTYPES[bias.dtype])


def rows(tensor: Tensor) -> tuple[int, ...]:
    """``struct statescan_tensor`` of (batch, channels), without its address."""
    return (0, *tensor.stride(), 0, abi.DTYPES[tensor.dtype])


def vector_linear_plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Callable[[Sequence[Tensor]], None] | None:
    """A function of (x, weight, bias, out) for calls of this form; None if they are not offered.

    It is for one thread at a time: its workspace is its own.
    """
    weight_fields = matrix(weight)
    batch = x.shape[0]
    if weight_fields is None or not 0 < batch <= MOST_ROWS or 0 in weight.shape:
        return None
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    count = threads.workers()
    scratch_bytes = 4 * batch * (_TASK_ROWS + weight.shape[1])
    scratch_bytes = -(-scratch_bytes // 64) * 64
    scratch = torch.empty(count * scratch_bytes, dtype=torch.uint8, device="cpu")
    workspace = floats(*x.shape)
    form = abi.pack(
        "vector_linear",
        *(rows(x), rows(out), vector(bias), weight_fields),
        (count, scratch.data_ptr(), scratch_bytes),
        *(workspace.data_ptr(), batch, weight.shape[0]),
    )
    run = abi.kernel("vector_linear")
    kept = (scratch, workspace)
    listed = abi.address_list((x, out, weight, bias))

    def planned(tensors: Sequence[Tensor], _keep: tuple[Tensor, ...] = kept) -> None:
        x, *weights, out = tensors
        run(form, listed(x, out, *weights))

    return planned
