# SPDX-License-Identifier: Apache-2.0
"""Initial weights of a language model, drawn in the originals' order.

What a mixer draws for itself is in ``nn.mamba``; only the model-wide rules are here.
"""

from __future__ import annotations

import math

import torch
from torch import nn

EMBEDDING_STD = 0.02


def initialise_weights(model: nn.Module, n_layer: int) -> None:
    """Set biases, embeddings and output projections of everything below ``model``, in place.

    The output projection of each mixer is scaled by 1/sqrt(n_layer), so that the variance of the
    residual stream does not grow with depth (GPT-2's rule).
    """
    # apply() visits children before parents, which fixes the order of the random draws.
    model.apply(lambda module: _initialise(module, n_layer))


@torch.no_grad()
def _initialise(module: nn.Module, n_layer: int) -> None:
    if isinstance(module, nn.Linear):
        if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    for name, parameter in module.named_parameters():
        if name == "out_proj.weight":
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            parameter.div_(math.sqrt(n_layer))
