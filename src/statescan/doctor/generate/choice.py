# SPDX-License-Identifier: Apache-2.0
"""What the deciding modules share: one decision with its reason, and versions as numbers.

No decision is taken here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Choice:
    """One decision: what it is about, what was taken, and why."""

    name: str
    value: str
    why: str


@lru_cache(256)
def number(version: str) -> tuple[int, ...]:
    """A version as numbers, for comparisons; parts such as "post1" do not count."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
