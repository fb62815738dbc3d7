# SPDX-License-Identifier: Apache-2.0
"""Equal bits for equal inputs: on repetition, for any number of threads, in a new process.

Also torch's own switch for deterministic algorithms. Values are judged in test_cases.py.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from helpers.integration import TORCH_WARNINGS, child, public, run
from helpers.op_inputs import conv_inputs, inner_inputs, scan_inputs, state_inputs, taps_inputs

from statescan.dispatch import all_backends

BACKENDS = [b.name for b in all_backends() if b.availability().ok]

CALLS = {
    "selective_scan": lambda dtype: scan_inputs(2, 24, 150, 5, ngroups=3, dtype=dtype),
    "causal_conv1d": lambda dtype: conv_inputs(2, 40, 150, 4, dtype=dtype),
    "mamba_inner": lambda dtype: inner_inputs(2, 24, 90, 4, 4, 3, 16, dtype=dtype),
    "selective_state_update": lambda dtype: state_inputs(9, 64, 16, ngroups=4, dtype=dtype),
    "causal_conv1d_update": lambda dtype: taps_inputs(9, 64, 4, ntokens=3, dtype=dtype),
}


def digest(op, dtype, backend):
    """One hash of the bits of every result and gradient."""
    results = run(op, public(op), {**CALLS[op](dtype), "backend": backend})
    hashed = hashlib.sha256()
    for name in sorted(results):
        value = results[name].contiguous()
        hashed.update(name.encode() + value.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("op", CALLS)
def test_equal_bits_on_repetition_and_for_any_number_of_threads(op, backend, dtype, threads):
    found = set()
    for count in (1, 2, 3, 1):
        threads(count)
        found |= {digest(op, dtype, backend) for _ in range(3)}
    assert len(found) == 1


CODE = """
import sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads({threads})
from test_determinism import CALLS, digest
for op in CALLS:
    print(digest(op, torch.float32, "auto"))
"""


# Variables of the packages that statescan stands in for; its results are deterministic anyway.
ORIGINALS = {"MAMBA_DETERMINISTIC": "1", "CAUSAL_CONV1D_DETERMINISTIC": "1"}


@pytest.mark.parametrize(("threads", "environment"), [(1, {}), (2, {}), (1, ORIGINALS)])
def test_equal_bits_in_a_new_process(threads, environment):
    """B61: another process, with memory in other places, gives the same bits."""
    import sys
    from pathlib import Path

    here = Path(__file__).parent
    path = [str(here), str(here.parent), *(p for p in sys.path if p.endswith("src"))]
    expected = [digest(op, torch.float32, "auto") for op in CALLS]
    found = child(CODE.format(path=path, threads=threads), **environment)
    assert found.split() == expected


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", CALLS)
def test_deterministic_algorithms_may_be_demanded(op, backend):
    """The switch raises nothing and changes nothing; it also fills fresh memory with NaN."""
    small = CALLS[op](torch.float32)
    expected = run(op, public(op), {**small, "backend": backend})
    torch.use_deterministic_algorithms(True)
    try:
        found = run(op, public(op), {**small, "backend": backend})
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
