# SPDX-License-Identifier: Apache-2.0
"""The small byte-level model in the package, so that text comes out without a download.

How it was made is in ``data/card.md``; nothing is trained here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from statescan.errors import CheckpointError
from statescan.models.checkpoint import WEIGHTS_NAME, load_model
from statescan.models.lm import MambaLM
from statescan.models.tokenizer import ByteTokenizer

CARD_NAME = "card.md"


def embedded_directory() -> Path:
    """Folder of the model's files; it need not hold them in a source tree before training."""
    return Path(__file__).parent / "data"


def embedded_card() -> str:
    """The model card: corpus, sizes, command and measured quality."""
    path = embedded_directory() / CARD_NAME
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"the embedded model's card cannot be read: {error}") from error


def load_embedded(
    *, device: torch.device | str | None = None, dtype: torch.dtype | None = torch.float32
) -> tuple[MambaLM, ByteTokenizer]:
    """The embedded model, in evaluation mode, and its tokenizer.

    Args:
        device: Default torch's default device, usually the CPU.
        dtype: float32 by default, though the weights are stored in bfloat16; None keeps them so.
    """
    folder = embedded_directory()
    if not (folder / WEIGHTS_NAME).is_file():
        raise CheckpointError(
            f"this installation has no embedded model ({folder / WEIGHTS_NAME} is missing): "
            "reinstall statescan, or train one with `statescan train --text FILE --out DIR`"
        )
    return load_model(folder, device=device, dtype=dtype), ByteTokenizer()
