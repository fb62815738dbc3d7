# SPDX-License-Identifier: Apache-2.0
"""The reference backend: every op token by token in plain torch, to compare the others with.

Only the description of the backend is here; the formulas are in ``statescan.reference``.
"""

from __future__ import annotations

from collections.abc import Mapping

from statescan.backends.base import ALL_OPS, YES, Backend, Support


class ReferenceBackend(Backend):
    """Runs every valid call slowly; can be forced, is never chosen."""

    name = "reference"
    automatic = False
    modules: Mapping[str, str] = ALL_OPS

    def availability(self) -> Support:
        """Always: it needs nothing but torch."""
        return YES
