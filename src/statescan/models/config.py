# SPDX-License-Identifier: Apache-2.0
"""The sizes and options of a language model, in and out of the originals' config.json.

No tensors and no file formats other than JSON here; transformers' config.json is
``config_transformers``'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from statescan.errors import ArgumentError, CheckpointError
from statescan.models.safe_files import one_line

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
_SSM_SWITCHES = ("conv_bias", "bias", "use_fast_path")
_SSM_NUMBERS = ("dt_min", "dt_max", "dt_scale", "dt_init_floor")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LARGEST = 2**31 - 1
"""Of every size; a product of two then fits into 64 bits."""

ORIGINAL_EPS = 1e-5
"""What the originals' norms add to the mean square; their config.json has no word for it."""


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
        norm_eps: Added to the mean square in the norms of the residual stream.
        mixer_norm_eps: If given, dt, B and C of each mixer pass a norm without weights that adds
            this, as in Falcon-Mamba.
        bos_token_id, eos_token_id, pad_token_id: Tokens with a meaning, where the checkpoint names
            them; they change nothing in the model.
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
    norm_eps: float = ORIGINAL_EPS
    mixer_norm_eps: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        self._check("ssm_cfg", isinstance(self.ssm_cfg, Mapping), "a table of names and values")
        extra = dict(self.ssm_cfg)
        layer = extra.pop("layer", "Mamba1")
        if layer != "Mamba1":
            raise ArgumentError(
                f"MambaConfig: ssm_cfg names the layer {one_line(repr(layer))}.\n"
                "This version builds 'Mamba1' only.\n"
                "Use a Mamba-1 checkpoint."
            )
        for name in _SSM_FIELDS:
            if name in extra:
                setattr(self, name, extra.pop(name))
        unknown = sorted(set(extra) - set(_SSM_OPTIONS))
        if unknown:
            raise ArgumentError(
                f"MambaConfig: ssm_cfg has the unknown key {one_line(repr(unknown[0]))}.\n"
                f"Known are {', '.join((*_SSM_FIELDS, *_SSM_OPTIONS))}.\n"
                "Correct or remove it."
            )
        self.ssm_cfg = extra
        self._check_values()

    def _check_values(self) -> None:
        sizes = (*_SIZES, *(() if self.dt_rank == "auto" else ("dt_rank",)))
        for name in sizes:
            self._check(name, _whole(getattr(self, name), 1), f"an integer from 1 to {_LARGEST}")
        for name in _SWITCHES:
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        self._check("expand", _positive(self.expand), f"a number above 0, at most {_LARGEST}")
        self._check("norm_eps", _positive(self.norm_eps), "a number above 0")
        given = self.mixer_norm_eps is None or _positive(self.mixer_norm_eps)
        self._check("mixer_norm_eps", given, "a number above 0, or None")
        for name in _TOKEN_IDS:
            value = getattr(self, name)
            several = name == "eos_token_id" and isinstance(value, list)
            ids = value if several else [] if value is None else [value]
            self._check(name, all(_whole(one, 0) for one in ids), "a token's number, or None")
        for name, value in self.ssm_cfg.items():
            switch = name not in _SSM_SWITCHES or isinstance(value, bool)
            self._check_option(name, switch, "true or false")
            number = name not in _SSM_NUMBERS or _positive(value)
            self._check_option(name, number, "a number above 0")

    def _check(self, name: str, holds: bool, needed: str) -> None:
        if not holds:
            raise ArgumentError(
                f"MambaConfig: got {name}={one_line(repr(getattr(self, name)))}.\n"
                f"{name} must be {needed}.\n"
                "Correct it, or leave it out for the default."
            )

    def _check_option(self, name: str, holds: bool, needed: str) -> None:
        if not holds:
            raise ArgumentError(
                f"MambaConfig: ssm_cfg has {name}={one_line(repr(self.ssm_cfg[name]))}.\n"
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
        """The originals' layout: mixer sizes that differ from the defaults stand in ssm_cfg.

        The numbers of special tokens have no place there and are left out.

        Raises:
            ArgumentError: the model has norms that the layout cannot express.
        """
        if self.norm_eps != ORIGINAL_EPS or self.mixer_norm_eps is not None:
            raise ArgumentError(
                f"MambaConfig: norm_eps={self.norm_eps}, mixer_norm_eps={self.mixer_norm_eps}.\n"
                f"The state-spaces layout has norm_eps={ORIGINAL_EPS} and no mixer norms.\n"
                "Use the transformers layout: save_model(..., layout='transformers')."
            )
        changed = {
            name: getattr(self, name)
            for name in _SSM_FIELDS
            if getattr(self, name) != _DEFAULTS[name]
        }
        result = {name: getattr(self, name) for name in _STATE_SPACES_KEYS}
        return {**result, "ssm_cfg": {**changed, **self.ssm_cfg}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MambaConfig:
        """Read ``to_dict``'s layout or a state-spaces config.json.

        Raises:
            ArgumentError: a key is unknown, or asks for layers other than Mamba-1 mixers.
        """
        known = {*_STATE_SPACES_KEYS, *_SSM_FIELDS, "ssm_cfg"}
        given = dict(values)
        # Hybrids of other projects put attention or feed-forward layers here; empty means none.
        for name in ("d_intermediate", "attn_layer_idx", "attn_cfg"):
            if given.pop(name, None):
                raise ArgumentError(
                    f"MambaConfig: {name} is {one_line(repr(values[name]))}.\n"
                    "Models of this version have Mamba layers only.\n"
                    "Use a checkpoint without attention or feed-forward layers."
                )
        unknown = sorted(set(given) - known)
        if unknown:
            raise ArgumentError(
                f"MambaConfig: unknown key {one_line(repr(unknown[0]))}.\n"
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
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"the configuration is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(
                f"the configuration is a JSON {type(values).__name__}, not an object"
            )
        return cls.from_dict(values)


_DEFAULTS = {item.name: item.default for item in fields(MambaConfig)}
_STATE_SPACES_KEYS = (
    *("d_model", "n_layer", "vocab_size", "rms_norm", "residual_in_fp32", "fused_add_norm"),
    *("pad_vocab_size_multiple", "tie_embeddings"),
)


def _whole(value: object, least: int) -> bool:
    """An integer, and neither a bool nor larger than any size can be."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


def _positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= _LARGEST  # type: ignore[operator]
