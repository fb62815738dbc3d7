# SPDX-License-Identifier: Apache-2.0
"""Keeps chosen parameters in float32 (or float64) whatever dtype their module is moved to.

No module is defined here, only the mixin that ``Mamba`` and its projections share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

_Self = TypeVar("_Self", bound="FullPrecisionMixin")

_WIDE = (torch.float32, torch.float64)


def full_precision_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """float64 for a float64 module, else float32: exp(A_log) and softplus(dt) need no less."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FullPrecisionMixin(nn.Module):
    """Parameters named in ``full_precision_names`` never become float16 or bfloat16.

    They also carry ``_no_weight_decay = True``, which plain copies of a parameter would lose.
    """

    full_precision_names: ClassVar[tuple[str, ...]] = ()

    def mark_full_precision(self) -> None:
        """Set the optimiser's hint on each of the named parameters."""
        for name in self.full_precision_names:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]
                parameter._no_reinit = True  # type: ignore[attr-defined]

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        """Let ``.to(dtype)``, ``.half()`` and the like change only these parameters' device."""
        kept = self._kept_tensors()

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not any(tensor is one for one in kept) or moved.dtype in _WIDE:
                return moved
            # The value is taken from before the cast: going through bfloat16 would round it.
            return tensor.to(device=moved.device)

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        self.mark_full_precision()
        return self

    def _kept_tensors(self) -> list[Tensor]:
        """The named parameters and their gradients, which must keep the parameters' dtype."""
        kept: list[Tensor] = []
        for name in self.full_precision_names:
            parameter = self._parameters.get(name)
            if parameter is not None:
                kept.append(parameter)
                if parameter.grad is not None:
                    kept.append(parameter.grad)
        return kept

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Widen half-precision entries first, so that ``assign=True`` keeps the rule too."""
        for name in self.full_precision_names:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in _WIDE:
                state_dict[prefix + name] = value.float()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.mark_full_precision()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the hints again after unpickling or deepcopy, which drops them."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark_full_precision()


def full_precision_parameters(module: nn.Module) -> set[str]:
    """Full names, as in ``state_dict()``, of all parameters below ``module`` that stay float32."""
    names: set[str] = set()
    for prefix, child in module.named_modules():
        if isinstance(child, FullPrecisionMixin):
            names.update(
                f"{prefix}.{name}" if prefix else name for name in child.full_precision_names
            )
    return names


class TimeStepProjection(FullPrecisionMixin, nn.Linear):
    """A Linear whose bias stays float32, and is added in float32, whatever the weight's dtype."""

    full_precision_names = ("bias",)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name torch.nn.Linear uses
        """dt (..., out_features) before softplus; float32 at least when the bias is present."""
        product = nn.functional.linear(input, self.weight)
        return product if self.bias is None else product + self.bias
