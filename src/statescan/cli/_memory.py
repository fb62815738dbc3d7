# SPDX-License-Identifier: Apache-2.0
"""Peak memory of this process, as the operating system counts it.

Meant for a fresh process: what was freed before the start would hide growth.
"""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakGrowth:
    """Bytes by which the peak rises above what is in use at the moment of construction."""

    def __init__(self) -> None:
        self._resettable = _reset_peak()
        peak = _status_bytes("VmRSS") if self._resettable else peak_bytes()
        self._before = peak

    def read(self) -> int | None:
        """The growth so far; None where the system does not tell.

        Where the peak cannot be set back it is a lower bound: the rise of the all-time peak.
        """
        after = _status_bytes("VmHWM") if self._resettable else peak_bytes()
        if after is None or self._before is None:
            return None
        return max(0, after - self._before)


def peak_bytes() -> int | None:
    """Largest resident size so far; None on systems without getrusage."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak() -> bool:
    """Set VmHWM back to the current size; Linux only, and not in every container."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _status_bytes("VmHWM") is not None


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None
