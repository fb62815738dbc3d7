# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from helpers.tiny_models import tiny_lm

from statescan.errors import ArgumentError, MissingExtraError
from statescan.generation import SamplingConfig, generate, harness
from statescan.generation.harness import Evaluated
from statescan.models import ByteTokenizer, TextTokenizer, save_model

LONG = "In the beginning God created the heaven and the earth. " * 3


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return Evaluated(tiny_lm(sharp=True), batch_size=3)


def bits(model, text: str, start: int = 1) -> float:
    """Log probability of text[start:], from one forward."""
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    return float(table[:-1].gather(1, ids[0, 1:, None])[start - 1 :].sum())


def test_pairs_of_texts_of_unequal_lengths(evaluated: Evaluated) -> None:
    pairs = [("a", " b"), (LONG, "And"), ("", "xyz"), ("ab ", "c"), ("q", "r")]
    found = evaluated.loglikelihoods(pairs)
    texts = [("a b", 1), (LONG + "And", len(LONG) - 1), ("\nxyz", 1), ("ab c", 2), ("qr", 1)]
    expected = [bits(evaluated.model, *text) for text in texts]
    assert [pair[0] for pair in found] == pytest.approx(expected, abs=1e-3)
    assert all(type(pair[0]) is float and type(pair[1]) is bool for pair in found)


def test_whole_texts_follow_a_newline(evaluated: Evaluated) -> None:
    found = evaluated.rolling_loglikelihoods([LONG, "", "x"])
    expected = [bits(evaluated.model, "\n" + LONG), 0.0, bits(evaluated.model, "\nx")]
    assert found == pytest.approx(expected, abs=1e-3)


def test_windows_are_used_only_below_the_texts_length() -> None:
    model = tiny_lm(sharp=True)
    whole = Evaluated(model, max_length=0).rolling_loglikelihoods([LONG])
    assert Evaluated(model, max_length=4096).rolling_loglikelihoods([LONG]) == whole
    windowed = Evaluated(model, max_length=16).rolling_loglikelihoods([LONG])
    assert abs(windowed[0] - whole[0]) > 1e-3


def test_continuations_equal_each_alone(evaluated: Evaluated) -> None:
    greedy = {"until": ["e"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    sampled = {"until": [], "max_gen_toks": 6, "do_sample": True, "top_k": 5, "seed": 3}
    requests = [("x", sampled), ("abc", greedy), (LONG, greedy), ("", greedy), ("hello", greedy)]
    found = evaluated.continuations(requests)
    assert found == [evaluated.continuations([request])[0] for request in requests]
    alone = generate(*(evaluated.model, [list(b"abc")], 12), stop="e", tokenizer=ByteTokenizer())
    assert alone.texts == [found[1]]
    assert not any("e" in text for text in found[1:])
    drawn = generate(
        *(evaluated.model, [list(b"x")], 6),
        sampling=SamplingConfig(top_k=5, seed=3),
        tokenizer=ByteTokenizer(),
    )
    assert drawn.texts == [found[0]]


def test_a_prompt_leaves_room_for_its_continuation() -> None:
    model = tiny_lm(sharp=True)
    found = Evaluated(model, max_length=20).continuations([(LONG, {"max_gen_toks": 8})])
    expected = generate(model, [list(LONG.encode())[-12:]], 8, tokenizer=ByteTokenizer())
    assert found == expected.texts


def test_a_model_folder_with_a_tokenizer_beside_it(tmp_path) -> None:
    library = pytest.importorskip("tokenizers", reason="pip install 'statescan[models]'")
    words = {"<end>": 0, "the": 1, "cat": 2, "sat": 3, "<unk>": 4}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    model = tiny_lm(vocab_size=5, pad_vocab_size_multiple=1)
    save_model(model, tmp_path)
    TextTokenizer(tokenizer, eos_token_id=0).save(tmp_path)
    evaluated = Evaluated(str(tmp_path))
    assert evaluated.prefix_token_id == 0
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([[1, 2, 3]])).logits[0], dim=-1)
    (found,) = evaluated.loglikelihoods([("the cat", " sat")])
    assert found[0] == pytest.approx(float(table[1, 3]), abs=1e-4)
    elsewhere = Evaluated(model, str(tmp_path))
    assert elsewhere.loglikelihoods([("the cat", " sat")]) == [found]


def test_options_that_are_not_known_are_refused(evaluated: Evaluated) -> None:
    with pytest.raises(ArgumentError, match="num_beams=4"):
        evaluated.continuations([("a", {"num_beams": 4})])
    assert len(evaluated.continuations([("a", {"num_beams": 1, "max_gen_toks": 1})])) == 1


def test_a_model_folder(tmp_path) -> None:
    model = tiny_lm(sharp=True)
    save_model(model, tmp_path)
    found = Evaluated(str(tmp_path)).loglikelihoods([("ab", "cd")])
    assert found[0][0] == pytest.approx(bits(model, "abcd", 2), abs=1e-3)


class Halves:
    """Two tokens a byte, and a token that ends a text."""

    eos_token_id = 16

    def encode(self, text: str) -> list[int]:
        return [half for byte in text.encode() for half in divmod(byte, 16)]

    def decoder(self):
        return self

    def feed(self, token: int) -> str:
        return f"{token:x}"

    def flush(self) -> str:
        return ""


def test_a_model_with_a_tokenizer() -> None:
    model = tiny_lm(vocab_size=17, pad_vocab_size_multiple=8)
    evaluated = Evaluated(model, Halves())
    (found,) = evaluated.loglikelihoods([("", "A")])
    ids = torch.tensor([[16, 4, 1]])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0, :, :17], dim=-1)
    assert found[0] == pytest.approx(float(table[0, 4] + table[1, 1]), abs=1e-4)
    assert set(evaluated.continuations([("A", {"max_gen_toks": 3})])[0]) <= set("0123456789abcdef")
    with pytest.raises(ArgumentError, match="vocabulary of 17"):
        Evaluated(model)
    with pytest.raises(ArgumentError, match="prefix_token_id"):
        Evaluated(model, type("Bare", (), {"encode": Halves.encode})())


def test_sampled_requests_draw_by_their_number_whatever_the_batch(evaluated: Evaluated) -> None:
    options = {"max_gen_toks": 6, "do_sample": True, "seed": 3}
    requests = [("abc", options), ("x", options), (LONG, options), ("hello", options)]
    found = evaluated.continuations(requests)
    one_by_one = Evaluated(evaluated.model, batch_size=1).continuations(requests)
    assert found == one_by_one
    assert len(set(found)) == 4


def test_without_lm_eval_it_says_what_to_install(monkeypatch) -> None:
    def missing(name: str):
        raise ImportError(f"No module named {name!r}")

    harness._model_class.cache_clear()
    monkeypatch.setattr(harness, "import_module", missing)
    with pytest.raises(MissingExtraError, match="pip install lm_eval"):
        _ = harness.StatescanLM
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = harness.Nothing


NO_CUDA = not torch.cuda.is_available()
# The harness and its libraries warn of many things that are not ours.
quiet = pytest.mark.filterwarnings("ignore")


@quiet
def test_the_harness_accepts_the_model_and_its_windows_are_ours(evaluated: Evaluated) -> None:
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import get_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from statescan.generation.scoring import Request, windows

    with pytest.warns(UserWarning, match="runs on the CPU") if NO_CUDA else nullcontext():
        lm = harness.StatescanLM(evaluated.model, device="cuda:0")
    assert get_model("statescan") is harness.StatescanLM
    assert isinstance(lm, LM)
    calls = [Instance("loglikelihood", {}, ("ab", "cd"), 0)]
    assert lm.loglikelihood(calls) == evaluated.loglikelihoods([("ab", "cd")])
    for length in (1, 7, 16, 100):
        theirs = map(make_disjoint_window, get_rolling_token_windows([*range(33)], 99, length, 1))
        assert [tuple(w) for w in windows(Request([99], range(33)), length)] == list(theirs)


@quiet
@pytest.mark.slow
def test_a_local_task_runs_with_the_harness_own_program(tmp_path) -> None:
    """No network: the task's data is a file beside it."""
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    rows = [
        {"q": "In the beginning God created the", "choices": [" heaven", " zxqj"], "gold": 0},
        {"q": "And the LORD said unto", "choices": [" qqqq", " Moses"], "gold": 1},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
    )
    (tmp_path / "choice.yaml").write_text(
        f"task: choice\n{common}output_type: multiple_choice\ntest_split: test\n"
        "doc_to_text: q\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list: [{metric: acc}]\n"
    )
    (tmp_path / "rolling.yaml").write_text(
        f"task: rolling\n{common}output_type: loglikelihood_rolling\ntest_split: test\n"
        "doc_to_text: ''\ndoc_to_target: q\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    (tmp_path / "written.yaml").write_text(
        f"task: written\n{common}output_type: generate_until\ntest_split: test\n"
        "doc_to_text: q\ndoc_to_target: ' x'\ngeneration_kwargs: {until: ['.'], max_gen_toks: 5}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "statescan.generation.harness", "run", "--model", "statescan"),
            *("--model_args", "pretrained=embedded,max_length=512", "--batch_size", "2"),
            *("--tasks", "choice,rolling,written", "--include_path", str(tmp_path)),
            *("--output_path", str(tmp_path / "results.json")),
        ],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = tmp_path.rglob("results*.json")
    results = json.loads(found.read_text())["results"]
    assert results["choice"]["acc,none"] == 1.0
    assert 0.5 < results["rolling"]["bits_per_byte,none"] < 3
    assert not math.isnan(results["written"]["exact_match,none"])
