# SPDX-License-Identifier: Apache-2.0
"""The sizes and options of a language model, in and out of the originals' config.json.

No tensors and no file formats other than JSON here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from statescan.errors import ArgumentError, CheckpointError

_SIZES = ("d_model", "n_layer", "vocab_size", "d_state", "d_conv", "pad_vocab_size_multiple")
_SWITCHES = ("rms_norm", "residual_in_fp32", "fused_add_norm", "tie_embeddings")
# Fields that state-spaces checkpoints keep inside ssm_cfg.
_SSM_FIELDS = ("d_state", "d_conv", "expand", "dt_rank")
_SSM_OPTIONS = (
    "dt_min",
    "dt_max",
    "dt_init",
    "dt_scale",
    "dt_init_floor",
    "conv_bias",
    "bias",
    "use_fast_path",
)


@dataclass
class MambaConfig:
    """What a ``MambaLM`` is built from; the defaults are the originals' 2.8B model.

    Attributes:
        d_model: Width of the residual stream.
        n_layer: Number of blocks.
        vocab_size: Tokens that exist; the embedding is padded to a multiple.
        d_state, d_conv, expand, dt_rank: Sizes of each mixer.
        ssm_cfg: Any other argument of ``nn.Mamba``. The four sizes may be given here as well.
        rms_norm: RMSNorm, else LayerNorm.
        residual_in_fp32: Keep the residual stream in float32 in half-precision models.
        fused_add_norm: Read and written for the originals' sake; changes nothing here.
        pad_vocab_size_multiple: The embedding's rows are a multiple of this.
        tie_embeddings: Whether the head shares the embedding's weight.
    """

    d_model: int = 2560
    n_layer: int = 64
    vocab_size: int = 50277
    d_state: int = 16
    d_conv: int = 4
    expand: float = 2
    dt_rank: int | Literal["auto"] = "auto"
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        extra = dict(self.ssm_cfg)
        layer = extra.pop("layer", "Mamba1")
        if layer != "Mamba1":
            raise ArgumentError(
                f"MambaConfig: ssm_cfg names the layer {layer!r}.\n"
                "This version builds 'Mamba1' only.\n"
                "Use a Mamba-1 checkpoint."
            )
        for name in _SSM_FIELDS:
            if name in extra:
                setattr(self, name, extra.pop(name))
        unknown = sorted(set(extra) - set(_SSM_OPTIONS))
        if unknown:
            raise ArgumentError(
                f"MambaConfig: ssm_cfg has the unknown key {unknown[0]!r}.\n"
                f"Known are {', '.join((*_SSM_FIELDS, *_SSM_OPTIONS))}.\n"
                "Correct or remove it."
            )
        self.ssm_cfg = extra
        self._check_values()

    def _check_values(self) -> None:
        sizes = (*_SIZES, *(() if self.dt_rank == "auto" else ("dt_rank",)))
        for name in sizes:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._check(name, whole and value >= 1, "an integer of at least 1")
        for name in _SWITCHES:
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        number = isinstance(self.expand, int | float) and 0 < self.expand < math.inf
        self._check("expand", number, "a number above 0")

    def _check(self, name: str, holds: bool, needed: str) -> None:
        if not holds:
            raise ArgumentError(
                f"MambaConfig: got {name}={getattr(self, name)!r}.\n"
                f"{name} must be {needed}.\n"
                "Correct it, or leave it out for the default."
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        multiple = self.pad_vocab_size_multiple
        return (self.vocab_size + multiple - 1) // multiple * multiple

    def mixer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of each layer's ``nn.Mamba`` that the configuration decides."""
        return {**{name: getattr(self, name) for name in _SSM_FIELDS}, **self.ssm_cfg}

    def to_dict(self) -> dict[str, Any]:
        """The originals' layout: mixer sizes that differ from the defaults stand in ssm_cfg."""
        defaults = {item.name: item.default for item in fields(self)}
        result = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in (*_SSM_FIELDS, "ssm_cfg")
        }
        changed = {
            name: getattr(self, name)
            for name in _SSM_FIELDS
            if getattr(self, name) != defaults[name]
        }
        return {**result, "ssm_cfg": {**changed, **self.ssm_cfg}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MambaConfig:
        """Read ``to_dict``'s layout or a state-spaces config.json.

        Raises:
            ArgumentError: a key is unknown, or asks for layers other than Mamba-1 mixers.
        """
        known = {item.name for item in fields(cls)}
        given = dict(values)
        # Hybrids of other projects put attention or feed-forward layers here; empty means none.
        for name in ("d_intermediate", "attn_layer_idx", "attn_cfg"):
            if given.pop(name, None):
                raise ArgumentError(
                    f"MambaConfig: {name} is {values[name]!r}.\n"
                    "Models of this version have Mamba layers only.\n"
                    "Use a checkpoint without attention or feed-forward layers."
                )
        unknown = sorted(set(given) - known)
        if unknown:
            raise ArgumentError(
                f"MambaConfig: unknown key {unknown[0]!r}.\n"
                f"Known are {', '.join(sorted(known))}.\n"
                "Correct or remove it."
            )
        return cls(**given)

    def to_json(self) -> str:
        """Text of a config.json."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MambaConfig:
        """Inverse of ``to_json``."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"the configuration is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(
                f"the configuration is a JSON {type(values).__name__}, not an object"
            )
        return cls.from_dict(values)

    @classmethod
    def from_file(cls, path: Path) -> MambaConfig:
        """Read a config.json; the error names the file."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist: not a model folder") from error
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        except (ArgumentError, CheckpointError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
