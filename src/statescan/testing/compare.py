# SPDX-License-Identifier: Apache-2.0
"""The error metric, and assertions that show the worst element with both values.

Running cases is in `runner.py`, allowed errors are in `tolerances.py`; no numbers are set here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """How far one result is from the truth.

    Attributes:
        name: out, final_states, ... or d<argument> for a gradient.
        error: See `error`; infinite where shape, dtype or the places of NaN differ.
        tolerance: What is allowed.
        detail: The worst element in words.
    """

    name: str
    error: float
    tolerance: float
    detail: str

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    @property
    def severity(self) -> float:
        """The error in units of what is allowed, to rank comparisons."""
        return self.error / self.tolerance if self.tolerance else self.error


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The larger of ||result - exact|| / ||exact|| and max |result - exact| / max |exact|.

    Absolute where exact is all zero; 0 for empty tensors. NaN or infinity that is not the same
    on both sides makes the error infinite.
    """
    difference = _difference(result, exact)
    if difference.numel() == 0:
        return 0.0
    if not difference.isfinite().all():
        return math.inf
    magnitude = torch.nan_to_num(_double(exact).abs(), nan=0.0, posinf=0.0)
    largest = float(magnitude.max())
    if largest == 0.0:
        return float(difference.max())
    norm_error = float(difference.norm()) / float(magnitude.norm())
    return max(norm_error, float(difference.max()) / largest)


def compare(name: str, result: torch.Tensor, exact: torch.Tensor, tolerance: float) -> Comparison:
    """Judge one result."""
    if result.shape != exact.shape:
        detail = f"got shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
        return Comparison(name, math.inf, tolerance, detail)
    return Comparison(name, error(result, exact), tolerance, _describe(result, exact))


def identical(name: str, result: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Judge a result that must have the expected bits, NaN counting as equal to NaN."""
    same = (result == expected) | (result.isnan() & expected.isnan())
    return Comparison(name, 0.0 if same.all() else math.inf, 0.0, _describe(result, expected))


def assert_close(
    result: torch.Tensor, exact: torch.Tensor, tolerance: float, name: str = "result"
) -> None:
    """Raise AssertionError with the worst element unless the error is within the tolerance."""
    assert_passed([compare(name, result, exact, tolerance)])


def assert_passed(comparisons: Sequence[Comparison], title: str = "") -> None:
    """Raise AssertionError that lists every comparison that failed."""
    lines = [title] if title else []
    for item in comparisons:
        if not item.passed:
            lines.append(
                f"{item.name}: error {item.error:.3g} > {item.tolerance:.3g}; {item.detail}"
            )
    if not all(item.passed for item in comparisons):
        raise AssertionError("\n".join(lines))


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU in float64 or complex128."""
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _difference(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|result - exact| in float64, 0 where both are the same infinity or both NaN."""
    result, exact = _double(result), _double(exact)
    same = (result == exact) | (result.isnan() & exact.isnan())
    return torch.where(same, 0.0, (result - exact).abs())


def _describe(result: torch.Tensor, exact: torch.Tensor) -> str:
    """The coordinates of the worst element with both values, and how many are NaN."""
    difference = _difference(result, exact)
    if difference.numel() == 0:
        return "no elements"
    flat = torch.nan_to_num(difference, nan=math.inf).reshape(-1)
    where = tuple(int(i) for i in torch.unravel_index(flat.argmax(), difference.shape))
    return (
        f"worst at {where}: got {result[where].item()!r}, expected {exact[where].item()!r}; "
        f"{int(result.isnan().sum())} of {result.numel()} are NaN"
    )
