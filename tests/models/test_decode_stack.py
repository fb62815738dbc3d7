# SPDX-License-Identifier: Apache-2.0
"""A decode step of a model: all layers at once, or one by one, with the same meaning."""

from __future__ import annotations

import copy

import pytest
import torch

import statescan
from statescan.backends import native
from statescan.errors import StatescanError
from statescan.models import MambaConfig, MambaLM
from statescan.ops import _fused_decode

pytestmark = pytest.mark.skipif(
    native.status().library is None, reason=f"no C library: {native.status().reason}"
)

STEPS = 4


def make(dtype=torch.float32, **options) -> MambaLM:
    torch.manual_seed(0)
    sizes = dict(d_model=36, n_layer=3, vocab_size=77) | options
    return MambaLM(MambaConfig(**sizes), dtype=dtype).eval()


def decode(model: MambaLM, batch: int, backend: str = "auto") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    cache = model.allocate_inference_cache(batch)
    logits = []
    with torch.no_grad(), statescan.use_backend(backend):
        for _ in range(STEPS):
            tokens = torch.randint(0, 77, (batch, 1), generator=generator)
            logits.append(model(tokens, cache=cache).logits)
    assert cache.seqlen_offset == STEPS
    return torch.cat(logits, 1)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture
def fused_calls(monkeypatch):
    """How many decode steps ran all layers at once."""
    calls = []
    original = _fused_decode.fused_mamba_stack

    def counted(*args):
        result = original(*args)
        calls.append(result is not None)
        return result

    monkeypatch.setattr("statescan.models.lm.fused_mamba_stack", counted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_all_layers_at_once_are_no_less_exact_than_one_by_one(dtype, batch, fused_calls):
    model = make(dtype)
    exact = decode(copy.deepcopy(model).double(), batch)
    assert not any(fused_calls)
    fused_calls.clear()
    fused = decode(model, batch)
    assert fused_calls == [True] * STEPS
    allowed = 1.5 * error(decode(model, batch, "torch"), exact)
    assert error(fused, exact) <= allowed


def test_many_rows_take_the_layers_one_by_one(fused_calls):
    model = make()
    exact = decode(copy.deepcopy(model).double(), 17)
    fused_calls.clear()
    assert error(decode(model, 17), exact) < 2e-6
    assert not any(fused_calls)


@pytest.mark.parametrize(
    "options",
    [{"rms_norm": False}, {"residual_in_fp32": False}, {"tie_embeddings": False}],
    ids=str,
)
def test_other_models_decode_alike(options):
    model = make(**options)
    exact = decode(copy.deepcopy(model).double(), 2)
    assert error(decode(model, 2), exact) < 2e-6


@pytest.mark.parametrize("place", ["layers.1", "layers.1.norm", "layers.1.mixer", "norm_f"])
def test_hooks_on_any_module_are_called(place):
    model = make()
    seen = []
    module = model.backbone.get_submodule(place)
    module.register_forward_hook(lambda *_: seen.append(1))
    decode(model, 1)
    assert len(seen) == STEPS


def test_states_and_their_versions_move_on():
    model = make()
    cache = model.allocate_inference_cache(1)
    versions = [state._version for layer in cache for state in layer]
    with torch.no_grad():
        model(torch.tensor([[5]]), cache=cache)
    assert all(
        state._version > old and state.abs().sum() > 0
        for state, old in zip((s for layer in cache for s in layer), versions, strict=True)
    )


@pytest.mark.parametrize("rows", [1, 5])
def test_a_cache_of_another_batch_is_refused_before_it_is_written(rows):
    model = make()
    cache = model.allocate_inference_cache(rows)
    with torch.no_grad(), pytest.raises(StatescanError):
        model(torch.zeros(3, 1, dtype=torch.long), cache=cache)
    assert all(not state.any() for layer in cache for state in layer)


def test_equal_bits_whatever_the_number_of_threads():
    model, before = make(), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(decode(model, 2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_parameter_replaced_between_steps_is_used():
    model = make()
    cache, other = model.allocate_inference_cache(1), make()
    tokens = torch.tensor([[5]])
    with torch.no_grad():
        model(tokens, cache=cache)
        model.backbone.layers[0].mixer.in_proj.weight = torch.nn.Parameter(
            other.backbone.layers[0].mixer.in_proj.weight * 2
        )
        states = cache.clone()
        found = model(tokens, cache=cache).logits
        with statescan.use_backend("torch"):
            wanted = model(tokens, cache=states).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
