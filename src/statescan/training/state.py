# SPDX-License-Identifier: Apache-2.0
"""training.pt: everything that an exact continuation needs, written atomically.

What is in the folder for users of the model is ``models.checkpoint``'s business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from statescan.errors import CheckpointError
from statescan.models.checkpoint import write_atomically

STATE_NAME = "training.pt"
_VERSION = 1
_KEYS = ("settings", "corpus_sha256", "step", "seconds", "model", "optimizer", "rng", "cache")


def save_state(folder: Path, **state: Any) -> None:
    """Write the state of a run; a crash in between leaves the previous one untouched."""
    content = {"version": _VERSION, **state}
    write_atomically(folder / STATE_NAME, lambda path: torch.save(content, path))


def load_state(folder: Path) -> dict[str, Any]:
    """Read what ``save_state`` wrote."""
    path = folder / STATE_NAME
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: no run to resume, leave --resume out")
    try:
        # weights_only: a state file from elsewhere must not run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Unpickling a damaged file raises almost anything.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged: {reason}") from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise CheckpointError(f"{path} was written by another version of statescan")
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise CheckpointError(f"{path} lacks {missing[0]!r}")
    return state
