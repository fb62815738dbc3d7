# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from statescan.training import TrainConfig

TEXT = "".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(150))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A run of eight steps on a text of three thousand bytes."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return TrainConfig(
        text=path,
        out=tmp_path / "out",
        steps=8,
        d_model=16,
        n_layer=1,
        d_state=2,
        batch=2,
        seqlen=16,
        warmup=2,
        held_out=0.1,
        eval_every=0,
        save_every=100,
    )
