# SPDX-License-Identifier: Apache-2.0
"""Tables of names: tensors and configuration keys here, in state-spaces' and transformers' files.

Tensor names here are state-spaces' own. No files are read and nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

EMBEDDING, HEAD = "backbone.embedding.weight", "lm_head.weight"

Layout = Literal["state-spaces", "transformers"]
LAYOUTS: tuple[Layout, ...] = ("state-spaces", "transformers")

TENSORS_FROM_TRANSFORMERS = {"backbone.embeddings.weight": EMBEDDING}
"""Where the two differ; every other tensor of ``MambaForCausalLM`` has the same name here."""

TENSORS_TO_TRANSFORMERS = {ours: theirs for theirs, ours in TENSORS_FROM_TRANSFORMERS.items()}

MODEL_TYPES = {"mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM"}
"""transformers' model_type of what can be built here, and the class that it names."""

CONFIG_FIELDS = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "dt_rank": "time_step_rank",
    "residual_in_fp32": "residual_in_fp32",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
"""Attributes of ``MambaConfig`` and transformers' keys for them."""

MIXER_OPTIONS = {
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init": "time_step_init_scheme",
    "dt_scale": "time_step_scale",
    "dt_init_floor": "time_step_floor",
}
"""The same for arguments of ``nn.Mamba`` that stand in ``MambaConfig.ssm_cfg``."""

TRANSFORMERS_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "vocab_size": 50280,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": "auto",
    "residual_in_fp32": True,
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""What a key that is left out of transformers' config.json means there."""

MIXER_DEFAULTS = {
    "conv_bias": True,
    "bias": False,
    "dt_min": 0.001,
    "dt_max": 0.1,
    "dt_init": "random",
    "dt_scale": 1.0,
    "dt_init_floor": 1e-4,
}
"""``nn.Mamba``'s own defaults, which are transformers' too."""

UNPADDED = "unpadded_vocab_size"
"""Our addition to transformers' config.json: how many rows of the embedding stand for tokens."""


def tensors_from_transformers(name: str) -> str:
    """Our name of a tensor; names of either layout are taken, as transformers takes them."""
    return TENSORS_FROM_TRANSFORMERS.get(name, name)


def tensors_to_layout(name: str, layout: Layout) -> str:
    """A tensor's name in the files of a layout."""
    return TENSORS_TO_TRANSFORMERS.get(name, name) if layout == "transformers" else name


def listed(names: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
