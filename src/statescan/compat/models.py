# SPDX-License-Identifier: Apache-2.0
"""The language model under mamba_ssm's names: configuration, backbone, head, files.

Weights load from and save to the originals' layout; sampling is in ``generation``.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from statescan.compat.generation import GenerationMixin
from statescan.compat.layer_norm import RMSNorm
from statescan.compat.mamba2 import MHA, Mamba2
from statescan.compat.modules import Block, GatedMLP, Mamba, add_norm
from statescan.errors import ArgumentError, CheckpointError
from statescan.models.hub import CONFIG_NAME, find_model_folder
from statescan.models.safe_files import read_json_object
from statescan.models.tensor_files import read_tensors


@dataclass
class MambaConfig:
    """Sizes and options of a ``MambaLMHeadModel``, as its config.json has them."""

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True


class CausalLMOutput(NamedTuple):
    """logits (batch, seqlen or num_last_tokens, padded vocabulary)."""

    logits: Tensor


def create_block(
    d_model: int,
    d_intermediate: int,
    ssm_cfg: dict[str, Any] | None = None,
    attn_layer_idx: list[int] | None = None,
    attn_cfg: dict[str, Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """One block: a Mamba mixer, or attention where ``layer_idx`` is in ``attn_layer_idx``.

    Attention and Mamba-2 mixers are not served; asking for one raises when it is built.
    """
    placed: dict[str, Any] = {"device": device, "dtype": dtype}
    mixer: Any
    if layer_idx in (attn_layer_idx or ()):
        mixer = partial(MHA, layer_idx=layer_idx, **(attn_cfg or {}), **placed)
    else:
        options = dict(ssm_cfg or {})
        kind = options.pop("layer", "Mamba1")
        if kind not in ("Mamba1", "Mamba2"):
            raise ArgumentError(
                f"create_block: ssm_cfg has layer={kind!r}.\n"
                "It must be 'Mamba1' (or 'Mamba2', which statescan does not serve).\n"
                "Leave it out for Mamba1."
            )
        mixer_cls = Mamba2 if kind == "Mamba2" else Mamba
        mixer = partial(mixer_cls, layer_idx=layer_idx, **options, **placed)
    mlp: Any = nn.Identity
    if d_intermediate:
        mlp = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **placed)
    norm = partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **placed)
    block = Block(
        d_model,
        mixer,
        mlp,
        norm_cls=norm,
        fused_add_norm=fused_add_norm,
        residual_in_fp32=residual_in_fp32,
    )
    block.layer_idx = layer_idx  # type: ignore[assignment]
    return block


@torch.no_grad()
def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """Initial values of one module, for ``nn.Module.apply``; draws in the originals' order.

    Projections back into the residual stream shrink with the square root of the number of sums
    in it, so that its variance does not grow with depth.
    """
    if isinstance(module, nn.Linear):
        if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if rescale_prenorm_residual:
        for name, parameter in module.named_parameters():
            if name in ("out_proj.weight", "fc2.weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                parameter.div_(math.sqrt(n_residuals_per_layer * n_layer))


class MixerModel(nn.Module):
    """Embedding, blocks and final norm; the arguments are those of ``create_block``."""

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int,
        vocab_size: int,
        ssm_cfg: dict[str, Any] | None = None,
        attn_layer_idx: list[int] | None = None,
        attn_cfg: dict[str, Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.embedding = nn.Embedding(vocab_size, d_model, **placed)
        self.layers = nn.ModuleList(
            create_block(
                d_model,
                d_intermediate,
                ssm_cfg=ssm_cfg,
                attn_layer_idx=attn_layer_idx,
                attn_cfg=attn_cfg,
                norm_epsilon=norm_epsilon,
                rms_norm=rms_norm,
                residual_in_fp32=residual_in_fp32,
                fused_add_norm=fused_add_norm,
                layer_idx=i,
                **placed,
            )
            for i in range(n_layer)
        )
        norm = RMSNorm if rms_norm else nn.LayerNorm
        self.norm_f = norm(d_model, eps=norm_epsilon, **placed)
        self.apply(
            partial(
                _init_weights,
                n_layer=n_layer,
                **(initializer_cfg or {}),
                n_residuals_per_layer=2 if d_intermediate else 1,
            )
        )

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Empty states of every layer by its number."""
        return {
            i: layer.allocate_inference_cache(  # type: ignore[operator]
                batch_size, max_seqlen, dtype=dtype, **kwargs
            )
            for i, layer in enumerate(self.layers)
        }

    def forward(
        self, input_ids: Tensor, inference_params: Any = None, **mixer_kwargs: Any
    ) -> Tensor:
        """Hidden states (batch, seqlen, d_model) of input_ids (batch, seqlen)."""
        hidden_states: Tensor = self.embedding(input_ids)
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(
                hidden_states, residual, inference_params=inference_params, **mixer_kwargs
            )
        return add_norm(
            *(self.norm_f, hidden_states, residual, self.fused_add_norm, self.residual_in_fp32)
        )[0]


class MambaLMHeadModel(nn.Module, GenerationMixin):
    """Mamba-1 language model with the originals' constructor, files and ``generate``.

    Args:
        config: Sizes and options.
        initializer_cfg: Arguments of ``_init_weights``.
        device, dtype: Of the parameters; A_log, D and dt_proj.bias stay float32.
    """

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        multiple = config.pad_vocab_size_multiple
        rows = -(-config.vocab_size // multiple) * multiple
        self.backbone = MixerModel(
            config.d_model,
            config.n_layer,
            config.d_intermediate,
            rows,
            ssm_cfg=config.ssm_cfg,
            attn_layer_idx=config.attn_layer_idx,
            attn_cfg=config.attn_cfg,
            rms_norm=config.rms_norm,
            initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm,
            residual_in_fp32=config.residual_in_fp32,
            **placed,
        )
        self.lm_head = nn.Linear(config.d_model, rows, bias=False, **placed)
        # A second pass over the backbone, as the originals make it: later draws depend on it.
        self.apply(partial(_init_weights, n_layer=config.n_layer, **(initializer_cfg or {})))
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head use the embedding's weight, if the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Empty states of every layer, for ``InferenceParams.key_value_memory_dict``."""
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput:
        """Logits of the next token.

        Args:
            input_ids: (batch, seqlen).
            position_ids: Taken for other programs' sake; a Mamba knows no positions.
            inference_params: States to continue from, updated in place.
            num_last_tokens: Logits of only so many last positions; 0 means all.
            mixer_kwargs: Passed to every mixer, such as seq_idx.
        """
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        if num_last_tokens > 0:
            hidden_states = hidden_states[:, -num_last_tokens:]
        return CausalLMOutput(self.lm_head(hidden_states))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> MambaLMHeadModel:
        """A checkpoint in the originals' layout, from a folder or the hub; runs none of its code.

        safetensors and shards are read as well as pytorch_model.bin.
        """
        values = load_config_hf(pretrained_model_name)
        try:
            config = MambaConfig(**values)
        except TypeError as error:
            raise CheckpointError(
                f"{pretrained_model_name}: {CONFIG_NAME} is not one of mamba_ssm: {error}"
            ) from error
        model = cls(config, device=device, dtype=dtype, **kwargs)
        state = load_state_dict_hf(pretrained_model_name, device=device, dtype=dtype)
        if config.tie_embeddings:
            state.setdefault("lm_head.weight", state["backbone.embedding.weight"])
        model.load_state_dict(state)
        return model

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write config.json and pytorch_model.bin as mamba_ssm does; the folder is made."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / "pytorch_model.bin")
        text = json.dumps(self.config.__dict__, indent=4)
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def load_config_hf(model_name: str) -> dict[str, Any]:
    """The config.json of a folder or hub id."""
    return dict(read_json_object(find_model_folder(model_name, None) / CONFIG_NAME))


def load_state_dict_hf(
    model_name: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The tensors of a folder or hub id, moved to ``device`` and converted to ``dtype``.

    A_log, D and the time step's bias keep their precision.
    """
    kept = (".A_log", ".D", ".dt_proj.bias")
    return {
        name: tensor.to(device=device, dtype=None if name.endswith(kept) else dtype)
        for name, tensor in read_tensors(find_model_folder(model_name, None)).items()
    }
