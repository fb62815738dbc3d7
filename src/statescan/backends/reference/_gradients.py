# SPDX-License-Identifier: Apache-2.0
"""First-order gradients of a reference by running it once more under autograd.

Which arguments an op has is said in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from statescan.backends.outputs import empty_gradients


def gradients(
    forward: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    douts: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Gradient of every input, in its dtype and layout; 0 elements where the input is absent.

    Args:
        forward: Takes ``inputs`` and returns the op's results, by differentiable torch.
        inputs: The tensors that have gradients.
        douts: Gradient of each result, None where nothing flows back.
    """
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        pairs = [
            (result, dout)
            for result, dout in zip(forward(*leaves), douts, strict=True)
            # Without tokens a result is made of zeros alone and has no graph.
            if dout is not None and result.requires_grad
        ]
    given = [leaf for leaf in leaves if leaf is not None]
    found: Sequence[Tensor | None] = [None] * len(given)
    if pairs:
        results, seeds = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, given, seeds, allow_unused=True)
    outputs = empty_gradients(*inputs)
    present = [out for out, leaf in zip(outputs, leaves, strict=True) if leaf is not None]
    for out, gradient in zip(present, found, strict=True):
        if gradient is None:
            out.zero_()
        else:
            out.copy_(gradient)
    return outputs
