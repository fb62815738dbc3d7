# SPDX-License-Identifier: Apache-2.0
"""The fixture that fills uninitialised memory of statescan, with NaN."""

import torch

from statescan.backends.outputs import empty_activation


def test_memory_of_statescan_is_poisoned(nan_empty):
    assert empty_activation(torch.zeros(2, 3, 4)).isnan().all()


def test_poison_ends_with_the_test():
    assert torch.empty.__name__ == "empty"
    assert torch.Tensor.new_empty.__name__ == "new_empty"
