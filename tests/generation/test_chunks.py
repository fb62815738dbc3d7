# SPDX-License-Identifier: Apache-2.0
"""A text is the same however it is cut into chunks and steps, and whatever shares its batch."""

import sys
from functools import partial

import pytest
import torch
from helpers.tiny_models import tiny_lm

from statescan import use_backend
from statescan.dispatch import all_backends
from statescan.errors import ArgumentError, ShapeError
from statescan.generation import SamplingConfig, decode_one_token, generate, prefill
from statescan.models import MambaLM
from statescan.nn import InferenceCache
from statescan.testing.compare import assert_close
from statescan.testing.tolerances import tolerance

FLOAT32 = 4 * tolerance("mamba_inner", torch.float32)
LENGTHS = (23, 1, 8, 14)
CHUNKS = (1, 2, 7, 13, 22, 23, 24, 1000)
USABLE = [b.name for b in all_backends() if b.automatic and b.availability().ok]


@pytest.fixture(scope="module")
def model() -> MambaLM:
    return tiny_lm(sharp=True)


@pytest.fixture(params=USABLE)
def backend(request):
    """Every backend that can run here, in turn."""
    with use_backend(request.param):
        yield request.param


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]


def assert_same_states(found: InferenceCache, expected: InferenceCache) -> None:
    for layer, wanted in zip(found, expected, strict=True):
        assert_close(layer.conv_state, wanted.conv_state, FLOAT32)
        assert_close(layer.ssm_state, wanted.ssm_state, FLOAT32)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_prompt_in_chunks_equals_one_forward(model: MambaLM, backend, chunk_size: int) -> None:
    (row, *_) = texts()
    logits, cache = prefill(model, [row], chunk_size=chunk_size)
    whole = model.allocate_inference_cache(1)
    with torch.no_grad():
        assert_close(logits, model(torch.tensor([row]), cache=whole).logits[:, -1], FLOAT32)
    assert_same_states(cache, whole)
    assert cache.seqlen_offset == len(row)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_unequal_prompts_in_chunks_equal_each_alone(model: MambaLM, backend, chunk_size) -> None:
    logits, cache = prefill(model, texts(), chunk_size=chunk_size)
    for row, text in enumerate(texts()):
        alone, own = prefill(model, [text])
        assert_close(logits[row : row + 1], alone, FLOAT32)
        assert_same_states(cache.select([row]), own)


def test_every_decode_step_equals_the_forward_of_everything(model: MambaLM, backend) -> None:
    (row, *_) = texts()
    with torch.no_grad():
        whole = model(torch.tensor([row])).logits
    _, cache = prefill(model, [row[:3]])
    for position in range(3, len(row)):
        logits = decode_one_token(model, torch.tensor([row[position]]), cache)
        assert_close(logits, whole[:, position], FLOAT32)


def test_steps_alone_equal_the_forward_from_the_first_token(model: MambaLM, backend) -> None:
    (row, *_) = texts()
    cache = model.allocate_inference_cache(1)
    with torch.no_grad():
        whole = model(torch.tensor([row])).logits
    for position, token in enumerate(row):
        logits = decode_one_token(model, torch.tensor([token]), cache)
        assert_close(logits, whole[:, position], FLOAT32)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunks_continue_a_cloned_cache_and_leave_the_original(model, backend, chunk_size) -> None:
    first, second = [t[: len(t) // 2 + 1] for t in texts()], [[4, 5, 6, 7, 8], [9], [1, 2], [3]]
    _, cache = prefill(model, first)
    before = cache.clone()
    logits, branch = prefill(model, second, cache=cache.clone(), chunk_size=chunk_size)
    for layer, kept in zip(cache, before, strict=True):
        assert torch.equal(layer.conv_state, kept.conv_state)
        assert torch.equal(layer.ssm_state, kept.ssm_state)
    for row in range(4):
        alone, own = prefill(model, [first[row] + second[row]])
        assert_close(logits[row : row + 1], alone, FLOAT32)
        assert_same_states(branch.select([row]), own)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunks_continue_a_reordered_cache(model: MambaLM, backend, chunk_size: int) -> None:
    order, more = [2, 2, 0, 1], [[4, 5, 6, 7, 8], [9], [1, 2], [3]]
    _, cache = prefill(model, texts(), chunk_size=4)
    places = [state.data_ptr() for layer in cache for state in layer]
    cache.reorder(order)
    logits, _ = prefill(model, more, cache=cache, chunk_size=chunk_size)
    assert [state.data_ptr() for layer in cache for state in layer] == places
    for row, old in enumerate(order):
        alone, own = prefill(model, [texts()[old] + more[row]])
        assert_close(logits[row : row + 1], alone, FLOAT32)
        assert_same_states(cache.select([row]), own)
    steps = decode_one_token(model, torch.tensor([1, 2, 3, 4]), cache)
    for row, old in enumerate(order):
        alone, _ = prefill(model, [[*texts()[old], *more[row], row + 1]])
        assert_close(steps[row : row + 1], alone, FLOAT32)


def test_rows_taken_out_of_a_cache_go_on_alone(model: MambaLM, backend) -> None:
    _, cache = prefill(model, texts())
    taken = cache.select([3, 1, 3])
    logits = decode_one_token(model, torch.tensor([7, 8, 9]), taken)
    for row, (old, token) in enumerate(((3, 7), (1, 8), (3, 9))):
        alone, _ = prefill(model, [[*texts()[old], token]])
        assert_close(logits[row : row + 1], alone, FLOAT32)


@pytest.mark.parametrize(
    "sampling",
    [None, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}],
    ids=["greedy", "sampled", "filtered"],
)
def test_a_batch_writes_what_each_prompt_writes_alone(model: MambaLM, backend, sampling) -> None:
    def write(rows: list[int], seed) -> list[list[int]]:
        config = sampling and SamplingConfig(**sampling, seed=seed)
        return generate(model, [texts()[row] for row in rows], 20, sampling=config).tokens

    together = write([0, 1, 2, 3], 40)
    assert together == [write([row], 40 + row)[0] for row in range(4)]
    assert write([3, 1], [43, 41]) == [together[3], together[1]]


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 100])
def test_what_is_written_does_not_depend_on_the_chunks(model, chunk_size, monkeypatch) -> None:
    expected = generate(model, texts(), 15, sampling=SamplingConfig(seed=1)).tokens
    # The package's attribute of this name is the function.
    module = sys.modules["statescan.generation.generate"]
    monkeypatch.setattr(module, "prefill", partial(prefill, chunk_size=chunk_size))
    assert generate(model, texts(), 15, sampling=SamplingConfig(seed=1)).tokens == expected


def test_modules_that_are_called_one_by_one_agree_too() -> None:
    """A hook keeps a mixer off the fused op: its own road through states and padding."""
    plain, hooked = tiny_lm(sharp=True), tiny_lm(sharp=True)
    for block in hooked.backbone.blocks():
        block.mixer.conv1d.register_forward_hook(lambda module, args, out: None)
        block.mixer.x_proj.register_forward_hook(lambda module, args, out: None)
    for chunk_size in (1, 5, 100):
        expected, states = prefill(plain, texts(), chunk_size=chunk_size)
        logits, found = prefill(hooked, texts(), chunk_size=chunk_size)
        assert_close(logits, expected, FLOAT32)
        assert_same_states(found, states)
    tokens = torch.tensor([1, 2, 3, 4])
    expected = decode_one_token(plain, tokens, states)
    assert_close(decode_one_token(hooked, tokens, found), expected, FLOAT32)


@pytest.mark.parametrize("chunk_size", [3, 100])
def test_chunks_in_bfloat16(chunk_size: int) -> None:
    model = tiny_lm(sharp=True).to(torch.bfloat16)
    logits, _ = prefill(model, texts(), chunk_size=chunk_size)
    # Logits run to about 12, where bfloat16 steps by 1/16; two layers round at different places.
    for row, text in enumerate(texts()):
        alone, _ = prefill(model, [text])
        assert_close(logits[row : row + 1], alone, 8 * tolerance("mamba_inner", torch.bfloat16))


def test_a_cache_of_another_batch_is_refused(model: MambaLM) -> None:
    cache = model.allocate_inference_cache(3)
    with pytest.raises((ArgumentError, ShapeError), match="3"):
        prefill(model, texts(), cache=cache)
