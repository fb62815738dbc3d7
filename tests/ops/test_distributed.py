# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 on two processes: the same gradients and parameters as one process.

Processes talk over gloo on this machine; GPUs are not needed.
"""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import statescan

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import fully_shard

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)

RANKS, STEPS, BATCH, SEQLEN, WIDTH = 2, 3, 4, 9, 6


class Block(nn.Module):
    """A residual mixer on mamba_inner, then one on selective_scan with its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 16, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(8, 4) / 2)
        self.conv_bias = nn.Parameter(torch.randn(8))
        self.x_proj = nn.Parameter(torch.randn(2 + 2 * 3, 8) / 3)
        self.dt_proj = nn.Parameter(torch.randn(8, 2) / 4)
        self.A_log = nn.Parameter(torch.rand(8, 3))
        self.D = nn.Parameter(torch.ones(8))
        self.out_proj = nn.Parameter(torch.randn(WIDTH, 8) / 3)
        self.mix = nn.Linear(WIDTH, WIDTH + 2 * 3)
        self.A2_log = nn.Parameter(torch.rand(WIDTH, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        xz = self.in_proj(hidden).transpose(1, 2)
        A = -self.A_log.exp()
        inner = statescan.mamba_inner(
            *(xz, self.conv_weight, self.conv_bias, self.x_proj, self.dt_proj, A),
            D=self.D,
            out_proj_weight=self.out_proj,
        )
        hidden = hidden + inner
        x, B, C = self.mix(hidden).transpose(1, 2).split((WIDTH, 3, 3), 1)
        scanned = statescan.selective_scan(x, x - 2, -self.A2_log.exp(), B, C, dt_softplus=True)
        return hidden + scanned.transpose(1, 2)


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(7)
    return nn.Sequential(Block(), Block()), torch.randn(STEPS, BATCH, SEQLEN, WIDTH)


def train(model: nn.Module, batches: torch.Tensor) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimiser.zero_grad()
        model(batch).square().mean().backward()
        optimiser.step()


def expected_parameters() -> dict[str, torch.Tensor]:
    model, data = model_and_data()
    train(model, data)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def shard(model: nn.Module, way: str) -> nn.Module:
    if way.startswith("ddp"):
        wrapped = DistributedDataParallel(model, static_graph=way == "ddp_static")
        return torch.compile(wrapped, backend="aot_eager") if way == "ddp_compiled" else wrapped
    mesh = init_device_mesh("cpu", (RANKS,))
    for number, block in enumerate(model):
        if way == "fsdp_checkpointed":
            model[number] = block = checkpoint_wrapper(block)
        elif way == "fsdp_compiled":
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def work(rank: int, port: int, ways: tuple[str, ...], expected: dict[str, torch.Tensor]) -> None:
    """One rank: its half of every batch, then a look at all parameters."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    try:
        for way in ways:
            model, data = model_and_data()
            train(shard(model, way), data[:, rank::RANKS])
            for name, parameter in model.named_parameters():
                plain = name.replace("_checkpoint_wrapped_module.", "")
                torch.testing.assert_close(
                    *(whole(parameter.detach()), expected[plain]),
                    msg=lambda text, way=way, name=name: f"{way}, {name}: {text}",
                )
    finally:
        dist.destroy_process_group()


def spawn(*ways: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, ways, expected_parameters()), nprocs=RANKS)


def test_ddp_equals_one_process():
    spawn("ddp", "ddp_static", "ddp_compiled")


def test_fsdp2_equals_one_process():
    spawn("fsdp", "fsdp_checkpointed", "fsdp_compiled")
