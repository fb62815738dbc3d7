# SPDX-License-Identifier: Apache-2.0
"""Checks of what users pass to a mixer, each with a message that says what to do.

Only shapes and dtypes are looked at; tensors' values are the ops' business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from statescan.errors import ArgumentError, DtypeError, ShapeError
from statescan.nn.cache import LayerCache
from statescan.nn.plain import is_plain


def check_sizes(**sizes: int) -> None:
    """Refuse a size that is no positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(
                f"Mamba: got {name}={size!r}.\n"
                f"{name} must be an integer of at least 1.\n"
                "Check the configuration that this model is built from."
            )


def check_hidden_states(hidden_states: Tensor, d_model: int, in_proj: nn.Module) -> None:
    """Refuse an input of the wrong shape, or of a dtype that the weights cannot multiply."""
    if hidden_states.dim() != 3 or hidden_states.shape[2] != d_model:
        raise ShapeError(
            f"Mamba.forward: argument 'hidden_states' has shape {tuple(hidden_states.shape)}.\n"
            f"It must be (batch, seqlen, d_model={d_model}).\n"
            "Add or move axes, or check d_model."
        )
    if not is_plain(in_proj, (nn.Linear,)) or hidden_states.dtype == in_proj.weight.dtype:
        return
    if not torch.is_autocast_enabled(hidden_states.device.type):
        given = str(hidden_states.dtype).removeprefix("torch.")
        needed = str(in_proj.weight.dtype).removeprefix("torch.")
        raise DtypeError(
            f"Mamba.forward: argument 'hidden_states' has dtype {given}.\n"
            f"The module's weights are {needed}, and outside autocast both must agree.\n"
            f"Use hidden_states.to(torch.{needed}), module.to(torch.{given}) or torch.autocast."
        )


def check_step_input(hidden_states: Tensor, d_model: int) -> None:
    """Refuse anything but one token a row."""
    shape = tuple(hidden_states.shape)
    if len(shape) != 3 or shape[1] != 1 or shape[2] != d_model:
        raise ShapeError(
            f"Mamba.step: argument 'hidden_states' has shape {shape}.\n"
            f"It must be (batch, 1, d_model={d_model}).\n"
            "Use forward(hidden_states, cache) for several tokens at once."
        )


def check_cache(layer: LayerCache, hidden_states: Tensor, cu_seqlens: Tensor | None) -> None:
    """Refuse a cache of another batch than the input's."""
    rows = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    held = layer.ssm_state.shape[0]
    if held != rows:
        axis = "batch" if cu_seqlens is None else "num_seqs"
        raise ShapeError(
            f"Mamba.forward: argument 'cache' holds states of {held} rows.\n"
            f"The input needs {rows} ({axis}).\n"
            "Allocate it for this batch, or pick rows with cache.select(indices)."
        )
