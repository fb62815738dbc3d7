# SPDX-License-Identifier: Apache-2.0
"""Probes of statescan itself that need nothing loaded: its version.

Its C library, its backends and a computation are asked of a child process, in ``children``.
"""

from __future__ import annotations

import statescan
from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.probe import probe


@probe("statescan.version", source="statescan.__version__")
def version(machine: Machine) -> str:
    """The version that is running."""
    return statescan.__version__
