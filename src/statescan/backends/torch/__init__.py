# SPDX-License-Identifier: Apache-2.0
"""The torch backend: every op in vectorised PyTorch, on any device; what others fall back to.

Only the description of the backend is here; the ops are in the modules beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from statescan.backends.base import ALL_OPS, YES, Backend, Support


class TorchBackend(Backend):
    """Runs wherever torch runs, with every dtype and option; never refuses a valid call."""

    name = "torch"
    modules: Mapping[str, str] = ALL_OPS

    def availability(self) -> Support:
        """Always: torch is the one hard dependency."""
        return YES
