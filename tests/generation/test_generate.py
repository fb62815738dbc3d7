# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import torch
from helpers.tiny_models import tiny_lm

from statescan.errors import ArgumentError, DtypeError
from statescan.generation import (
    SamplingConfig,
    decode_one_token,
    generate,
    prefill,
    stream,
)
from statescan.models import ByteTokenizer, MambaLM
from statescan.testing.compare import assert_close
from statescan.testing.tolerances import tolerance

FLOAT32 = 4 * tolerance("mamba_inner", torch.float32)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8], [9], list(range(16))]


@pytest.fixture(scope="module")
def model() -> MambaLM:
    """Random weights whose logits are spread like a trained model's."""
    return tiny_lm(sharp=True)


def by_hand(model: MambaLM, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation that runs the whole text again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_running_everything_again(model: MambaLM) -> None:
    output = generate(model, PROMPTS, 12)
    assert output.tokens == [by_hand(model, prompt, 12) for prompt in PROMPTS]
    assert output.finish_reasons == ["length"] * 4
    assert output.sequences == [p + new for p, new in zip(PROMPTS, output.tokens, strict=True)]
    assert output.texts is None
    # A model that always says the same would prove nothing.
    assert len({token for row in output.tokens for token in row}) > 8


@pytest.mark.parametrize(
    "options",
    [None, {"temperature": 0.8}, {"top_k": 20, "repetition_penalty": 1.2}, {"min_p": 0.1}],
)
def test_unequal_prompts_in_a_batch_equal_each_alone(model: MambaLM, options) -> None:
    seeds = [11, 22, 33, 44]

    def run(rows: list[int]) -> list[list[int]]:
        sampling = options and SamplingConfig(**options, seed=[seeds[row] for row in rows])
        return generate(model, [PROMPTS[row] for row in rows], 15, sampling=sampling).tokens

    together = run([0, 1, 2, 3])
    assert together == [run([row])[0] for row in range(4)]
    assert run([2, 0]) == [together[2], together[0]]


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 16, 2048])
def test_prefill_in_chunks_equals_each_prompt_alone(model: MambaLM, chunk_size: int) -> None:
    logits, cache = prefill(model, PROMPTS, chunk_size=chunk_size)
    for row, prompt in enumerate(PROMPTS):
        alone, own = prefill(model, [prompt])
        assert_close(logits[row : row + 1], alone, FLOAT32)
        for layer, expected in zip(cache.select([row]), own, strict=True):
            assert_close(layer.ssm_state, expected.ssm_state, FLOAT32)
            assert_close(layer.conv_state, expected.conv_state, FLOAT32)


def test_prefill_continues_a_cache(model: MambaLM) -> None:
    whole, _ = prefill(model, [PROMPTS[1], PROMPTS[3]])
    _, cache = prefill(model, [PROMPTS[1][:4], PROMPTS[3][:2]])
    logits, again = prefill(model, [PROMPTS[1][4:], PROMPTS[3][2:]], cache=cache)
    assert again is cache
    assert_close(logits, whole, FLOAT32)


def test_decode_continues_a_prefill(model: MambaLM) -> None:
    _, cache = prefill(model, [PROMPTS[0], PROMPTS[1]])
    logits = decode_one_token(model, torch.tensor([7, 8]), cache)
    whole, _ = prefill(model, [[*PROMPTS[0], 7], [*PROMPTS[1], 8]])
    assert_close(logits, whole, FLOAT32)
    assert not logits.requires_grad


def test_every_form_of_prompts(model: MambaLM) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    expected = generate(model, rows, 4).tokens
    for prompts in (
        torch.tensor(rows),
        torch.tensor(rows, dtype=torch.uint8),
        [torch.tensor(row) for row in rows],
        (tuple(row) for row in rows),
        [bytes(row) for row in rows],
    ):
        assert generate(model, prompts, 4).tokens == expected


def test_eos_ends_a_row_and_not_the_others(model: MambaLM) -> None:
    free = generate(model, PROMPTS, 10).tokens
    eos = free[0][3]
    output = generate(model, PROMPTS, 10, eos_token_id=eos)
    for row, expected in zip(output.tokens, free, strict=True):
        end = expected.index(eos) + 1 if eos in expected else 10
        assert row == expected[:end]
    assert output.finish_reasons[0] == "eos"
    several = generate(model, PROMPTS[:1], 10, eos_token_id=[free[0][2], eos])
    assert several.tokens[0] == free[0][: 1 + min(free[0].index(free[0][2]), free[0].index(eos))]


def test_callback_sees_each_token_once_and_in_order(model: MambaLM) -> None:
    seen: list[tuple[int, int]] = []
    output = generate(model, PROMPTS[:2], 5, on_token=lambda row, token: seen.append((row, token)))
    assert [token for row, token in seen if row == 1] == output.tokens[1]
    assert [row for row, _ in seen] == [0, 1] * 5


def test_no_step_runs_after_the_end(model: MambaLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = MambaLM.forward

    def counted(self, input_ids, **options):
        calls.append(input_ids.shape[1])
        return forward(self, input_ids, **options)

    monkeypatch.setattr(MambaLM, "forward", counted)
    assert generate(model, PROMPTS[:1], 0).tokens == [[]]
    assert calls == []
    generate(model, PROMPTS[:1], 4)
    assert calls == [3, 1, 1, 1]
    pieces = stream(model, ByteTokenizer(), "abc", 50)
    assert calls == [3, 1, 1, 1]
    next(pieces)
    assert 1 <= len(calls) - 4 <= 4


class Scripted(torch.nn.Module):
    """Stands in for a model: writes a given text after any prompt."""

    def __init__(self, model: MambaLM, script: bytes) -> None:
        super().__init__()
        self.config, self.device = model.config, model.device
        self.allocate_inference_cache = model.allocate_inference_cache
        self.script: Iterator[int] = iter(script)

    def forward(self, input_ids, *, cache, num_last_tokens=0, seq_idx=None):
        logits = torch.zeros(input_ids.shape[0], 1, 256)
        logits[:, :, next(self.script)] = 1.0
        return type("Output", (), {"logits": logits})()


def scripted(model: MambaLM, text: str) -> MambaLM:
    return Scripted(model, text.encode())  # type: ignore[return-value]


def test_stop_strings_across_token_borders(model: MambaLM) -> None:
    text = "blessed are the meek.\n\nAnd more"
    tokenizer = ByteTokenizer()
    output = generate(
        scripted(model, text), [[1], [2, 3]], 40, stop=["\n\n", "never"], tokenizer=tokenizer
    )
    assert output.texts == ["blessed are the meek."] * 2
    assert output.finish_reasons == ["stop"] * 2
    assert bytes(output.tokens[0]).decode() == "blessed are the meek.\n\n"
    pieces = list(stream(scripted(model, text), tokenizer, "x", 40, stop="\n\n"))
    assert "".join(pieces) == "blessed are the meek."
    assert "\n" not in "".join(pieces)


def test_held_back_text_comes_out_at_the_end(model: MambaLM) -> None:
    tokenizer = ByteTokenizer()
    options = {"stop": ["ed are"], "tokenizer": tokenizer}
    output = generate(scripted(model, "blessed ar"), [[1]], 10, **options)
    assert output.texts == ["blessed ar"]
    assert output.finish_reasons == ["length"]
    assert "".join(stream(scripted(model, "blessed ar"), tokenizer, "x", 10, stop=["ed are"])) == (
        "blessed ar"
    )


def test_stream_gives_whole_characters_and_ends_at_eos(model: MambaLM) -> None:
    tokenizer = ByteTokenizer()
    pieces = list(stream(scripted(model, "a世b\0c"), tokenizer, "x", 9, eos_token_id=0))
    assert pieces == ["a", "世", "b"]
    cut = list(stream(scripted(model, "a世"), tokenizer, "x", 3))
    assert cut == ["a", "\ufffd"]


def test_stream_equals_generate(model: MambaLM) -> None:
    tokenizer = ByteTokenizer()
    sampling = SamplingConfig(temperature=0.9, seed=4)
    text = "".join(stream(model, tokenizer, "In the", 30, sampling=sampling))
    output = generate(
        model, [tokenizer.encode("In the")], 30, sampling=sampling, tokenizer=tokenizer
    )
    assert output.texts == [text]


def test_the_models_mode_and_gradients_are_left_alone(model: MambaLM) -> None:
    generate(model, PROMPTS, 3)
    assert torch.is_grad_enabled()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: generate(m, [], 3), ArgumentError, "no prompts"),
        (lambda m: generate(m, [[1], []], 3), ArgumentError, "prompt 1 has no tokens"),
        (lambda m: generate(m, ["text"], 3), DtypeError, "encode"),
        (lambda m: generate(m, torch.zeros(1, 2, 3), 3), ArgumentError, "too many axes"),
        (lambda m: generate(m, [[1]], -1), ArgumentError, "max_new_tokens=-1"),
        (lambda m: generate(m, [[1]], 3, stop="x"), ArgumentError, "tokenizer"),
        (lambda m: generate(m, [[256]], 3), ArgumentError, "256"),
        (lambda m: prefill(m, [[1]], chunk_size=0), ArgumentError, "chunk_size=0"),
        (lambda m: stream(m, ByteTokenizer(), "", 3), ArgumentError, "no tokens"),
        (lambda m: stream(m, ByteTokenizer(), "a", 3, stop=[""]), ArgumentError, "one character"),
    ],
)
def test_bad_arguments_are_refused(model: MambaLM, call, kind, message: str) -> None:
    with pytest.raises(kind, match=message):
        call(model)
