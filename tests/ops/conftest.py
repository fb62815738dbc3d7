# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the op tests: one run for each backend that ``auto`` may choose on this machine.

Inputs and comparisons are in helpers/differential.py.
"""

from __future__ import annotations

import pytest
from helpers.differential import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of an automatic backend that can run here."""
    return str(request.param)
