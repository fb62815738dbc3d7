# SPDX-License-Identifier: Apache-2.0
"""Makes the scripts of ``benchmarks/`` importable, as they are when they are run.

What they print and write is checked in the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
