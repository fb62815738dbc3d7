# SPDX-License-Identifier: Apache-2.0
"""Small models and texts for tests, the same for the same arguments."""

from typing import Any

import torch

from statescan.models import MambaConfig, MambaLM
from statescan.nn import Mamba


def tiny_mixer(seed: int = 0, **changes: Any) -> Mamba:
    """A mixer of width 16 with 4 states a channel."""
    torch.manual_seed(seed)
    return Mamba(**{"d_model": 16, "d_state": 4, **changes})


def tiny_config(**changes: Any) -> MambaConfig:
    """Two layers of width 16 over bytes."""
    return MambaConfig(**{"d_model": 16, "n_layer": 2, "vocab_size": 256, "d_state": 4, **changes})


def tiny_lm(seed: int = 0, sharp: bool = False, **changes: Any) -> MambaLM:
    """A language model with random weights, in evaluation mode.

    ``sharp`` widens the logits' range to that of a trained model: at their initial size all
    tokens are about equally likely, so that any rounding error could change which one wins.
    """
    torch.manual_seed(seed)
    model = MambaLM(tiny_config(**changes)).eval()
    if sharp:
        with torch.no_grad():
            model.backbone.norm_f.weight.fill_(40.0)
            for block in model.backbone.blocks():
                block.mixer.out_proj.weight.mul_(4.0)
    return model
