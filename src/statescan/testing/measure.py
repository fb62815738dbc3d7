# SPDX-License-Identifier: Apache-2.0
"""Measures the table of `tolerances.py`: how far the reference itself is from float64.

Run it as `python -m statescan.testing.measure`; it judges nothing.
"""

import sys
from collections.abc import Iterable

import torch

from statescan import reference
from statescan.testing.cases import OPS, all_cases
from statescan.testing.compare import error
from statescan.testing.inputs import make
from statescan.testing.runner import POOLS, evaluate, exact_results
from statescan.testing.tolerances import judged_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plain_errors(op: str, seeds: Iterable[int]) -> dict[torch.dtype, tuple[float, float]]:
    """Worst error of the reference by judged dtype: (outputs, gradients)."""
    worst = {dtype: [0.0, 0.0] for dtype in DTYPES}
    fn = getattr(reference, f"{op}_ref")
    for dtype in DTYPES:
        for case in all_cases(op):
            for seed in seeds:
                exact = exact_results(case, dtype, seed)
                results = evaluate(case, fn, make(case, dtype, "cpu", seed), dtype, seed)
                for name, result in results.items():
                    row = worst[judged_dtype(op, dtype, result.dtype)]
                    column = int(name.startswith("d"))
                    row[column] = max(row[column], error(result, exact[name]))
    return {dtype: (outputs, gradients) for dtype, (outputs, gradients) in worst.items()}


def main() -> None:
    """Print the table."""
    for op in OPS:
        for dtype, (outputs, gradients) in plain_errors(op, range(5)).items():
            kind = "out" if op in POOLS else "out, gradients"
            sys.stdout.write(f"{op} {dtype} {kind}: {outputs:.2e}, {gradients:.2e}\n")


if __name__ == "__main__":
    main()
