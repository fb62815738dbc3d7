# SPDX-License-Identifier: Apache-2.0
"""The Mamba language model: embedding, blocks, final norm and head, under state-spaces' key names.

Sampling lives in ``generation``, files in ``checkpoint``; no kernel choice here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan.errors import ArgumentError, DtypeError, ShapeError
from statescan.models.config import MambaConfig
from statescan.models.initialise import initialise_weights
from statescan.models.mixer_norms import add_mixer_norms
from statescan.nn import Block, InferenceCache, LayerNorm, Mamba, RMSNorm
from statescan.nn.plain import is_plain, is_untouched
from statescan.ops._fused_decode import fused_linear, fused_mamba_stack

if TYPE_CHECKING:
    from statescan.models.key_maps import Layout

IGNORED_LABEL = -100


class MambaOutput(NamedTuple):
    """logits (batch, seqlen or num_last_tokens, padded vocabulary); loss if labels were given."""

    logits: Tensor
    loss: Tensor | None = None


class MambaBackbone(nn.Module):
    """Embedding, blocks and final norm: tokens in, hidden states out."""

    def __init__(
        self,
        config: MambaConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        norm_cls: type[nn.Module] = RMSNorm if config.rms_norm else LayerNorm
        norm: Callable[[int], nn.Module] = partial(norm_cls, eps=config.norm_eps, **placed)
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, **placed)
        self.layers = nn.ModuleList(
            Block(
                config.d_model,
                partial(Mamba, layer_idx=i, **config.mixer_arguments(), **placed),
                norm,
                config.residual_in_fp32,
            )
            for i in range(config.n_layer)
        )
        self.norm_f = norm(config.d_model)
        if config.mixer_norm_eps is not None:
            for block in self.blocks():
                add_mixer_norms(block.mixer, config.mixer_norm_eps)
        initialise_weights(self, config.n_layer)

    def blocks(self) -> Iterator[Block]:
        """The layers with their type."""
        return (cast(Block, layer) for layer in self.layers)

    def forward(
        self,
        input_ids: Tensor,
        cache: InferenceCache | None = None,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (batch, seqlen, d_model) of input_ids; ``cache`` is updated in place."""
        hidden_states = self.embedding(input_ids)
        if cache is not None and input_ids.shape[1] == 1 and seq_idx is None and cu_seqlens is None:
            stepped = self._step(hidden_states, cache)
            if stepped is not None:
                cache.seqlen_offset += 1
                return stepped
        residual = None
        for i, layer in enumerate(self.layers):
            hidden_states, residual = layer(
                hidden_states,
                residual,
                None if cache is None else cache[i],
                seq_idx=seq_idx,
                cu_seqlens=cu_seqlens,
            )
        summed = hidden_states if residual is None else hidden_states + residual
        if cache is not None:
            cache.seqlen_offset += input_ids.shape[1]
        normed: Tensor = self.norm_f(summed)
        return normed.to(hidden_states.dtype)

    def _step(self, hidden_states: Tensor, cache: InferenceCache) -> Tensor | None:
        """All layers on one token a row, at once; None where they must be called one by one."""
        if torch.is_grad_enabled() or not self.layers or type(self.norm_f) is not RMSNorm:
            return None
        if not is_plain(self.norm_f, (RMSNorm,)):
            return None
        layers: list[tuple[Tensor | None, ...]] = []
        for i, block in enumerate(self.blocks()):
            norm, mixer = block.norm, block.mixer
            if not (isinstance(norm, RMSNorm) and isinstance(mixer, Mamba)):
                return None
            if not (is_untouched(block, Block) and is_untouched(mixer, Mamba)):
                return None
            if not is_plain(norm, (RMSNorm,)) or norm.eps != self.norm_f.eps:
                return None
            weights = mixer.step_weights()
            if weights is None:
                return None
            conv_state, ssm_state = cache[i]
            layers.append((norm.weight, conv_state, ssm_state, *weights))
        rows = hidden_states.squeeze(1)
        found = fused_mamba_stack(rows, self.norm_f.weight, layers, self.norm_f.eps)
        return None if found is None else found.unsqueeze(1)


class MambaLM(nn.Module):
    """Mamba-1 language model.

    Args:
        config: Sizes and options.
        device, dtype: Of the parameters; those of the state space stay float32.
    """

    def __init__(
        self,
        config: MambaConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = MambaBackbone(config, device, dtype)
        self.lm_head = nn.Linear(
            config.d_model, config.padded_vocab_size, bias=False, device=device, dtype=dtype
        )
        # The originals initialise the backbone twice; doing it once would shift every later draw.
        initialise_weights(self, config.n_layer)
        self.tie_weights()

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
    ) -> MambaLM:
        """``load_model``: a folder or a hub id, in state-spaces' layout or in transformers'."""
        # Files are above the model, which must not need them to be built.
        from statescan.models.checkpoint import load_model

        return load_model(source, device=device, dtype=dtype, revision=revision)

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        layout: Layout = "state-spaces",
        max_shard_size: int | str | None = None,
    ) -> None:
        """``save_model``: config.json and model.safetensors, or its shards."""
        from statescan.models.checkpoint import save_model

        save_model(self, directory, dtype=dtype, layout=layout, max_shard_size=max_shard_size)

    def tie_weights(self) -> None:
        """Let the head use the embedding's weight, if the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        cache: InferenceCache | None = None,
        num_last_tokens: int = 0,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> MambaOutput:
        """Logits of the next token at every position; ``cache`` is updated in place.

        Args:
            input_ids: (batch, seqlen) integers.
            labels: (batch, seqlen), usually input_ids itself: position t is predicted from what
                stands before t. -100 is ignored, and so is the first token of a packed sequence.
            cache: States to continue from, of ``allocate_inference_cache``.
            num_last_tokens: Compute logits of only so many last positions; 0 means all.
            seq_idx: (batch, seqlen) ids of packed sequences; negative ids are padding.
            cu_seqlens: (num_seqs + 1,) borders of packed sequences, for batch 1.

        Returns:
            ``MambaOutput(logits, loss)``; the loss is the mean over the labels that count.
        """
        self._check(input_ids, labels, num_last_tokens)
        hidden_states = self.backbone(input_ids, cache, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
        if num_last_tokens > 0:
            hidden_states = hidden_states[:, -num_last_tokens:]
        logits = self._logits(hidden_states)
        if labels is None:
            return MambaOutput(logits)
        return MambaOutput(logits, _next_token_loss(logits, labels, seq_idx, cu_seqlens))

    def _logits(self, hidden_states: Tensor) -> Tensor:
        batch, seqlen, width = hidden_states.shape
        if is_plain(self.lm_head, (nn.Linear,)) and not torch.is_grad_enabled():
            # One token a row: torch's product takes up to three times as long as reading W.
            rows = hidden_states.reshape(batch * seqlen, width)
            fused = fused_linear(rows, self.lm_head.weight, self.lm_head.bias)
            if fused is not None:
                return fused.view(batch, seqlen, -1)
        logits: Tensor = self.lm_head(hidden_states)
        return logits

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int | None = None, dtype: torch.dtype | None = None
    ) -> InferenceCache:
        """Zero states of all layers for ``batch_size`` rows."""
        return InferenceCache(
            [
                block.allocate_inference_cache(batch_size, max_seqlen, dtype)
                for block in self.backbone.blocks()
            ]
        )

    @property
    def device(self) -> torch.device:
        """Where the embedding lies, and where input_ids must."""
        return self.backbone.embedding.weight.device

    def num_parameters(self) -> int:
        """Trainable numbers; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _check(self, input_ids: Tensor, labels: Tensor | None, num_last_tokens: int) -> None:
        if input_ids.dim() != 2:
            raise ShapeError(
                f"MambaLM: argument 'input_ids' has shape {tuple(input_ids.shape)}.\n"
                "It must be (batch, seqlen).\n"
                "Use input_ids.unsqueeze(0) for one sequence."
            )
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise DtypeError(
                f"MambaLM: argument 'input_ids' has dtype {input_ids.dtype}.\n"
                "It must be int64 or int32.\n"
                "Use input_ids.long()."
            )
        if num_last_tokens < 0 or (labels is not None and num_last_tokens > 0):
            raise ArgumentError(
                f"MambaLM: got num_last_tokens={num_last_tokens}"
                f"{'' if labels is None else ' together with labels'}.\n"
                "It must be 0 or more, and 0 with labels, which need every position.\n"
                "Leave it out."
            )
        if labels is not None and labels.shape != input_ids.shape:
            raise ShapeError(
                f"MambaLM: argument 'labels' has shape {tuple(labels.shape)}.\n"
                f"It must be that of input_ids, {tuple(input_ids.shape)}; the shift is inside.\n"
                "Pass labels=input_ids to train on every token."
            )
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_ids(input_ids, self.config.vocab_size)


def _check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; CUDA tensors are not read back for this."""
    if input_ids.numel() == 0:
        return
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ArgumentError(
            f"MambaLM: argument 'input_ids' holds {low if low < 0 else high}.\n"
            f"Ids run from 0 to {vocab_size - 1} (vocab_size {vocab_size}).\n"
            "Check that tokenizer and model belong together; mark padding by seq_idx, not by id."
        )


def _next_token_loss(
    logits: Tensor, labels: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Mean cross entropy in float32 of each label given what stands before it."""
    targets = labels[:, 1:]
    if seq_idx is not None:
        continues = (seq_idx[:, 1:] == seq_idx[:, :-1]) & (seq_idx[:, 1:] >= 0)
        targets = torch.where(continues, targets, IGNORED_LABEL)
    if cu_seqlens is not None:
        positions = torch.arange(1, labels.shape[1], device=labels.device)
        starts = torch.isin(positions, cu_seqlens.to(positions.dtype))
        targets = torch.where(starts, IGNORED_LABEL, targets)
    wide = logits[:, :-1] if logits.dtype == torch.float64 else logits[:, :-1].float()
    total = F.cross_entropy(
        wide.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    # Without any label that counts the loss is 0, not 0/0.
    return total / (targets != IGNORED_LABEL).sum().clamp(min=1)
