# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from helpers.tiny_models import tiny_lm

from statescan.errors import ArgumentError
from statescan.generation.scoring import Request, encode_pair, score, windows
from statescan.models import ByteTokenizer, MambaLM

# Sums of up to 40 log probabilities of about -5: 1e-3 is 2e-6 of the whole.
NEAR = 1e-3
REQUESTS = [
    Request([3], [1, 4]),
    Request([1, 5, 9, 2, 6], [5, 3, 5, 8]),
    Request(list(range(30)), [7]),
    Request([10], list(range(100, 140))),
    Request([1, 2, 3], []),
]


@pytest.fixture(scope="module")
def model() -> MambaLM:
    return tiny_lm(sharp=True)


def by_hand(model: MambaLM, request: Request) -> tuple[float, bool]:
    """The sum of log softmax of one forward over everything."""
    tokens = torch.tensor([[*request.context, *request.continuation]])
    with torch.no_grad():
        table = torch.log_softmax(model(tokens).logits[0].double(), dim=-1)
    start, total, greedy = len(request.context), 0.0, True
    for position, token in enumerate(request.continuation, start - 1):
        total += float(table[position, token])
        greedy = greedy and int(table[position].argmax()) == token
    return total, greedy


def assert_same(found, expected) -> None:
    assert [pair[1] for pair in found] == [pair[1] for pair in expected]
    wanted = [pair[0] for pair in expected]
    assert [pair[0] for pair in found] == pytest.approx(wanted, abs=NEAR)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("chunk_size", [1, 7, 2048])
def test_a_score_is_the_sum_of_log_softmax_of_the_forward(model, batch_size, chunk_size) -> None:
    found = score(model, REQUESTS, batch_size=batch_size, chunk_size=chunk_size)
    assert_same(found, [by_hand(model, request) for request in REQUESTS])
    assert found[0].logprob < -0.1
    assert found[-1] == (0.0, True)


def test_greedy_text_is_recognised(model: MambaLM) -> None:
    tokens = [1, 2]
    for _ in range(5):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    wrong = [*tokens[2:6], (tokens[6] + 1) % 256]
    found = score(model, [Request(tokens[:2], tokens[2:]), Request(tokens[:2], wrong)])
    assert [pair.is_greedy for pair in found] == [True, False]


def test_probabilities_of_all_tokens_sum_to_one_without_the_vocabularys_padding() -> None:
    model = tiny_lm(vocab_size=13, pad_vocab_size_multiple=8)
    assert model.config.padded_vocab_size == 16
    found = score(model, [Request([5, 6], [token]) for token in range(13)])
    assert sum(torch.tensor(pair.logprob).exp() for pair in found) == pytest.approx(1, abs=1e-5)


def test_a_large_vocabulary_is_scored_in_parts(model, monkeypatch) -> None:
    whole = score(model, REQUESTS)
    monkeypatch.setattr("statescan.generation.scoring._SCORED_AT_ONCE", 3 * 256)
    assert_same(score(model, REQUESTS), whole)


@pytest.mark.parametrize("max_length", [1, 2, 5, 8, 39, 40, 41, 100])
def test_windows_predict_every_token_once_after_as_much_as_fits(max_length: int) -> None:
    for request in REQUESTS:
        cut = windows(request, max_length)
        assert [t for part in cut for t in part.continuation] == list(request.continuation)
        text = [*request.context, *request.continuation]
        end = len(request.context)
        for part in cut:
            end += len(part.continuation)
            read = [*part.context, *part.continuation][:-1]
            assert read == text[max(0, end - 1 - max_length) : end - 1]
            assert part.context


def test_a_window_is_scored_as_a_text_of_its_own(model: MambaLM) -> None:
    (found,) = score(model, [REQUESTS[3]], max_length=16)
    parts = [by_hand(model, part) for part in windows(REQUESTS[3], 16)]
    assert len(parts) == 3
    assert found.logprob == pytest.approx(sum(pair[0] for pair in parts), abs=NEAR)
    (whole,) = score(model, [REQUESTS[3]])
    assert abs(whole.logprob - found.logprob) > NEAR


class Words:
    """A tokenizer with words that keep the space before them, as those of language models do."""

    def encode(self, text: str) -> list[int]:
        words = text.replace(" ", "\0 ").split("\0")
        return [sum(word.encode()) % 200 for word in words if word]


def test_spaces_belong_to_the_continuation() -> None:
    words = Words()
    pair = encode_pair(words, "the cat ", "sat", 0)
    assert pair == encode_pair(words, "the cat", " sat", 0)
    assert pair == (words.encode("the cat"), words.encode(" sat"))
    assert encode_pair(ByteTokenizer(), "ab ", "c", 0) == ([97, 98], [32, 99])


def test_an_empty_context_is_the_prefix() -> None:
    assert encode_pair(ByteTokenizer(), "", "ab", 10) == ([10], [97, 98])
    assert encode_pair(ByteTokenizer(), " ", "ab", 10) == ([10], [32, 97, 98])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch_size": 0}, "batch_size=0"), ({"chunk_size": 0}, "chunk_size=0"),
     ({"max_length": 0}, "max_length=0")],
)  # fmt: skip
def test_bad_sizes_are_refused(model, options, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        score(model, REQUESTS, **options)


def test_an_empty_context_is_refused(model) -> None:
    with pytest.raises(ArgumentError, match="empty context"):
        score(model, [Request([], [1])])


def test_a_model_in_bfloat16(model: MambaLM) -> None:
    half = tiny_lm(sharp=True).to(torch.bfloat16)
    request = Request([3, 4, 5], [1, 4])
    expected, _ = by_hand(half, request)
    (found,) = score(half, [request], chunk_size=2)
    # Chunks round at other places; bfloat16 keeps 8 bits of logits up to 10.
    assert found.logprob == pytest.approx(expected, abs=0.3)
