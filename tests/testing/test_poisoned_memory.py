# SPDX-License-Identifier: Apache-2.0
"""The fixture that fills uninitialised memory of statescan, with NaN."""

import pytest
import torch

from statescan.backends.outputs import empty_activation

# Every way in which PyTorch gives uninitialised memory of a shape, called as statescan would.
WAYS = {
    "empty": "torch.empty((2, 3))",
    "empty_like": "torch.empty_like(like)",
    "empty_strided": "torch.empty_strided((2, 3), (3, 1))",
    "new_empty": "like.new_empty((2, 3))",
    "new_empty_strided": "like.new_empty_strided((2, 3), (3, 1))",
}


def called_by(module, way):
    """Run one of the ways in a module of that name."""
    scope = {"__name__": module, "torch": torch, "like": torch.zeros(2, 3)}
    exec(f"def ask():\n    return {WAYS[way]}", scope)
    return scope["ask"]()


def test_memory_of_statescan_is_poisoned(nan_empty):
    assert empty_activation(torch.zeros(2, 3, 4)).isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask_for_memory_is_poisoned(nan_empty, way):
    assert called_by("statescan.backends.anything", way).isnan().all()


def test_integers_and_masks_are_poisoned_too(nan_empty):
    scope = {"__name__": "statescan.backends.anything", "torch": torch}
    exec("def ask(dtype):\n    return torch.empty(3, dtype=dtype)", scope)
    assert (scope["ask"](torch.int32) == torch.iinfo(torch.int32).min).all()
    assert scope["ask"](torch.bool).all()


def test_poison_ends_with_the_test():
    assert torch.empty.__name__ == "empty"
    for name in ("new_empty", "new_empty_strided"):
        assert getattr(torch.Tensor, name).__name__ == name
