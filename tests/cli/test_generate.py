# SPDX-License-Identifier: Apache-2.0
import io
import itertools
import json
import sys

import pytest
import torch
from helpers.tiny_models import tiny_lm

from statescan.cli import render
from statescan.models import MambaLM, TextTokenizer, save_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny_lm(sharp=True), folder)
    return str(folder)


@pytest.fixture
def generate(run, model_dir):
    def runner(*args: str, stdin: bytes = b""):
        short = () if "--max-new-tokens" in args else ("--max-new-tokens", "12")
        return run("generate", "--model", model_dir, *short, *args, stdin=stdin)

    return runner


def test_text_goes_to_stdout_and_talk_to_stderr(generate):
    outcome = generate("--prompt", "ab", "--greedy")
    assert outcome.code == 0
    assert outcome.out.endswith("\n")
    assert not outcome.out.startswith("ab")
    assert "characters in" in outcome.err
    assert generate("--prompt", "ab", "--greedy", "--echo").out == f"ab{outcome.out}"


def test_the_same_seed_gives_the_same_text(generate):
    first = generate("--prompt", "ab", "--seed", "7")
    assert first.out == generate("--prompt", "ab", "--seed", "7").out
    assert first.out != generate("--prompt", "ab", "--seed", "8").out


def test_a_text_without_seed_can_be_repeated(generate):
    first = generate("--prompt", "ab")
    (seed,) = [part.split()[1] for part in first.err.split("; ") if part.startswith("--seed")]
    assert generate("--prompt", "ab", "--seed", seed).out == first.out


def test_prompt_from_file_and_stdin(generate, tmp_path):
    expected = generate("--prompt", "àb\n", "--greedy").out
    path = tmp_path / "prompt.txt"
    path.write_text("àb\n", encoding="utf-8")
    assert generate("--file", str(path), "--greedy").out == expected
    assert generate("--greedy", stdin="àb\n".encode()).out == expected
    assert generate("--file", "-", "--greedy", stdin="àb\n".encode()).out == expected


def test_bytes_that_are_no_text_are_taken(generate):
    assert generate("--greedy", stdin=b"\xff\xfe").code == 0
    # What the shell passes for such bytes are lone surrogates.
    assert generate("--greedy", "--prompt", "\udcff\udcfe").code == 0


def test_no_prompt_on_a_terminal_is_a_usage_error(run):
    outcome = run("generate", terminal=True)
    assert outcome.code == 2
    assert outcome.err.startswith("error: generate: there is no prompt.")


def test_unequal_prompts_in_a_batch_write_what_each_writes_alone(generate):
    prompts = ["a", "a longer prompt", "ab"]
    alone = [generate("--prompt", prompt, "--greedy").out for prompt in prompts]
    args = [part for prompt in prompts for part in ("--prompt", prompt)]
    together = generate(*args, "--greedy")
    expected = "".join(f"--- {i} of 3\n{text}" for i, text in enumerate(alone, 1))
    assert together.out == expected


def test_json(generate):
    outcome = generate("--prompt", "a", "--prompt", "ab", "--seed", "1", "--json", "--top-k", "5")
    document = json.loads(outcome.out)
    assert document["schema_version"] == 1
    assert document["sampling"] == {
        "repetition_penalty": 1.0,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1,
    }
    assert [result["prompt"] for result in document["results"]] == ["a", "ab"]
    assert {result["tokens"] for result in document["results"]} == {12}
    assert {result["finish_reason"] for result in document["results"]} == {"length"}


def test_stop_strings_end_the_text(generate):
    whole = generate("--prompt", "ab", "--greedy").out.rstrip("\n")
    stop = whole[3:5]
    before = whole[: whole.index(stop)]
    assert generate("--prompt", "ab", "--greedy", "--stop", stop).out == f"{before}\n"
    document = json.loads(generate("--prompt", "ab", "--greedy", "--stop", stop, "--json").out)
    assert document["results"][0]["finish_reason"] == "stop"
    assert document["results"][0]["text"] == before


def test_no_new_tokens(generate):
    assert generate("--prompt", "ab", "--max-new-tokens", "0").out == "\n"


@pytest.mark.parametrize(
    "args",
    [
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--top-k", "-2"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--greedy", "--temperature", "0.5"),
        ("--greedy", "--top-k", "5"),
        ("--stop", ""),
        ("--max-new-tokens", "-1"),
        ("--device", "nothing"),
    ],
    ids=" ".join,
)
def test_wrong_values_are_usage_errors(generate, args):
    outcome = generate("--prompt", "a", *args)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "error: " in outcome.err


def test_sampling_options_reach_the_sampler(generate):
    greedy = generate("--prompt", "ab", "--greedy").out
    for args in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1"), ("--temperature", "0")):
        assert generate("--prompt", "ab", "--seed", "5", *args).out == greedy
    assert generate("--prompt", "ab", "--greedy", "--repetition-penalty", "1e6").out != greedy


def test_a_missing_model_is_an_error(run, tmp_path):
    outcome = run("generate", "--prompt", "a", "--model", str(tmp_path / "none"))
    assert outcome.code == 1
    assert outcome.err.startswith("error: ")


def test_other_vocabularies_need_a_tokenizer(run, tmp_path):
    save_model(tiny_lm(vocab_size=300), tmp_path)
    outcome = run("generate", "--prompt", "a", "--model", str(tmp_path))
    assert outcome.code == 2
    assert "a vocabulary of 300 and no tokenizer.json" in outcome.err
    assert "--tokenizer" in outcome.err
    assert "EleutherAI/gpt-neox-20b" in outcome.err


TEXT = "x東🙂é."
"""Each of its bytes comes once, so that ``parrot`` can tell them apart."""


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer of 300 tokens, of which <|end|> is number 0."""
    library = pytest.importorskip(
        "tokenizers", reason="tokenizers is not installed: pip install 'statescan[models]'"
    )
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["words of plain letters"], trainer)
    return TextTokenizer(made, 0)


def parrot(text: list[int], **changes) -> MambaLM:
    """A model whose next token depends on the last one only: the one after it in ``text``."""
    model = tiny_lm(d_model=304, n_layer=1, vocab_size=300, tie_embeddings=False, **changes)
    with torch.no_grad():
        model.backbone.embedding.weight.copy_(torch.eye(304))
        model.backbone.layers[0].mixer.out_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for now, after in itertools.pairwise(text):
            model.lm_head.weight[after, now] = 1.0
    return model


@pytest.mark.parametrize("layout", ["state-spaces", "transformers"])
def test_a_checkpoint_with_its_tokenizer(run, tmp_path, tokenizer, layout):
    """Characters of several tokens come whole, and the text ends where the checkpoint says."""
    tokens = tokenizer.encode(TEXT)
    save_model(parrot([*tokens, 0]), tmp_path, layout=layout, max_shard_size="1MB")
    tokenizer.save(tmp_path)
    prompt, expected = tokenizer.decode(tokens[:1]), tokenizer.decode(tokens[1:])
    arguments = ("generate", "--model", str(tmp_path), "--greedy", "--prompt", prompt)
    assert len(tokens) == len(TEXT.encode()) and expected == TEXT[1:]
    assert run(*arguments).out == f"{expected}\n"
    document = json.loads(run(*arguments, "--json").out)
    assert document["results"][0]["finish_reason"] == "eos"
    assert document["results"][0]["text"] == expected
    half = run(*arguments, "--dtype", "bf16")
    assert half.out == f"{expected}\n"


def test_the_checkpoints_word_on_the_end_goes_before_the_tokenizers(run, tmp_path, tokenizer):
    first, second, third = (9, 5, 6)
    model = parrot([first, second, third, 0], eos_token_id=[third, 299])
    save_model(model, tmp_path / "model", layout="transformers")
    tokenizer.save(tmp_path / "elsewhere")
    prompt = tokenizer.decode([first])
    for where in (tmp_path / "elsewhere", tmp_path / "elsewhere" / "tokenizer.json"):
        outcome = run(
            *("generate", "--model", str(tmp_path / "model"), "--tokenizer", str(where)),
            *("--greedy", "--json", "--prompt", prompt),
        )
        (result,) = json.loads(outcome.out)["results"]
        assert (result["tokens"], result["finish_reason"]) == (2, "eos")


def test_a_tokenizer_of_another_model_is_refused(run, tmp_path, tokenizer, model_dir):
    tokenizer.save(tmp_path)
    arguments = ("--model", model_dir, "--tokenizer", str(tmp_path))
    outcome = run("generate", "--prompt", "a", *arguments)
    assert outcome.code == 2
    assert f"the tokenizer has {tokenizer.vocab_size} tokens, the model 256" in outcome.err


@pytest.mark.parametrize("option", ["--tokenizer", "--revision"])
def test_options_of_a_model_need_one(run, option):
    outcome = run("generate", "--prompt", "a", option, "x")
    assert outcome.code == 2
    assert f"{option} was given without --model" in outcome.err


def test_an_id_that_cannot_be_reached_is_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    outcome = run("generate", "--prompt", "a", "--model", "state-spaces/mamba-130m")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "pip install 'statescan[models]'" in outcome.err


def test_a_damaged_checkpoint_is_one_line(run, tmp_path):
    save_model(tiny_lm(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 99)
    outcome = run("generate", "--prompt", "a", "--model", str(tmp_path))
    assert outcome.code == 1
    assert outcome.err.startswith(f"error: {tmp_path}")
    assert outcome.err.count("\n") == 1


def test_a_terminal_is_protected_from_control_characters(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    render.stream("a\x1b[2Jb\té\n\x07")
    assert terminal.getvalue() == "a\ufffd[2Jb\té\n\ufffd"


def test_a_pipe_gets_the_text_as_it_is(capsys):
    render.stream("a\x1b[2Jb")
    assert capsys.readouterr().out == "a\x1b[2Jb"
