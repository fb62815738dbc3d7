# SPDX-License-Identifier: Apache-2.0
"""Turns transformers' config.json into a ``MambaConfig`` and back, without transformers.

The tables are in ``key_maps``; no tensors and no files here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from statescan.errors import ArgumentError
from statescan.models.config import MambaConfig
from statescan.models.key_maps import (
    CONFIG_FIELDS,
    MIXER_DEFAULTS,
    MIXER_OPTIONS,
    MODEL_TYPES,
    TRANSFORMERS_DEFAULTS,
    UNPADDED,
)
from statescan.models.safe_files import one_line

_log = logging.getLogger(__name__)

_MULTIPLE = "pad_vocab_size_multiple"
_READ = {
    *CONFIG_FIELDS.values(),
    *MIXER_OPTIONS.values(),
    *("model_type", "hidden_act", "expand", "intermediate_size", "mixer_rms_eps"),
    *(UNPADDED, _MULTIPLE),
}


def config_from_transformers(values: Mapping[str, Any]) -> MambaConfig:
    """The configuration of a ``MambaForCausalLM`` or ``FalconMambaForCausalLM``.

    Other keys than those of the tables are left aside, as transformers leaves them aside in the
    logits (``use_cache``, ``initializer_range``, ...), and named in the log at the level INFO.

    Raises:
        ArgumentError: it describes another architecture, or a value is not one of the allowed.
    """
    _check_architecture(values)
    given = {**TRANSFORMERS_DEFAULTS, **values}
    mixer = {
        ours: values[theirs]
        for ours, theirs in MIXER_OPTIONS.items()
        # Defaults are left out, so that the configuration reads the same in either layout.
        if theirs in values and values[theirs] != MIXER_DEFAULTS[ours]
    }
    ignored = values.keys() - _READ
    if ignored:
        _log.info("config.json: not used are %s", one_line(", ".join(sorted(ignored))))
    falcon = values["model_type"] == "falcon_mamba"
    config = MambaConfig(
        **{ours: given[theirs] for ours, theirs in CONFIG_FIELDS.items()},
        expand=given["expand"],
        ssm_cfg=mixer,
        pad_vocab_size_multiple=1,
        mixer_norm_eps=given["mixer_rms_eps"] if falcon else None,
    )
    _set_inner_size(config, values.get("intermediate_size"))
    _set_padding(config, values.get(UNPADDED), values.get(_MULTIPLE))
    return config


def config_to_transformers(config: MambaConfig) -> dict[str, Any]:
    """The inverse: what transformers reads to build the same model.

    Raises:
        ArgumentError: the model has LayerNorms, which transformers' Mamba has not.
    """
    if not config.rms_norm:
        raise ArgumentError(
            "MambaConfig: rms_norm is False.\n"
            "transformers' Mamba has RMS norms only.\n"
            "Save in the state-spaces layout."
        )
    model_type = "mamba" if config.mixer_norm_eps is None else "falcon_mamba"
    d_inner = int(config.expand * config.d_model)
    result = {theirs: getattr(config, ours) for ours, theirs in CONFIG_FIELDS.items()}
    for ours, theirs in MIXER_OPTIONS.items():
        result[theirs] = config.ssm_cfg.get(ours, MIXER_DEFAULTS[ours])
    if config.mixer_norm_eps is not None:
        result["mixer_rms_eps"] = config.mixer_norm_eps
    # transformers has no padding of its own: the rows of the embedding are the vocabulary.
    result["vocab_size"] = config.padded_vocab_size
    if config.padded_vocab_size != config.vocab_size:
        result[UNPADDED] = config.vocab_size
        result[_MULTIPLE] = config.pad_vocab_size_multiple
    if config.dt_rank == "auto":
        result["time_step_rank"] = math.ceil(config.d_model / 16)
    return {
        **result,
        "architectures": [MODEL_TYPES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        # transformers takes whole numbers only; intermediate_size is what decides there.
        "expand": max(1, d_inner // config.d_model),
        "intermediate_size": d_inner,
        "use_cache": True,
    }


def _check_architecture(values: Mapping[str, Any]) -> None:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ArgumentError(
            f"config.json has model_type {one_line(repr(model_type))}.\n"
            f"This version builds {' and '.join(MODEL_TYPES)}.\n"
            "Use a Mamba-1 checkpoint."
        )
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ArgumentError(
            f"config.json has hidden_act {one_line(repr(values['hidden_act']))}.\n"
            "The convolution's activation is 'silu' here.\n"
            "Use a checkpoint that was trained with it."
        )
    if values.get("quantization_config"):
        raise ArgumentError(
            "config.json has a quantization_config.\n"
            "Weights must be stored in floating point.\n"
            "Use the checkpoint that was quantised, or save it unquantised from transformers."
        )


def _set_inner_size(config: MambaConfig, d_inner: object) -> None:
    """Let ``expand`` give just that many channels; transformers too prefers the size."""
    if d_inner is None or d_inner == int(config.expand * config.d_model):
        return
    if not isinstance(d_inner, int) or isinstance(d_inner, bool) or not 1 <= d_inner < 2**31:
        raise ArgumentError(
            f"config.json has intermediate_size {one_line(repr(d_inner))}.\n"
            f"It must be an integer from 1 to {2**31 - 1}.\n"
            "Correct it, or leave it out for expand * hidden_size."
        )
    expand = d_inner / config.d_model
    while int(expand * config.d_model) < d_inner:
        # 100 / 48 * 48 is 99.99999999999999.
        expand = math.nextafter(expand, math.inf)
    config.expand = int(expand) if expand == int(expand) else expand


def _set_padding(config: MambaConfig, tokens: object, multiple: object) -> None:
    """Undo ``config_to_transformers``'s padding: only the first ``tokens`` rows are tokens."""
    rows = config.vocab_size
    if tokens is None:
        return
    padded = dataclasses.replace(
        config,
        vocab_size=tokens,  # type: ignore[arg-type]
        pad_vocab_size_multiple=multiple,  # type: ignore[arg-type]
    )
    if padded.padded_vocab_size != rows:
        # Whoever resized the embedding since then has given the new rows a meaning.
        _log.info("%s=%s no longer fits vocab_size=%s: not used", UNPADDED, tokens, rows)
        return
    config.vocab_size, config.pad_vocab_size_multiple = (
        padded.vocab_size,
        padded.pad_vocab_size_multiple,
    )
