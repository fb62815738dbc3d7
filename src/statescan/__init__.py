# SPDX-License-Identifier: Apache-2.0
"""statescan: Mamba's kernels and models, bound to no torch, no Python and no CUDA runtime.

Names are loaded at first use, so that ``import statescan`` alone loads no torch. The ops are
registered with torch at once if it is loaded, else as soon as it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from statescan._after_import import after_import

__version__ = "0.1.0"

_EXPORTS = {
    "causal_conv1d": "statescan.ops",
    "causal_conv1d_update": "statescan.ops",
    "explain": "statescan.ops",
    "mamba_inner": "statescan.ops",
    "prepare": "statescan.ops",
    "selective_scan": "statescan.ops",
    "selective_state_update": "statescan.ops",
    "use_backend": "statescan.dispatch",
}
_SUBMODULES = (
    *("dispatch", "errors", "generation", "models", "nn"),
    *("ops", "reference", "testing", "training"),
)

__all__ = ["__version__", *_EXPORTS, *_SUBMODULES]

if TYPE_CHECKING:
    from statescan import (
        dispatch,
        errors,
        generation,
        models,
        nn,
        ops,
        reference,
        testing,
        training,
    )
    from statescan.dispatch import use_backend
    from statescan.ops import explain, prepare
    from statescan.ops.causal_conv1d import causal_conv1d
    from statescan.ops.causal_conv1d_update import causal_conv1d_update
    from statescan.ops.mamba_inner import mamba_inner
    from statescan.ops.selective_scan import selective_scan
    from statescan.ops.selective_state_update import selective_state_update


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
    elif name in _SUBMODULES:
        value = import_module(f"statescan.{name}")
    else:
        raise AttributeError(f"module 'statescan' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Now if torch is loaded, else right after it: torch.export.load looks ops up by name and has no
# other way to find them, and sorted imports put statescan before torch.
after_import("torch", lambda: import_module("statescan.ops"))
