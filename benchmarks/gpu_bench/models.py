# SPDX-License-Identifier: Apache-2.0
"""Whole models on a GPU, ours and the originals' with the same weights: training, reading, writing.

Which of them are timed, and how they are judged, is in ``gpu_models.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan.generation import decode_one_token, generate, prefill
from statescan.models import MambaConfig, MambaLM

SIZES = {"tiny": (64, 2, 512), "130m": (768, 24, 50280), "1.4b": (2048, 48, 50280)}
"""d_model, layers and vocabulary by name; weights are random."""

LEARNING_RATE = 1e-4
GRAPH_ARGUMENT = "cuda_graph"
"""What ``generate`` calls it, where it offers graphs itself."""


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> MambaLM:
    """Our model of that size."""
    d_model, n_layer, vocab_size = SIZES[name]
    torch.manual_seed(0)
    config = MambaConfig(d_model=d_model, n_layer=n_layer, vocab_size=vocab_size)
    return MambaLM(config, device=device, dtype=dtype)


def make_peer(model: MambaLM, name: str, dtype: torch.dtype) -> nn.Module:
    """The original's model with our weights, all of them in one dtype, as it is used."""
    import mamba_ssm
    from mamba_ssm.models.config_mamba import MambaConfig as PeerConfig

    d_model, n_layer, vocab_size = SIZES[name]
    config = PeerConfig(d_model=d_model, n_layer=n_layer, vocab_size=vocab_size)
    peer = mamba_ssm.MambaLMHeadModel(config, device=model.device, dtype=dtype)
    peer.load_state_dict(model.state_dict())
    return cast(nn.Module, peer)


def training_step(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """Forward under autocast to bfloat16, loss, backward and AdamW; gives the loss."""
    fused = ids.device.type == "cuda"
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    targets = ids[:, 1:].flatten()

    def step() -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = model(ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def reading(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """The backbone's forward under autocast to bfloat16, without gradients."""
    backbone = cast(nn.Module, model.backbone)

    def read() -> Tensor:
        with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
            return cast(Tensor, backbone(ids))

    return read


def peer_writing(model: Any, ids: Tensor, tokens: int, graph: bool) -> Callable[[], Tensor]:
    """The original's greedy loop; gives prompt and new tokens."""
    length = ids.shape[1] + tokens
    return lambda: cast(Tensor, model.generate(ids, max_length=length, top_k=1, cg=graph))


def our_writing(model: MambaLM, ids: Tensor, tokens: int, graph: bool) -> Callable[[], Tensor]:
    """``generate``, greedy; with a graph its own if it has one, else the step captured here."""
    options = {GRAPH_ARGUMENT: True} if graph else {}
    if graph and GRAPH_ARGUMENT not in inspect.signature(generate).parameters:
        return GraphedWriting(model, ids, tokens).write

    def write() -> Tensor:
        output = generate(model, ids, tokens, **cast(Any, options))
        return torch.tensor(output.sequences, device=ids.device)

    return write


class GraphedWriting:
    """Greedy writing with one decode step of the model as a CUDA graph."""

    def __init__(self, model: MambaLM, ids: Tensor, tokens: int) -> None:
        self._model, self._ids, self._count = model, ids, tokens
        self._cache = model.allocate_inference_cache(ids.shape[0])
        self._token = ids[:, -1].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    def _step(self) -> None:
        logits = decode_one_token(self._model, self._token, self._cache)
        self._token.copy_(logits.argmax(dim=-1))

    def write(self) -> Tensor:
        """Prompt and new tokens."""
        self._cache.reset()
        logits, _ = prefill(self._model, self._ids, cache=self._cache)
        self._token.copy_(logits.argmax(dim=-1))
        written = [self._token.clone()]
        for _ in range(self._count - 1):
            self._graph.replay()
            written.append(self._token.clone())
        return torch.cat([self._ids, torch.stack(written, dim=1)], dim=1)
