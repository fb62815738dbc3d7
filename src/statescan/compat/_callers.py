# SPDX-License-Identifier: Apache-2.0
"""What a model of transformers was given and does not hand to the scan: its state, and packing.

transformers 5.24 calls ``selective_scan_fn`` as the original defines it, without states, and its
Mamba-1 models drop ``seq_idx`` on the way to their layers. With a cache and several tokens, or with
packed sequences, the result would be wrong without a word; both stand in the calling ``forward``
functions, where they are read here. In a compiled graph there are no calling frames, and there its
models do what transformers wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DEPTH = 64
"""Frames to look at: some ten for each of mixer, block, backbone and model, with their wrappers."""


class Context(NamedTuple):
    """What the caller has: states (batch, dim, dstate), and one kind of packing."""

    initial_states: Tensor | None = None
    seq_idx: Tensor | None = None
    cu_seqlens: Tensor | None = None


def context_of_caller(batch: int, dim: int, seqlen: int, dstate: int) -> Context:
    """The context for a scan of these sizes; empty for every caller but transformers' models."""
    if "transformers" not in sys.modules or torch.compiler.is_compiling():
        return Context()
    state = seq_idx = cu_seqlens = None
    for place, known in enumerate(_forwards(sys._getframe(1))):
        # Only the innermost is the mixer that calls.
        state = _state(known, (batch, dim, dstate)) if place == 0 else state
        given = known.get("kwargs")
        if not isinstance(given, dict):
            continue
        if seq_idx is None and _has_shape(given.get("seq_idx"), (batch, seqlen)):
            seq_idx = given["seq_idx"]
        bounds = given.get("cu_seqlens")
        if cu_seqlens is None and batch == 1 and isinstance(bounds, Tensor) and bounds.dim() == 1:
            cu_seqlens = bounds
    return Context(state, seq_idx, cu_seqlens if seq_idx is None else None)


def _forwards(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Local names of the ``forward`` functions of transformers' models below this call."""
    for _ in range(_DEPTH):
        if frame is None:
            return
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("transformers.models.") and frame.f_code.co_name == "forward":
            yield frame.f_locals
        frame = frame.f_back


def _state(known: dict[str, Any], shape: tuple[int, ...]) -> Tensor | None:
    """The recurrent state of the layer, of one head where the mixer scans head by head."""
    state, head = known.get("recurrent_state"), known.get("head_idx")
    if isinstance(state, Tensor) and state.dim() == len(shape) + 1 and isinstance(head, int):
        state = state[:, head]
    return state if _has_shape(state, shape) else None


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape
