# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel for one decode step of all layers of a Mamba-1 model.

The algorithm is described in ``kernels/cpu/mamba_stack.c``. It is the composition in
``models.MambaBackbone`` with one launch; nothing is offered here that that does not define.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from statescan.backends.cpu import abi
from statescan.backends.cpu._workspace import floats
from statescan.backends.cpu.mamba_step import describe
from statescan.backends.cpu.vector_linear import rows, vector

LAYER_TENSORS = 14
"""Of each layer: its norm's weight, the states and the mixer's weights."""


def mamba_stack_plan(
    eps: float, hidden: Tensor, final_norm: Tensor, *rest: Any
) -> Callable[[Sequence[Tensor]], None] | None:
    """A function of hidden, the final norm's weight, the layers' tensors and out.

    None for layers that differ in form or that the mixer's kernel does not offer. It is for one
    thread at a time: its workspace is its own.
    """
    out = rest[-1]
    layers = [rest[i : i + LAYER_TENSORS] for i in range(0, len(rest) - 1, LAYER_TENSORS)]
    norm = layers[0][0]
    if any(_form(layer) != _form(layers[0]) for layer in layers):
        return None
    if norm.shape != hidden.shape[1:] or final_norm.shape != hidden.shape[1:]:
        return None
    # Between the layers everything is float32 in the workspace.
    passed = floats(3, *hidden.shape)
    found = describe(*(passed[1], *layers[0][1:], passed[2]))
    if found is None:
        return None
    step, kept = found
    epsilon = torch.tensor([eps], dtype=torch.float32, device="cpu")
    form = abi.pack(
        "mamba_stack",
        *(rows(hidden), rows(out), vector(norm), vector(final_norm)),
        *(abi.words_of(step), epsilon.data_ptr(), passed.data_ptr(), len(layers)),
    )
    run = abi.kernel("mamba_stack")
    memory = (*kept, passed, epsilon)
    listed = abi.address_list((hidden, out, final_norm, *rest[:-1]))

    def planned(tensors: Sequence[Tensor], _keep: tuple[Tensor, ...] = memory) -> None:
        hidden, *given, out = tensors
        run(form, listed(hidden, out, *given))

    return planned


def _form(layer: Sequence[Tensor | None]) -> tuple[object, ...]:
    """What two layers must have in common."""
    return tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in layer)
