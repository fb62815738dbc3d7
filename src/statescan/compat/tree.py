# SPDX-License-Identifier: Apache-2.0
"""Which module of the originals offers which name, and what serves it here.

A table only: modules are made from it in ``aliases``. Paths and names are those of mamba-ssm
2.3.2.post1 and causal-conv1d 1.7.0, older paths that programs still use, and forks.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS = {"mamba-ssm": "2.3.2.post1+statescan", "causal-conv1d": "1.7.0+statescan"}
"""Versions of the distributions whose names are served: those whose signatures are kept."""

DISTRIBUTIONS = {
    "mamba-ssm": ("mamba_ssm", "selective_scan_cuda"),
    "causal-conv1d": ("causal_conv1d", "causal_conv1d_cuda"),
}
"""Top-level modules that each distribution of the originals brings."""

FORKS = tuple(f"selective_scan_cuda_{name}" for name in ("core", "oflex", "nrow", "ndstate"))
"""Extension modules that VMamba builds for itself, and that belong to no distribution here."""


def _names(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_SCAN = _names("selective_scan", "selective_scan_fn", "selective_scan_ref", "SelectiveScanFn")
_INNER = _names("mamba_inner", "mamba_inner_fn", "mamba_inner_ref", "MambaInnerFn")
_FORK_INNER = _names("mamba_inner", "bimamba_inner_fn", "mamba_inner_fn_no_out_proj")
_UPDATE = _names("selective_state_update", "selective_state_update", "selective_state_update_ref")
_NORM = _names(
    *("layer_norm", "RMSNorm", "layer_norm_fn", "rms_norm_fn", "layer_norm_ref", "rms_norm_ref"),
    *("layer_norm_linear_fn", "LayerNormFn"),
)
_GATED = _names(
    "layernorm_gated", "RMSNorm", "LayerNorm", "rmsnorm_fn", "layernorm_fn", "rms_norm_ref"
)
_SSD = _names(
    *("mamba2", "mamba_chunk_scan_combined", "mamba_chunk_scan", "ssd_selective_scan"),
    *("mamba_split_conv1d_scan_combined", "mamba_split_conv1d_scan_ref", "mamba_conv1d_scan_ref"),
    "ssd_chunk_scan_combined_ref",
)
_MAMBA = _names("modules", "Mamba")
_BLOCK = _names("modules", "Block")
_CONFIG = _names("models", "MambaConfig")
_MODEL = _names("models", "MambaLMHeadModel", "MixerModel", "create_block", "_init_weights")
_GENERATION = _names(
    *("generation", "InferenceParams", "GenerationMixin", "DecodingCGCache", "decode", "sample"),
    *("modify_logits_for_min_p_filtering", "modify_logits_for_top_k_filtering"),
    *("modify_logits_for_top_p_filtering", "modify_logit_for_repetition_penalty"),
    *("update_graph_cache", "capture_graph"),
)
_CONV = _names(
    *("causal_conv1d", "causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_ref"),
    *("causal_conv1d_update_ref", "CausalConv1dFn"),
)
_VARLEN = _names("causal_conv1d", "causal_conv1d_varlen_states", "causal_conv1d_varlen_states_ref")
_RAW_CONV = _names(
    *("causal_conv1d_raw", "causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update")
)
_FUNCTIONAL_CONV = _names(
    *("causal_conv1d_raw", "causal_conv1d_fwd_function", "causal_conv1d_bwd_function"),
    "causal_conv1d_update_function",
)
_UNGATED = {
    "fwd": "selective_scan_raw:fwd_ungated",
    "bwd": "selective_scan_raw:bwd_ungated",
}

MODULES: Mapping[str, Mapping[str, str]] = {
    # Everything at the top as well: transformers 5.0 looks for the ops there only.
    "mamba_ssm": {
        **_SCAN, **_INNER, **_UPDATE, **_SSD, **_MAMBA, **_NORM,
        "Mamba2": "mamba2:Mamba2", "Mamba3": "mamba2:Mamba3",
        "MambaLMHeadModel": "models:MambaLMHeadModel",
    },
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": {
        **_SCAN, **_INNER, **_FORK_INNER, "rms_norm_forward": "mamba_inner:rms_norm_forward",
        **_names("causal_conv1d", "causal_conv1d_fn"),
    },
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.selective_state_update": _UPDATE,
    "mamba_ssm.ops.triton.layer_norm": _NORM,
    "mamba_ssm.ops.triton.layernorm": _NORM,
    "mamba_ssm.ops.triton.layernorm_gated": _GATED,
    "mamba_ssm.ops.triton.ssd_combined": _SSD,
    "mamba_ssm.modules": {},
    # Version 1 had the block here, without an MLP; version 2 has none here.
    "mamba_ssm.modules.mamba_simple": {**_MAMBA, "Block": "modules:BlockV1"},
    "mamba_ssm.modules.mamba2": _names("mamba2", "Mamba2"),
    "mamba_ssm.modules.mamba2_simple": _names("mamba2", "Mamba2Simple"),
    "mamba_ssm.modules.mamba3": _names("mamba2", "Mamba3"),
    "mamba_ssm.modules.block": _BLOCK,
    "mamba_ssm.modules.mlp": _names("modules", "GatedMLP"),
    "mamba_ssm.modules.mha": _names("mamba2", "MHA"),
    "mamba_ssm.models": {},
    "mamba_ssm.models.config_mamba": _CONFIG,
    "mamba_ssm.models.mixer_seq_simple": {**_MODEL, **_CONFIG, **_MAMBA, **_BLOCK},
    "mamba_ssm.utils": {},
    "mamba_ssm.utils.generation": _GENERATION,
    "mamba_ssm.utils.hf": _names("models", "load_config_hf", "load_state_dict_hf"),
    "mamba_ssm.utils.torch": _names("utils", "custom_fwd", "custom_bwd"),
    "mamba_ssm.utils.determinism": _names(
        "utils", "use_deterministic_mode", "set_deterministic_mode"
    ),
    "causal_conv1d": {**_CONV, **_VARLEN},
    "causal_conv1d.causal_conv1d_interface": _CONV,
    "causal_conv1d.causal_conv1d_varlen": _VARLEN,
    "causal_conv1d.cpp_functions": _FUNCTIONAL_CONV,
    "selective_scan_cuda": _names("selective_scan_raw", "fwd", "bwd"),
    "causal_conv1d_cuda": _RAW_CONV,
    **dict.fromkeys(FORKS, _UNGATED),
}  # fmt: skip
"""Served modules, and for each name ``module of statescan.compat:name there``."""


def is_package(module: str) -> bool:
    """Whether other served modules lie inside it."""
    return any(name.startswith(f"{module}.") for name in MODULES)


def distribution_of(module: str) -> str | None:
    """The distribution that brings a served module, None for the forks' own."""
    top = module.split(".")[0]
    for name, modules in DISTRIBUTIONS.items():
        if top in modules:
            return name
    return None
