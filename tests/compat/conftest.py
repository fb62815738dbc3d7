# SPDX-License-Identifier: Apache-2.0
"""Where the tests of the served names compute: on the CPU, and where there is a GPU on that too."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    """Tensors that a test makes without saying where are made there."""
    with torch.device(request.param):
        yield request.param
