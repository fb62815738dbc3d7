# SPDX-License-Identifier: Apache-2.0
"""How a probe is declared and run: whatever goes wrong in one stays in its own facts.

No probe is here; each is in the module of its area.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from statescan.doctor.facts.machine import Machine
from statescan.doctor.model import Fact

_AT_ONCE = 8


class Seen(NamedTuple):
    """A value with its own source, or with the reason why there is none."""

    value: Any
    source: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Probe:
    """A function that sets facts.

    Attributes:
        names: Of the facts.
        source: Where it looks, unless it says otherwise for a value.
        look: Gives the value of its one fact, or a mapping from several names to values.
    """

    names: tuple[str, ...]
    source: str
    look: Callable[[Machine], Any]


PROBES: list[Probe] = []
"""Every probe of the modules that were imported."""


def probe(*names: str, source: str) -> Callable[[Callable[[Machine], Any]], Callable[..., Any]]:
    """Register a function as the probe of these facts."""

    def register(look: Callable[[Machine], Any]) -> Callable[[Machine], Any]:
        PROBES.append(Probe(names, source, look))
        return look

    return register


def run(probes: Iterable[Probe], machine: Machine) -> dict[str, Fact]:
    """The facts of all these probes; several run at once, since most wait for programs."""
    with ThreadPoolExecutor(_AT_ONCE, "statescan-probe") as pool:
        rows = list(pool.map(lambda one: _run_one(one, machine), probes))
    return {fact.name: fact for row in rows for fact in row}


def _run_one(one: Probe, machine: Machine) -> list[Fact]:
    try:
        answer = one.look(machine)
        values: Mapping[str, Any] = {one.names[0]: answer} if len(one.names) == 1 else answer
    except Exception as error:  # noqa: BLE001  (a strange machine is what a doctor is for)
        problem = f"{type(error).__name__}: {error}"
        return [Fact(name, None, one.source, problem) for name in one.names]
    return [fact(name, values.get(name), one.source) for name in one.names]


def fact(name: str, value: Any, source: str) -> Fact:
    """The fact of a value, which may be ``Seen`` with a source of its own."""
    if isinstance(value, Seen):
        return Fact(name, value.value, value.source or source, value.problem)
    return Fact(name, value, source)
