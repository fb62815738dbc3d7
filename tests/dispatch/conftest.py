# SPDX-License-Identifier: Apache-2.0
"""Fake backends in place of the real ones, so that every ladder can be set up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import pytest

from statescan.backends.base import ALL_OPS, YES, Backend, OpRequest, Support
from statescan.dispatch import registry

REQUEST = OpRequest(
    "selective_scan",
    "cpu",
    {"x": "float32", "A": "float64"},
    {"batch": 2, "dim": 4, "seqlen": 9, "dstate": 3},
    frozenset(("reverse", "z")),
)


class FakeBackend(Backend):
    """Answers as it was told, and counts how often it is asked."""

    modules = ALL_OPS

    def __init__(
        self,
        name: str,
        available: Support = YES,
        supported: Support = YES,
        automatic: bool = True,
    ) -> None:
        self.name, self.automatic = name, automatic
        self.available, self.supported = available, supported
        self.asked = 0

    def availability(self) -> Support:
        return self.available

    def supports(self, request: OpRequest) -> Support:
        self.asked += 1
        return self.supported


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's own, and nothing told or warned about yet."""
    monkeypatch.delenv("STATESCAN_BACKEND", raising=False)
    # The package has a function of the module's name.
    monkeypatch.setattr(import_module("statescan.dispatch.select"), "_told", set())


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sequence[FakeBackend]]:
    """Replaces the registry by fakes in this order."""

    def install(*backends: FakeBackend) -> Sequence[FakeBackend]:
        monkeypatch.setattr(registry, "_BACKENDS", backends)
        return backends

    return install


@pytest.fixture
def request_() -> OpRequest:
    """A call of selective_scan."""
    return REQUEST


@pytest.fixture
def fake() -> type[FakeBackend]:
    return FakeBackend
