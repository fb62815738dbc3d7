# SPDX-License-Identifier: Apache-2.0
"""Names of mamba_ssm and causal_conv1d, served by statescan: plain functions and thin modules.

Arithmetic stays in ``ops`` and ``nn``: here arguments are renamed and defaults of others kept.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statescan.compat.aliases import Installed, install, installed, uninstall

__all__ = ["Installed", "install", "installed", "uninstall"]


def __getattr__(name: str) -> Any:
    """Loaded at first use: ``install()`` needs no torch until a served name is imported."""
    if name in __all__:
        value = getattr(import_module("statescan.compat.aliases"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
