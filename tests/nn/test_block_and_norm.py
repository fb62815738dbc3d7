# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from statescan.nn import Block, LayerNorm, Mamba, RMSNorm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norms_compute_wide_and_keep_the_dtype(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
    exact = x.double()
    weight = torch.linspace(0.5, 2, 8, dtype=torch.float64)
    norm, layer_norm = RMSNorm(8), LayerNorm(8)
    with torch.no_grad():
        norm.weight.copy_(weight)
        layer_norm.weight.copy_(weight)
    rms = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    centred = exact - exact.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    eps = {torch.float64: 1e-6, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
    for module, expected in ((norm, rms), (layer_norm, layer)):
        out = module(x)
        assert out.dtype == dtype
        assert (out.double() - expected).abs().max() <= eps * expected.abs().max()
        # Half-precision weights meet wider input where residual_in_fp32 is set.
        assert module.to(torch.bfloat16)(x).dtype == dtype


def test_norm_shows_its_sizes() -> None:
    assert repr(RMSNorm(8, eps=1e-3)) == "RMSNorm(8, eps=0.001)"


class Recorder(nn.Module):
    """A mixer that doubles, and remembers what it was given."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x, cache=None, *, seq_idx=None, cu_seqlens=None):
        self.seen.append(x)
        return 2 * x


def test_block_adds_then_normalises_then_mixes() -> None:
    block = Block(4, Recorder)
    hidden, residual = torch.ones(1, 2, 4), torch.full((1, 2, 4), 3.0)
    out, summed = block(hidden, residual)
    assert torch.equal(summed, torch.full((1, 2, 4), 4.0))
    assert torch.equal(block.mixer.seen[0], block.norm(summed))
    assert torch.equal(out, 2 * block.norm(summed))
    out, summed = block(hidden)
    assert torch.equal(summed, hidden)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("norm_cls", [RMSNorm, LayerNorm])
def test_residual_in_fp32(wide: bool, norm_cls) -> None:
    block = Block(4, Recorder, norm_cls, residual_in_fp32=wide).bfloat16()
    hidden = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    out, residual = block(hidden)
    assert residual.dtype == (torch.float32 if wide else torch.bfloat16)
    assert out.dtype == torch.bfloat16
    for _ in range(300):
        # 1/256 of the sum is lost in bfloat16 and kept in float32.
        _, residual = block(hidden, residual)
    assert residual.max() == (301 if wide else 256)


def test_block_passes_cache_and_packing_on() -> None:
    torch.manual_seed(0)
    block = Block(8, lambda dim: Mamba(dim, d_state=2))
    x = torch.randn(2, 5, 8)
    cache = block.allocate_inference_cache(2)
    with torch.no_grad():
        parts = [block(part, None, cache)[0] for part in x.split([2, 3], dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), block(x)[0], atol=1e-6)
        ids = torch.tensor([[0, 0, 1, 1, 1]] * 2)
        packed = block(x, seq_idx=ids)[0]
        assert torch.allclose(packed[:, 2:], block(x[:, 2:])[0], atol=1e-6)
