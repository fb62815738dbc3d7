# SPDX-License-Identifier: Apache-2.0
"""Tells for each model family of transformers whether it runs on statescan, and why not.

transformers decides; its rules differ by version and are read here, never changed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from statescan.compat.aliases import installed
from statescan.errors import MissingExtraError

_SCAN = ("causal_conv1d_fn", "causal_conv1d_update", "selective_scan_fn", "selective_state_update")
_CONV = ("causal_conv1d_fn", "causal_conv1d_update")
_SSD = (
    *(*_CONV, "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "selective_state_update",
)

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "mamba": (*_SCAN, "mamba_inner_fn"),
    "falcon_mamba": (*_SCAN, "mamba_inner_fn"),
    "jamba": _SCAN,
    "zamba": _SCAN,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "qwen3_next": _CONV,
    **dict.fromkeys(
        ("mamba2", "bamba", "zamba2", "nemotron_h", "granitemoehybrid", "falcon_h1"), _SSD
    ),
}
"""Functions that each family takes from the served packages."""

_MAMBA_2 = ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")


@dataclass(frozen=True)
class FamilyStatus:
    """Whether a family runs on statescan.

    Attributes:
        family: Name of the model folder in transformers.
        on: Whether its calls reach statescan on ``device``.
        reason: Why, in one line.
        functions: Where each function comes from, as far as the modeling module is imported.
    """

    family: str
    on: bool
    reason: str
    functions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family:18} {'on ' if self.on else 'off'}  {self.reason}"


def status(device: str = "cpu") -> list[FamilyStatus]:
    """Every known family of the installed transformers, for models on ``device``.

    Args:
        device: "cpu" or "cuda": some versions use the packages on CUDA only.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError(
            "statescan.compat.transformers needs transformers, which is not installed: "
            "pip install transformers"
        ) from error
    return [_family(name, version, device) for name in FAMILIES if _exists(name)]


def _exists(family: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(f"transformers.models.{family}") is not None
    except ModuleNotFoundError:
        return False


def _family(family: str, version: str, device: str) -> FamilyStatus:
    module = sys.modules.get(f"transformers.models.{family}.modeling_{family}")
    functions = {} if module is None else _functions_of(module)
    decide = _decided_at_import if _release(version) >= (5, 20) else _decided_by_device
    on, reason = decide(family, version, device, functions)
    return FamilyStatus(family, on, reason, functions)


def _decided_at_import(
    family: str, version: str, device: str, functions: Mapping[str, str]
) -> tuple[bool, str]:
    """transformers 5.2x: each function is looked for when the modeling module is imported."""
    if functions:
        own = [name for name, place in functions.items() if place.startswith("statescan.")]
        if any(name in own for name in _MAMBA_2):
            return False, _mamba_2(family)
        if own:
            return True, f"transformers {version} found {', '.join(sorted(own))} here"
        return False, (
            f"its module was imported before install(): transformers {version} looks once; "
            "call statescan.compat.install() first"
        )
    if not installed():
        return False, "the names are not served: call statescan.compat.install() first"
    if any(name in FAMILIES[family] for name in _MAMBA_2):
        return False, _mamba_2(family)
    return True, f"transformers {version} will find the functions when the model is imported"


def _decided_by_device(
    family: str, version: str, device: str, functions: Mapping[str, str]
) -> tuple[bool, str]:
    """transformers 4.57 and 5.0: CUDA must be there, and the model on it."""
    if not device.startswith("cuda"):
        return False, (
            f"transformers {version} takes these packages for models on CUDA only, by its own "
            "test; transformers 5.24 takes them on a CPU too"
        )
    if any(name in FAMILIES[family] for name in _MAMBA_2):
        return False, _mamba_2(family)
    if not installed():
        return False, "the names are not served: call statescan.compat.install() first"
    if not _cuda_available():
        return False, f"transformers {version} asks for CUDA, and torch sees no CUDA device"
    late = [name for name, place in functions.items() if not place.startswith("statescan.")]
    if late:
        return False, "its module was imported before install(), which it does not look for again"
    return True, f"transformers {version} finds the packages, and the model is on CUDA"


def _mamba_2(family: str) -> str:
    return (
        f"{family} is a Mamba-2 family, whose scan statescan does not serve: uninstall() the "
        "names before importing it"
    )


def _functions_of(module: Any) -> dict[str, str]:
    """Module that defines each function which ``module`` took from a package, or its own."""
    found = {}
    wanted = {name for names in FAMILIES.values() for name in names}
    for value in list(vars(module).values()):
        name, place = _origin(value)
        if name in wanted:
            found[name] = place
    return found


def _origin(value: Any) -> tuple[str, str]:
    """Name and module of a function, seen through the wrapper that transformers puts around it."""
    if not callable(value) or not hasattr(value, "__code__"):
        return "", ""
    inside = _closure(value)
    if "implementation" in inside and "func_name" in inside:
        return str(inside["func_name"]), str(inside["implementation"].__module__)
    return str(value.__name__), str(value.__module__)


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells)}


def _release(version: str) -> tuple[int, int]:
    numbers = [int(part) if part.isdigit() else 0 for part in version.split(".")[:2]]
    return numbers[0], numbers[1] if len(numbers) > 1 else 0


def _cuda_available() -> bool:
    import torch

    return bool(torch.cuda.is_available())
