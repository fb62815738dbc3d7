# SPDX-License-Identifier: Apache-2.0
"""Checks of what users pass to a mixer, each with a message that says what to do.

Only shapes and dtypes are looked at; tensors' values are the ops' business.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from statescan.errors import ArgumentError, DtypeError, GradientError, ShapeError
from statescan.nn.cache import InferenceCache, LayerCache
from statescan.nn.plain import is_plain


def check_expand(expand: float) -> None:
    """Refuse a factor that is no positive number, before it is multiplied."""
    number = isinstance(expand, (int, float)) and not isinstance(expand, bool)
    if not number or not 0 < expand < math.inf:
        raise ArgumentError(
            f"Mamba: got expand={expand!r}.\n"
            "expand must be a number above 0.\n"
            "Check the configuration that this model is built from."
        )


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse parameters that are not real floating-point numbers."""
    if dtype is not None and not dtype.is_floating_point:
        given = str(dtype).removeprefix("torch.")
        raise DtypeError(
            f"Mamba: got dtype={given}.\n"
            "dtype must be a real floating-point one.\n"
            "Use torch.float32, torch.bfloat16, torch.float16 or torch.float64."
        )


def check_sizes(**sizes: int) -> None:
    """Refuse a size that is no positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(
                f"Mamba: got {name}={size!r}.\n"
                f"{name} must be an integer of at least 1.\n"
                "Check the configuration that this model is built from."
            )


def check_batch_size(batch_size: int) -> None:
    """Refuse a number of rows that is no natural number."""
    if not isinstance(batch_size, int) or batch_size < 0:
        raise ArgumentError(
            f"Mamba.allocate_inference_cache: got batch_size={batch_size!r}.\n"
            "batch_size must be an integer of at least 0.\n"
            "Give the number of sequences that are continued side by side."
        )


def check_hidden_states(hidden_states: Tensor, d_model: int, in_proj: nn.Module) -> None:
    """Refuse an input of the wrong shape, or of a dtype that the weights cannot multiply."""
    _check_tensor("Mamba.forward", hidden_states)
    if hidden_states.dim() != 3 or hidden_states.shape[2] != d_model:
        raise ShapeError(
            f"Mamba.forward: argument 'hidden_states' has shape {tuple(hidden_states.shape)}.\n"
            f"It must be (batch, seqlen, d_model={d_model}).\n"
            "Add or move axes, or check d_model."
        )
    _check_dtype_of_weights("Mamba.forward", hidden_states, in_proj)


def _check_tensor(function: str, hidden_states: object) -> None:
    if not isinstance(hidden_states, Tensor):
        raise DtypeError(
            f"{function}: argument 'hidden_states' is a {type(hidden_states).__name__}.\n"
            "It must be a torch.Tensor.\n"
            "Convert it first, for example with torch.as_tensor(hidden_states)."
        )


def _check_dtype_of_weights(function: str, hidden_states: Tensor, in_proj: nn.Module) -> None:
    if not is_plain(in_proj, (nn.Linear,)) or hidden_states.dtype == in_proj.weight.dtype:
        return
    if not torch.is_autocast_enabled(hidden_states.device.type):
        given = str(hidden_states.dtype).removeprefix("torch.")
        needed = str(in_proj.weight.dtype).removeprefix("torch.")
        raise DtypeError(
            f"{function}: argument 'hidden_states' has dtype {given}.\n"
            f"The module's weights are {needed}, and outside autocast both must agree.\n"
            f"Use hidden_states.to(torch.{needed}), module.to(torch.{given}) or torch.autocast."
        )


def check_step_input(hidden_states: Tensor, d_model: int, in_proj: nn.Module) -> None:
    """Refuse anything but one token a row, and a dtype that the weights cannot multiply."""
    _check_tensor("Mamba.step", hidden_states)
    shape = tuple(hidden_states.shape)
    if len(shape) != 3 or shape[1] != 1 or shape[2] != d_model:
        raise ShapeError(
            f"Mamba.step: argument 'hidden_states' has shape {shape}.\n"
            f"It must be (batch, 1, d_model={d_model}).\n"
            "Use forward(hidden_states, cache) for several tokens at once."
        )
    _check_dtype_of_weights("Mamba.step", hidden_states, in_proj)


def check_layer(cache: InferenceCache, layer_idx: int | None) -> int:
    """The place of a mixer's own states among those of all layers."""
    if layer_idx is None:
        raise ArgumentError(
            "Mamba.forward: 'cache' holds the states of all layers and layer_idx is None.\n"
            "A mixer must know which of them are its own.\n"
            "Pass cache[i], or construct Mamba(..., layer_idx=i)."
        )
    if not 0 <= layer_idx < len(cache):
        raise ArgumentError(
            f"Mamba.forward: 'cache' holds the states of {len(cache)} layers, "
            f"and layer_idx is {layer_idx}.\n"
            "It must be the cache of the model that this mixer belongs to.\n"
            "Allocate it with that model, or pass this layer's own states."
        )
    return layer_idx


def check_cache(layer: LayerCache, hidden_states: Tensor, cu_seqlens: object) -> None:
    """Refuse what is no cache, or one that these hidden_states cannot continue or write."""
    if not isinstance(layer, LayerCache):
        raise DtypeError(
            f"Mamba.forward: argument 'cache' is a {type(layer).__name__}.\n"
            "It must be a LayerCache or an InferenceCache.\n"
            "Use allocate_inference_cache(batch_size), or LayerCache(conv_state, ssm_state)."
        )
    _check_state("conv_state", layer.conv_state)
    _check_state("ssm_state", layer.ssm_state)
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        return  # The op that takes it names it.
    rows = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    held = layer.ssm_state.shape[0]
    if held != rows:
        axis = "batch" if cu_seqlens is None else "num_seqs"
        raise ShapeError(
            f"Mamba.forward: argument 'cache' holds states of {held} rows.\n"
            f"The input needs {rows} ({axis}).\n"
            "Allocate it for this batch, or pick rows with cache.select(indices)."
        )


def _check_state(name: str, state: Tensor) -> None:
    """Refuse a state that torch would not let us write, before anything is computed."""
    if torch.compiler.is_compiling():
        return
    if state.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"Mamba.forward: {name} of 'cache' was made in torch.inference_mode, "
            "and this call is not.\n"
            "Such tensors may be changed inside inference_mode only.\n"
            "Call this inside torch.inference_mode too, or pass cache.clone()."
        )
    if state.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            f"Mamba.forward: {name} of 'cache' requires grad, and it is written in place.\n"
            "A cache carries values from call to call, and no gradients.\n"
            "Use statescan.mamba_inner(initial_states=...) to learn an initial state."
        )
