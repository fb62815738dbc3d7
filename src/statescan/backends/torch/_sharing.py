# SPDX-License-Identifier: Apache-2.0
"""Asks whether torch's threads are free, before many operations are shared with them.

Nothing here may change a result: callers get equal bits with and without sharing.

An operation of more than 32768 elements ends when the slowest of torch's threads is done. If
another process holds that thread's core, this takes a time slice of the system: 8 ms where
0.02 ms are usual (two cores, Linux, torch 2.13). A scan shares hundreds of small operations;
beside busy processes it took 8.6 s that way and 0.2 s on the calling thread alone.
"""

from __future__ import annotations

import time

import torch

# torch keeps operations up to this size on the calling thread (sums; others may have one more).
UNSHARED = (1 << 15) - 1

_PATIENCE_S = 1e-3
_RETRY_AFTER_S = 1.0


class Sharing:
    """Whether to share operations, decided anew before each chunk of a call until once refused.

    Attributes:
        on: Share. Without other threads, or on an accelerator, this costs nothing and is True.
    """

    _refused_until = 0.0

    def __init__(self, device: torch.device, elements: int) -> None:
        self._alone = torch.get_num_threads() == 1 or device.type != "cpu" or elements <= UNSHARED
        self.on = self._alone or (
            time.monotonic() >= Sharing._refused_until and self._prompt(trials=3)
        )

    def ask(self) -> None:
        """Look again; a refusal stands for the rest of the call, and for others for a second."""
        if self.on and not self._alone:
            self.on = self._prompt(trials=1)

    def _prompt(self, trials: int) -> bool:
        """Whether shared operations end in time, that is, other threads' cores are free."""
        work = torch.empty(4 * UNSHARED)
        for _ in range(trials):
            start = time.perf_counter()
            work.fill_(1.0)
            if time.perf_counter() - start > _PATIENCE_S:
                Sharing._refused_until = time.monotonic() + _RETRY_AFTER_S
                return False
        return True
