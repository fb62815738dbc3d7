# SPDX-License-Identifier: Apache-2.0
"""Checks how a call packs several sequences into one row; shared by every op over sequences.

The values inside cu_seqlens are checked in ``_values.py``, behind the op.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from statescan.errors import ArgumentError, ShapeError


def packed_dims(op: str, x: Tensor | None, tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """``num_states``, the number of states that go in and out: num_seqs, or batch unpacked.

    Args:
        op: Name of the public function, for messages.
        x: The (batch, channels, seqlen) argument.
        tensors: The call's arguments, ``seq_idx`` and ``cu_seqlens`` among them.

    Raises:
        ArgumentError: both are given, or cu_seqlens with batch > 1.
        ShapeError: cu_seqlens is empty.
    """
    cu_seqlens = tensors["cu_seqlens"]
    if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
        return {}
    if cu_seqlens is None:
        return {"num_states": x.shape[0]}
    if tensors["seq_idx"] is not None:
        raise ArgumentError(
            f"{op}: arguments 'seq_idx' and 'cu_seqlens' are both given.\n"
            "One of them says where sequences begin.\n"
            "Pass cu_seqlens with batch 1, or seq_idx with any batch."
        )
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1:
        return {}
    if cu_seqlens.shape[0] < 1:
        raise ShapeError(
            f"{op}: argument 'cu_seqlens' is empty.\n"
            "It must hold the bounds of the sequences, num_seqs + 1 of them.\n"
            "For no sequences at all pass the single bound 0."
        )
    if x.shape[0] != 1:
        raise ArgumentError(
            f"{op}: argument 'cu_seqlens' is given with batch {x.shape[0]}.\n"
            "Packed sequences lie one behind the other in a single row: batch must be 1.\n"
            "Reshape x with x.transpose(0, 1).reshape(1, dim, batch * seqlen), and the other\n"
            "per-token tensors likewise."
        )
    return {"num_states": cu_seqlens.shape[0] - 1}
