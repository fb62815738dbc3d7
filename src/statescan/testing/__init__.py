# SPDX-License-Identifier: Apache-2.0
"""Helpers that ship with the package: cases, inputs, tolerances and comparison with the truth.

Tests, `statescan quickstart` and benchmarks share them; nothing that only pytest needs goes here.
"""

from statescan.testing.cases import OPS, Case, all_cases, get_case
from statescan.testing.compare import Comparison, assert_close, assert_passed, error
from statescan.testing.inputs import in_double, make
from statescan.testing.runner import Verdict, run_case, run_op
from statescan.testing.tolerances import tolerance

__all__ = [
    "OPS",
    "Case",
    "Comparison",
    "Verdict",
    "all_cases",
    "assert_close",
    "assert_passed",
    "error",
    "get_case",
    "in_double",
    "make",
    "run_case",
    "run_op",
    "tolerance",
]
