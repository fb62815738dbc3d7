# SPDX-License-Identifier: Apache-2.0
"""Two processes that train one model: gradients must be those of a single process."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import sys
import torch
import torch.distributed as dist
from helpers.tiny_models import tiny_lm
from torch.nn.parallel import DistributedDataParallel

kind, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
)
ids = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(1))
mine = ids[2 * rank : 2 * rank + 2]

single = tiny_lm()
single(ids, labels=ids).loss.backward()
expected = {name: p.grad for name, p in single.named_parameters()}
tolerance = 1e-5

model = tiny_lm()
if kind == "ddp":
    wrapped = DistributedDataParallel(model)
    wrapped(mine, labels=mine).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
else:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = kind == "fsdp2-bfloat16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32
    )
    tolerance = 0.05 if half else tolerance
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.backbone.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model(mine, labels=mine).loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
for name, gradient in expected.items():
    error = (found[name] - gradient).norm() / gradient.norm()
    assert error < tolerance, (name, float(error))
dist.destroy_process_group()
print("equal")
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2-bfloat16"])
def test_two_processes_get_the_gradients_of_one(kind: str) -> None:
    if kind != "ddp":
        pytest.importorskip("torch.distributed.fsdp", exc_type=ImportError)
        from torch.distributed import fsdp

        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("this torch keeps fully_shard in a private place")
    path = [str(Path(__file__).parents[1]), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}\n{WORKER}"
    port = free_port()
    commands = [[sys.executable, "-c", code, kind, str(rank), str(port)] for rank in range(2)]
    workers = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=180)
            assert worker.returncode == 0, err[-3000:]
            assert out.strip().endswith("equal")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
