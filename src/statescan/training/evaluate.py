# SPDX-License-Identifier: Apache-2.0
"""Bits per byte of a model on held-out text, reading it in order with states carried.

Training does not happen here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from statescan.errors import ArgumentError
from statescan.models.lm import MambaLM


@torch.no_grad()
def bits_per_byte(
    model: MambaLM, data: Tensor, *, max_bytes: int | None = None, lanes: int = 8, chunk: int = 512
) -> float:
    """Mean of -log2 p(byte | what stands before it).

    Args:
        model: A byte-level model.
        data: uint8 (bytes,).
        max_bytes: Read only so many from the beginning.
        lanes: Pieces of the text that are read side by side, each from a fresh state.
        chunk: Bytes of each lane that go through the model at once; changes speed, not the result.
    """
    data = data[:max_bytes]
    # A lane of less than a few windows would measure the fresh start rather than the model.
    lanes = max(1, min(lanes, data.shape[0] // (2 * chunk)))
    length = (data.shape[0] - 1) // lanes
    if length < 1:
        raise ArgumentError(
            f"bits_per_byte: the text has {data.shape[0]} bytes.\n"
            "It needs at least 2: one to predict, and one before it.\n"
            "Use a longer text."
        )
    starts = [lane * length for lane in range(lanes)]
    rows = torch.stack([data[start : start + length + 1] for start in starts])
    rows = rows.to(model.device, torch.long)
    cache = model.allocate_inference_cache(lanes)
    total = 0.0
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        logits = model(rows[:, start:stop], cache=cache).logits.float()
        targets = rows[:, start + 1 : stop + 1]
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return total / (lanes * length) / math.log(2)
