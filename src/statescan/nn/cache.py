# SPDX-License-Identifier: Apache-2.0
"""The states that a model carries from one call to the next: one pair of tensors a layer.

No arithmetic on states here; the modules update them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from statescan.errors import ArgumentError, DtypeError, SlotIndexError


class LayerCache(NamedTuple):
    """States of one layer, updated in place.

    conv_state: (batch, d_inner, state_len >= d_conv - 1), newest input last.
    ssm_state: (batch, d_inner, d_state), float32 unless asked otherwise.
    """

    conv_state: Tensor
    ssm_state: Tensor

    def clone(self) -> LayerCache:
        """A copy that shares no memory."""
        return LayerCache(self.conv_state.clone(), self.ssm_state.clone())

    def index_select(self, rows: Tensor) -> LayerCache:
        """A copy of the given rows, in that order."""
        return LayerCache(*(state.index_select(0, rows) for state in self))


class InferenceCache:
    """States of all layers and the number of tokens that they have seen.

    Args:
        layers: One ``LayerCache`` a layer, all of the same batch.
        seqlen_offset: Tokens consumed so far, padding included.
    """

    def __init__(self, layers: Sequence[LayerCache], seqlen_offset: int = 0) -> None:
        if not layers:
            raise ArgumentError(
                "InferenceCache: 'layers' is empty.\n"
                "It needs one LayerCache for each layer of the model.\n"
                "Use model.allocate_inference_cache(batch_size)."
            )
        self.layers = list(layers)
        self.seqlen_offset = seqlen_offset

    @property
    def batch_size(self) -> int:
        """Rows that the states hold."""
        return self.layers[0].ssm_state.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of all states, which does not grow with the number of tokens."""
        return sum(state.numel() * state.element_size() for layer in self.layers for state in layer)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_idx: int) -> LayerCache:
        return self.layers[layer_idx]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    def __repr__(self) -> str:
        return (
            f"InferenceCache(layers={len(self.layers)}, batch_size={self.batch_size}, "
            f"seqlen_offset={self.seqlen_offset}, nbytes={self.nbytes})"
        )

    def clone(self) -> InferenceCache:
        """A copy that shares no memory: a prompt's states can be kept and continued many times."""
        return InferenceCache([layer.clone() for layer in self.layers], self.seqlen_offset)

    def select(self, indices: Tensor | Sequence[int]) -> InferenceCache:
        """A new cache of the given rows in that order; a row may appear several times or never."""
        rows = self._rows(indices)
        layers = [layer.index_select(rows) for layer in self.layers]
        return InferenceCache(layers, self.seqlen_offset)

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Replace row i by the old row ``indices[i]``, in place: the tensors stay where they are.

        Args:
            indices: One row number for each row of the cache, as beam search gives them.
        """
        rows = self._rows(indices)
        if rows.shape[0] != self.batch_size:
            raise ArgumentError(
                f"InferenceCache.reorder: got {rows.shape[0]} indices for {self.batch_size} rows.\n"
                "It needs exactly one old row for each row.\n"
                "Use select() to change the number of rows."
            )
        for layer in self.layers:
            for state in layer:
                state.copy_(state.index_select(0, rows))

    def reset(self) -> None:
        """Forget everything, in place."""
        for layer in self.layers:
            for state in layer:
                state.zero_()
        self.seqlen_offset = 0

    def _rows(self, indices: Tensor | Sequence[int]) -> Tensor:
        device = self.layers[0].ssm_state.device
        given = indices if isinstance(indices, Tensor) else torch.tensor(list(indices))
        if given.numel() and given.dtype not in (torch.int32, torch.int64):
            # A mask or fractions would be taken as row numbers 0 and 1 without a word.
            raise DtypeError(
                f"InferenceCache: 'indices' has dtype {str(given.dtype).removeprefix('torch.')}.\n"
                "It must hold row numbers, int32 or int64.\n"
                "Turn a mask into row numbers with mask.nonzero().flatten()."
            )
        rows = given.to(device, torch.long)
        if rows.dim() != 1:
            raise ArgumentError(
                f"InferenceCache: 'indices' has shape {tuple(rows.shape)}.\n"
                "It must be one list of row numbers.\n"
                "Flatten it first."
            )
        # CUDA values are left to index_select's own device check, which needs no synchronisation.
        if rows.device.type == "cpu" and rows.numel():
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high >= self.batch_size:
                raise SlotIndexError(
                    f"InferenceCache: 'indices' holds {low if low < 0 else high}.\n"
                    f"Rows run from 0 to {self.batch_size - 1}.\n"
                    "Check the batch that this cache was allocated for."
                )
        return rows
