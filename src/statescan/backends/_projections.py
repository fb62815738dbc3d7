# SPDX-License-Identifier: Apache-2.0
"""Products of activations (batch, features, seqlen) with weights, and the gradients of these.

Only matrix products: which projections a block has is said by ``_mamba_inner.py``. They write into
given memory, in a form that autocast leaves alone.

Elsewhere than on the CPU all rows are one product of batches: row by row, launches alone took a
good part of a training step of 130M parameters on an H200, and float32 products of weight gradients
more (85,000 tokens/s against 169,000). The device sums half-precision products in float32, and the
result stays so where torch offers it (from 2.8 on).

On the CPU rows and columns of a product are filled up to multiples of 16: otherwise the BLAS behind
torch cuts a matrix between its threads in the middle of a tile, and the bits of the result
depend on how many there are (torch 2.13, MKL: 40 % of odd sizes; none of 700 multiples of 16).
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 16
# Tokens in one product of a weight gradient: bounds the float32 copies of half-precision tokens.
_TOKENS = 2048
_ROW_BY_ROW = frozenset(("cpu",))
# Numbers of the products of some rows that are added up at a time.
_MOST_PARTIAL = 1 << 24
_HALF = frozenset((torch.bfloat16, torch.float16))
# bmm of half-precision numbers with a float32 result.
_wide_bmm = getattr(torch.ops.aten.bmm, "dtype_out", None)


def project(weight: Tensor, tokens: Tensor, target: Tensor, *, add: bool = False) -> None:
    """Write weight @ tokens of every row, or add it to what ``target`` holds.

    Args:
        weight: (features, inputs).
        tokens: (batch, inputs, seqlen), any strides.
        target: (batch, features, seqlen), any strides, of the same dtype.
        add: Add to the target.
    """
    if target.device.type not in _ROW_BY_ROW:
        _project_at_once(weight.to(target.dtype), tokens, _ordinary(target), add)
        return
    features, seqlen = target.shape[1:]
    weight = _fill(weight.to(target.dtype), 0)
    exact = weight.shape[0] == features and seqlen % _tile(tokens) == 0
    for row, result in zip(tokens.unbind(0), target.unbind(0)):
        if not exact:
            product = weight.new_empty(weight.shape[0], _filled(seqlen, weight))
            torch.mm(weight, _fill(row, 1), out=product)
            product = product[:features, :seqlen]
            result.copy_(result + product if add else product)
        elif add:
            result.addmm_(weight, row)
        else:
            torch.mm(weight, row, out=result)


def weight_gradient(dtarget: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient (features, inputs) of the weight of ``project``, summed in ``dtype``.

    Args:
        dtarget: (batch, features, seqlen), gradient of the target.
        tokens: (batch, inputs, seqlen).
        dtype: float32 or float64.
    """
    if tokens.device.type not in _ROW_BY_ROW:
        return _weight_gradient_at_once(dtarget, tokens, dtype)
    features, inputs = dtarget.shape[1], tokens.shape[1]
    total = torch.zeros(
        _filled(features, tokens), _filled(inputs, tokens), dtype=dtype, device=tokens.device
    )
    for drow, row in zip(dtarget.unbind(0), tokens.unbind(0)):
        for dpart, part in zip(drow.split(_TOKENS, 1), row.split(_TOKENS, 1)):
            total.addmm_(_fill(dpart.to(dtype), 0), _fill(part.to(dtype), 0).t())
    return total[:features, :inputs]


def bias_gradient(dtarget: Tensor, dtype: torch.dtype) -> Tensor:
    """(features,) sum of (batch, features, seqlen) over rows and tokens, in ``dtype``."""
    if dtarget.device.type not in _ROW_BY_ROW:
        return dtarget.sum((0, 2), dtype=dtype)
    total = torch.zeros(dtarget.shape[1], dtype=dtype, device=dtarget.device)
    for drow in dtarget.unbind(0):
        # Short sums are never shared between threads, whose number would order them.
        for dpart in drow.split(_TOKENS, 1):
            total += dpart.sum(1, dtype=dtype)
    return total


def _project_at_once(weight: Tensor, tokens: Tensor, target: Tensor, add: bool) -> None:
    if tokens.shape[1] == 0 or target.numel() == 0:
        # Sums of nothing, and products that some BLAS refuse.
        if not add:
            target.zero_()
        return
    weights = weight.expand(tokens.shape[0], *weight.shape)
    if add:
        torch.baddbmm(target, weights, tokens, out=target)
    else:
        torch.bmm(weights, tokens, out=target)


def _weight_gradient_at_once(dtarget: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    batch, features, inputs = dtarget.shape[0], dtarget.shape[1], tokens.shape[1]
    total = torch.zeros(features, inputs, dtype=dtype, device=tokens.device)
    if tokens.numel() == 0 or features == 0:
        return total
    rows = max(1, _MOST_PARTIAL // (features * inputs))
    wide = _wide_bmm is not None and tokens.is_cuda and tokens.dtype in _HALF
    for first in range(0, batch, rows):
        drows = dtarget[first : first + rows]
        columns = tokens[first : first + rows].transpose(1, 2)
        shape = (drows.shape[0], features, inputs)
        parts = drows.new_empty(shape, dtype=torch.float32 if wide else None)
        if wide:
            assert _wide_bmm is not None
            _wide_bmm(drows, columns, torch.float32, out=parts)
        else:
            torch.bmm(drows, columns, out=parts)
        total += parts.sum(0, dtype=dtype)
    return total


def _ordinary(target: Tensor) -> Tensor:
    """The same memory, the one feature of a target with one far enough from the next.

    Any stride is right where there is one, but torch hands it on, and cuBLASLt refuses a leading
    dimension below the other size (torch 2.11, CUDA 13.0).
    """
    if target.shape[1] != 1:
        return target
    stride = target.stride(2)
    return target.as_strided(target.shape, (target.stride(0), stride * target.shape[2], stride))


def _tile(tensor: Tensor) -> int:
    return _TILE if tensor.device.type == "cpu" else 1


def _filled(size: int, like: Tensor) -> int:
    """``size`` rounded up to whole tiles."""
    tile = _tile(like)
    return (size + tile - 1) // tile * tile


def _fill(matrix: Tensor, axis: int) -> Tensor:
    """The matrix with zeros appended along ``axis`` up to whole tiles."""
    missing = _filled(matrix.shape[axis], matrix) - matrix.shape[axis]
    if missing == 0:
        return matrix
    rows, columns = matrix.shape
    zeros = matrix.new_zeros((missing, columns) if axis == 0 else (rows, missing))
    # Not F.pad: that of torch 2.4 refuses an empty matrix.
    return torch.cat((matrix, zeros), axis)
