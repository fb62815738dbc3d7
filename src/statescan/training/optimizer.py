# SPDX-License-Identifier: Apache-2.0
"""The optimiser of a run and its learning rate at each step.

Steps are taken in ``loop``.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from statescan.training.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only, and none that asks not to be."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        exempt = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
        (kept if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of step 0, 1, ...: a linear rise, then half a cosine down to ``min_lr_ratio``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    place = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, place))))
