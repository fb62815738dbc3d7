# SPDX-License-Identifier: Apache-2.0
"""Everything that decides a training run, checked before it starts.

No training happens here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from statescan.errors import ArgumentError
from statescan.models.config import MambaConfig
from statescan.models.tokenizer import ByteTokenizer

_POSITIVE = (
    *("steps", "d_model", "n_layer", "d_state", "d_conv", "expand", "batch", "seqlen"),
    *("eval_every", "eval_bytes", "save_every", "log_every"),
)
_NUMBERS = (
    *("lr", "min_lr_ratio", "warmup", "weight_decay", "beta1", "beta2", "grad_clip", "held_out"),
)
_CHOICES = {"windows": ("random", "carried"), "dtype": ("bfloat16", "float16", "float32")}
# What a resumed run may change: nothing here touches the weights.
_FREE = (
    *("out", "text", "resume", "dtype", "device"),
    *("eval_every", "eval_bytes", "save_every", "log_every"),
)


@dataclass(frozen=True)
class TrainConfig:
    """A byte-level training run.

    Attributes:
        text: File to learn from; its bytes are the tokens.
        out: Folder for config.json, model.safetensors and training.pt.
        steps: Optimiser steps of the whole run, which also set the learning rate's schedule.
        d_model, n_layer, d_state, d_conv, expand: Sizes of the model.
        batch: Windows a step.
        seqlen: Bytes that each window predicts.
        lr: Highest learning rate, reached after ``warmup`` steps.
        min_lr_ratio: Last learning rate as a fraction of the highest.
        warmup: Steps of linear rise; the rest is a cosine.
        weight_decay: Of matrices; biases, norms and state-space parameters have none.
        beta1, beta2: Of AdamW.
        grad_clip: Largest norm of the gradient; 0 does not clip.
        windows: "random" windows in a shuffled order without gaps or overlap, shifted each pass;
            "carried" reads the text in order, ``batch`` lanes side by side, states kept.
        held_out: Fraction of the text, at its end, that is never trained on.
        seed: Of initial weights and order.
        resume: Continue the run in ``out`` exactly where it was saved.
        eval_every: Steps between evaluations on the held-out text; 0 only at the end.
        eval_bytes: Most held-out bytes of an evaluation before the last; the last reads all.
        save_every: Steps between saves.
        log_every: Steps between plain progress lines.
        dtype: Of the stored weights.
        device: "auto" is CUDA where there is a GPU, else the CPU. Weights start equal on all.
    """

    text: Path
    out: Path
    steps: int = 1000
    d_model: int = 128
    n_layer: int = 4
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    batch: int = 8
    seqlen: int = 256
    lr: float = 3e-3
    min_lr_ratio: float = 0.05
    warmup: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    windows: str = "random"
    held_out: float = 0.05
    seed: int = 0
    resume: bool = False
    eval_every: int = 500
    eval_bytes: int = 65536
    save_every: int = 500
    log_every: int = 10
    dtype: str = "bfloat16"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("text", "out"):
            path = getattr(self, name)
            self._check(name, isinstance(path, (str, Path)) and str(path) != "", "a path")
            object.__setattr__(self, name, Path(path))
        for name in _POSITIVE:
            value = getattr(self, name)
            least = 0 if name == "eval_every" else 1
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._check(name, whole and value >= least, f"an integer, {least} or more")
        most = (2**31 - 1) // self.seqlen
        self._check("batch", self.batch <= most, f"at most {most} for seqlen {self.seqlen}")
        for name, choices in _CHOICES.items():
            self._check(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        self._check("seed", whole and -(2**63) <= self.seed < 2**63, "an integer of 64 bits")
        for name in _NUMBERS:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            self._check(name, number and math.isfinite(value), "a finite number")
        self._check("device", isinstance(self.device, str), "a text such as 'cpu'")
        self._check("lr", self.lr > 0, "above 0")
        self._check("held_out", 0 < self.held_out < 1, "between 0 and 1")
        self._check("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "from 0 to 1")
        for name in ("warmup", "weight_decay", "grad_clip"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("beta1", "beta2"):
            self._check(name, 0 <= getattr(self, name) < 1, "from 0 to below 1")

    def _check(self, name: str, holds: bool, needed: str) -> None:
        if not holds:
            raise ArgumentError(
                f"train: got {name}={getattr(self, name)!r}.\n"
                f"{name} must be {needed}.\n"
                "Correct it, or leave it out for the default."
            )

    def model_config(self) -> MambaConfig:
        """The model that this run trains."""
        return MambaConfig(
            d_model=self.d_model,
            n_layer=self.n_layer,
            vocab_size=ByteTokenizer.vocab_size,
            d_state=self.d_state,
            d_conv=self.d_conv,
            expand=self.expand,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, paths as text."""
        values = asdict(self)
        return {**values, "text": str(self.text), "out": str(self.out)}

    def check_resumes(self, saved: dict[str, Any]) -> None:
        """Refuse to continue a run that was started with other settings."""
        mine = self.to_dict()
        for item in fields(self):
            name = item.name
            if name not in _FREE and mine[name] != saved.get(name):
                raise ArgumentError(
                    f"train: {name} is {mine[name]!r}, and {saved.get(name)!r} in the saved run.\n"
                    "A resumed run must have the settings it was started with.\n"
                    f"Use the saved value of {name}, or another --out for a new run."
                )
