# SPDX-License-Identifier: Apache-2.0
"""Small helpers of mamba_ssm.utils that programs import: autocast decorators, determinism."""

from __future__ import annotations

from functools import partial

import torch

custom_fwd = partial(torch.amp.custom_fwd, device_type="cuda")
"""torch's decorator for the forward of an autograd function under autocast."""

custom_bwd = partial(torch.amp.custom_bwd, device_type="cuda")
"""torch's decorator for the backward of an autograd function under autocast."""


def use_deterministic_mode() -> bool:
    """True: every op of statescan gives equal bits for equal inputs, always."""
    return True


def set_deterministic_mode(value: bool | None) -> None:
    """Accepted for the originals' sake; there is no other mode to switch to."""
