# SPDX-License-Identifier: Apache-2.0
"""What a rule says about a line: which problem it shows, how surely, and why.

The type and the register of rules; the rules are in the ``rules_*`` modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from statescan.doctor.logs.evidence import Evidence
from statescan.doctor.logs.record import Attempt, Hit

PLAIN = "a line of the log says so itself"
"""The reason of a line that needs no other to be understood."""

HARD, INFERRED, SIGN = 3, 2, 1
"""The line says it; the line says it together with others; it is only a sign."""


@dataclass(frozen=True)
class Opinion:
    """A line's meaning.

    Attributes:
        slug: The problem.
        weight: HARD, INFERRED or SIGN.
        reason: Why, in one sentence without a full stop.
        instead_of: Problems that the line looks like and that it does not show here.
        values: Found for the fix, besides the named groups of the signature.
        proof: Another line of the log that proves it better than the one asked about.
    """

    slug: str
    weight: int
    reason: str
    instead_of: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    proof: Hit | None = None


@dataclass(frozen=True)
class Scene:
    """A hit with what is around it."""

    hit: Hit
    attempt: Attempt
    evidence: Evidence


Rule = Callable[[Scene], "Opinion | None"]

RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule under its name, which signatures of the catalogue give."""
    RULES[function.__name__] = function
    return function
