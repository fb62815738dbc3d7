# SPDX-License-Identifier: Apache-2.0
"""The one table of errors that a backend may have, and how it was measured.

A tolerance is a multiple of the error that the plain-torch reference has in the same dtype
against float64 on the same inputs (`compare.error`). Entries are never loosened for a backend:
when cases change, measure again with `python -m statescan.testing.measure`.
"""

import torch

_Row = dict[torch.dtype, tuple[float, float]]

_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16

PLAIN_ERRORS: dict[str, _Row] = {
    "selective_scan": {_F32: (6.3e-7, 2.0e-6), _BF16: (3.8e-3, 3.8e-3), _F16: (4.4e-4, 4.8e-4)},
    "selective_state_update": {_F32: (2.7e-7, 0.0), _BF16: (3.6e-3, 0.0), _F16: (4.6e-4, 0.0)},
    "causal_conv1d": {_F32: (2.1e-7, 6.9e-7), _BF16: (3.4e-3, 3.7e-3), _F16: (4.8e-4, 4.9e-4)},
    "causal_conv1d_update": {_F32: (2.2e-7, 0.0), _BF16: (3.6e-3, 0.0), _F16: (4.8e-4, 0.0)},
    "mamba_inner": {_F32: (8.1e-7, 5.7e-6), _BF16: (2.6e-2, 3.3e-2), _F16: (2.3e-3, 8.7e-3)},
}
"""Worst error of the reference over all cases and seeds 0 to 4, rounded up: (outputs, gradients).

Measured on one x86-64 CPU with torch 2.13.0. The updates have no gradients.
"""

MULTIPLES = {_F32: 4.0, _BF16: 2.0, _F16: 2.0}
"""In half precision the rounding of the result dominates, so there is less to differ in."""


def tolerance(
    op: str, dtype: torch.dtype, result_dtype: torch.dtype | None = None, *, gradient: bool = False
) -> float:
    """The error allowed for a result of `op` with activations of `dtype`.

    Args:
        op: The op's name.
        dtype: Dtype of the activations.
        result_dtype: Dtype of the result if it may be another, see `judged_dtype`.
        gradient: Whether the result is a gradient.
    """
    judged = judged_dtype(op, dtype, result_dtype or dtype)
    if judged == torch.float64:
        # Nothing more exact to measure float64 with: float32's error in units of its precision.
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return ratio * tolerance(op, torch.float32, gradient=gradient)
    return MULTIPLES[judged] * PLAIN_ERRORS[op][judged][1 if gradient else 0]


def judged_dtype(op: str, dtype: torch.dtype, result_dtype: torch.dtype) -> torch.dtype:
    """The dtype whose accuracy a result is held to.

    A float32 result (a state, the gradient of A) is held to float32 also when the activations
    have half precision, but not after the half-precision projections of mamba_inner.
    """
    result = result_dtype.to_real() if result_dtype.is_complex else result_dtype
    if op == "mamba_inner":
        return max(dtype, result, key=lambda kind: torch.finfo(kind).eps)
    return result
