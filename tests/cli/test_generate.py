# SPDX-License-Identifier: Apache-2.0
import io
import json
import sys

import pytest
from helpers.tiny_models import tiny_lm

from statescan.cli import render
from statescan.models import save_model


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


def test_other_vocabularies_are_refused(run, tmp_path):
    save_model(tiny_lm(vocab_size=300), tmp_path)
    outcome = run("generate", "--prompt", "a", "--model", str(tmp_path))
    assert outcome.code == 2
    assert "vocabulary of 300" in outcome.err


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
