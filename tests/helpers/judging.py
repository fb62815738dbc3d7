# SPDX-License-Identifier: Apache-2.0
"""Judges a recorded machine with some facts changed, for tests of single checks.

The machines themselves are in ``machines_base`` and its neighbours.
"""

from __future__ import annotations

from typing import Any

from helpers import machines_base, make_machines
from helpers.machine_parts import Values, use_python, use_torch

from statescan.doctor import checks
from statescan.doctor.model import Facts, Finding


def to_build() -> Values:
    """A workstation on which nothing hinders a source build, and no wheel spares it."""
    values = machines_base.linux()
    use_python(values, "3.14.0")
    use_torch(values, "2.10.0+cu128", "12.8", "3.6.0")
    return values


def facts(values: Values, **changes: Any) -> Facts:
    """Facts of these values; a change to ``compiler__msvc`` is one to ``compiler.msvc``."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return make_machines.facts({**values, **named})


def judge(values: Values, package: str | None = None, **changes: Any) -> list[Finding]:
    """The findings."""
    return checks.run(facts(values, **changes), package)


def ids(values: Values, package: str | None = None, **changes: Any) -> list[str]:
    """The ids of the findings."""
    return [row.problem.slug for row in judge(values, package, **changes)]


def only(values: Values, package: str | None = None, **changes: Any) -> Finding:
    """The one finding that there must be."""
    (row,) = judge(values, package, **changes)
    return row
