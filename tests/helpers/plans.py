# SPDX-License-Identifier: Apache-2.0
"""Watches the plans of the cpu backend (ops/_plans.py): which are made, and which run a call.

What plans compute, and when they may be used, is for the tests to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from statescan.backends.cpu import CpuBackend
from statescan.ops import _plans


class PlanLog:
    """Names of the ops whose plans were made, and were run, in order."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.ran: list[str] = []


def forget_plans() -> dict[Any, Any]:
    """This thread's plans, which are none from now on: they hold scratch memory for one level."""
    _plans._plans.forget()
    return _plans._plans.found


@contextmanager
def watched_plans() -> Iterator[PlanLog]:
    """A log of what happens inside; no plan comes in from outside, and none goes out."""
    log, original = PlanLog(), CpuBackend.plan

    def plan(self: CpuBackend, op: str) -> Any:
        make = original(self, op)

        def watched(*args: Any) -> Any:
            run = make(*args)  # type: ignore[misc]
            if run is None:
                return None
            log.made.append(op)

            def counted(tensors: Any) -> None:
                log.ran.append(op)
                run(tensors)

            return counted

        return None if make is None else watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "plan", plan)
        forget_plans()
        try:
            yield log
        finally:
            forget_plans()
