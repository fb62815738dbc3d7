# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from statescan.errors import ArgumentError, StatescanError
from statescan.generation import SamplingConfig
from statescan.generation.sampling import GREEDY, Sampler, filter_probabilities, penalise

SCORES = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]))


def draw(config: SamplingConfig, logits: torch.Tensor, prompts=None) -> list[int]:
    prompts = prompts or [[0]] * logits.shape[0]
    return Sampler(config, prompts, logits.shape[1]).sample(logits).tolist()


def kept(**options) -> list[list[int]]:
    """Tokens with any probability left, row by row."""
    probabilities = filter_probabilities(SCORES, SamplingConfig(**options))
    return [row.nonzero().flatten().tolist() for row in probabilities]


def test_greedy_takes_the_first_of_the_best() -> None:
    assert draw(GREEDY, SCORES) == [0, 3]
    assert draw(GREEDY, torch.tensor([[1.0, 2.0, 2.0]])) == [1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 1}, [[0], [3]]),
        ({"top_k": 3}, [[0, 1, 2], [1, 2, 3]]),
        ({"top_k": 99}, [[0, 1, 2, 3]] * 2),
        ({"top_p": 0.3}, [[0], [3]]),
        ({"top_p": 0.45}, [[0, 1], [2, 3]]),
        ({"top_p": 1e-9}, [[0], [3]]),
        ({"min_p": 0.6}, [[0, 1], [2, 3]]),
        ({"min_p": 1.0}, [[0], [3]]),
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.7}, [[0, 1], [2, 3]]),
        # After top_k = 2 the probabilities are 4/7 and 3/7, and top_p counts on those.
        ({"top_k": 2, "top_p": 0.5}, [[0], [3]]),
    ],
)
def test_filters_keep_what_they_should(options, expected) -> None:
    assert kept(**options) == expected


def test_top_k_lets_no_tie_through() -> None:
    probabilities = filter_probabilities(torch.zeros(1, 5), SamplingConfig(top_k=2))
    assert (probabilities > 0).sum() == 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_divides(temperature: float) -> None:
    found = filter_probabilities(SCORES, SamplingConfig(temperature=temperature))
    assert torch.allclose(found, torch.softmax(SCORES / temperature, dim=-1))


def test_a_tiny_temperature_is_greedy_rather_than_nan() -> None:
    config = SamplingConfig(temperature=1e-40, seed=0)
    assert draw(config, SCORES * 1e4) == [0, 3]


def test_penalty_lowers_both_signs() -> None:
    scores = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
    seen = torch.tensor([[True, True, True, False]])
    assert penalise(scores, seen, 2.0).tolist() == [[1.0, -4.0, 0.0, 1.0]]


def test_penalty_counts_prompt_and_new_tokens() -> None:
    sampler = Sampler(SamplingConfig(temperature=0.0, repetition_penalty=2.0), [[3], [1, 1]], 4)
    logits = torch.tensor([[1.0, 1.5, 1.75, 2.0]] * 2)
    assert sampler.sample(logits).tolist() == [2, 3]
    assert sampler.sample(logits).tolist() == [1, 2]
    assert sampler.sample(logits).tolist() == [0, 0]


def test_draws_follow_the_probabilities() -> None:
    rows = 4000
    tokens = draw(SamplingConfig(seed=3), SCORES[:1].expand(rows, 4))
    counts = torch.bincount(torch.tensor(tokens), minlength=4) / rows
    # Three standard deviations of a share of 0.4 in 4000 draws are 0.023.
    assert (counts - SCORES[0].exp()).abs().max() < 0.025


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(3, 50, generator=generator) for _ in range(20)]

    def run(rows: list[int], seed) -> list[list[int]]:
        sampler = Sampler(SamplingConfig(seed=seed, top_p=0.9), [[0]] * len(rows), 50)
        return [sampler.sample(step[rows]).tolist() for step in logits]

    together = run([0, 1, 2], seed=[5, 6, 7])
    assert together == run([0, 1, 2], seed=5)
    for row in range(3):
        assert [step[row] for step in together] == [step[0] for step in run([row], seed=5 + row)]
    shuffled = run([2, 0, 1], seed=[7, 5, 6])
    assert [[step[1], step[2], step[0]] for step in shuffled] == together


def test_seeds() -> None:
    logits = torch.zeros(1, 1000)
    assert draw(SamplingConfig(seed=1), logits) == draw(SamplingConfig(seed=1), logits)
    assert draw(SamplingConfig(seed=1), logits) != draw(SamplingConfig(seed=2), logits)
    torch.manual_seed(0)
    fresh = [draw(SamplingConfig(), logits) for _ in range(3)]
    assert len({token for (token,) in fresh}) > 1
    torch.manual_seed(0)
    assert fresh[0] == draw(SamplingConfig(), logits)
    state = torch.get_rng_state()
    draw(SamplingConfig(seed=1), logits)
    assert torch.equal(torch.get_rng_state(), state)
    draw(SamplingConfig(seed=-1), logits)
    draw(SamplingConfig(seed=2**70), logits)


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, 0.0, 9.0, 9.0]])
    for config in (GREEDY, SamplingConfig(seed=0)):
        assert Sampler(config, [[0]], 2).sample(logits).item() < 2


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]] * 64)
    assert set(draw(SamplingConfig(seed=0), logits)) == {1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype_of_logits(dtype: torch.dtype) -> None:
    assert draw(GREEDY, SCORES.to(dtype)) == [0, 3]


def test_nan_is_refused() -> None:
    with pytest.raises(StatescanError, match="NaN"):
        draw(GREEDY, torch.tensor([[0.0, torch.nan]]))


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2.0}, {"repetition_penalty": 0.0}],
)  # fmt: skip
def test_options_out_of_range_are_refused(options) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ArgumentError, match=f"{name}={value}"):
        SamplingConfig(**options)


def test_one_seed_for_each_prompt_or_one_for_all() -> None:
    with pytest.raises(ArgumentError, match="2 seeds for 3"):
        draw(SamplingConfig(seed=[1, 2]), torch.zeros(3, 4))
