# SPDX-License-Identifier: Apache-2.0
"""Turns Ctrl-C into a request to stop after the current step; a second one stops at once.

Saving is up to the loop that asks.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager: ``requested`` becomes True at the first signal.

    Outside the main thread, where Python lets nobody handle signals, it stays False.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._restore()
            raise KeyboardInterrupt
        self.requested = True

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # A handler that was not installed from Python reads as None; the default is closest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
