# SPDX-License-Identifier: Apache-2.0
"""Equal bits for equal inputs on a GPU: twenty runs, beside other work, and in a new process."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu_calls import MAKERS, assert_equal_bits, on_gpu
from helpers.integration import child

pytestmark = pytest.mark.gpu

RUNS = 20
DTYPES = [torch.float32, torch.bfloat16]


def digest(name, dtype):
    """One hash of the bits of every result and gradient."""
    hashed = hashlib.sha256()
    results = on_gpu(name, dtype).run()
    for key in sorted(results):
        value = results[key].contiguous().cpu()
        hashed.update(key.encode() + value.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKERS)
def test_twenty_runs(name, dtype):
    call = on_gpu(name, dtype)
    first = call.run()
    for _ in range(RUNS - 1):
        # Results land in other places each time, which are not clean.
        rubbish = [torch.full_like(value, float("nan")) for value in first.values()]
        found = call.run()
        assert_equal_bits(found, first)
        del rubbish


@pytest.mark.parametrize("name", MAKERS)
def test_beside_other_work(name):
    """Blocks start in another order when the GPU is shared."""
    call = on_gpu(name)
    first = call.run()
    busy, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(busy):
            for _ in range(8):
                torch.mm(square, square)
        assert_equal_bits(call.run(), first)
    torch.cuda.synchronize()


CODE = """
import sys
sys.path[:0] = {path!r}
import torch
from tests.gpu.test_repeatability import MAKERS, digest
for name in MAKERS:
    print(digest(name, torch.float32))
"""


def test_in_a_new_process():
    """B61."""
    tests = Path(__file__).resolve().parents[1]
    path = [str(tests.parent), str(tests), *(p for p in sys.path if p.endswith("src"))]
    expected = [digest(name, torch.float32) for name in MAKERS]
    assert child(CODE.format(path=path)).split() == expected


@pytest.mark.parametrize("name", MAKERS)
def test_deterministic_algorithms_may_be_demanded(name):
    """The switch raises nothing and changes nothing; it also fills fresh memory with NaN."""
    call = on_gpu(name)
    expected = call.run()
    torch.use_deterministic_algorithms(True)
    try:
        found = call.run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal_bits(found, expected)
