# SPDX-License-Identifier: Apache-2.0
"""``statescan explain`` of the doctor's codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jsonschema
import pytest

import statescan
from statescan.doctor import advice, catalog, shells

SCHEMA = json.loads(
    (Path(catalog.__file__).parents[1] / "schemas" / "explain.schema.json").read_text()
)
PROBLEMS = list(catalog.problems().values())


def document(outcome):
    """The JSON of a run that went well, after a look at its schema."""
    assert outcome.code == 0
    assert outcome.err == ""
    content = json.loads(outcome.out)
    jsonschema.validate(content, SCHEMA)
    return content


def prose(out: str) -> list[str]:
    """Lines that are not commands or lines of logs, which are never wrapped."""
    return [line for line in out.splitlines() if not line.startswith(("    ", "  | ", "  http"))]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.slug)
def test_every_problem_is_printed_in_full(run, problem):
    outcome = run("explain", problem.slug)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"{problem.code} {problem.slug}: ")
    assert max(map(len, prose(outcome.out))) <= 80
    words = " ".join(outcome.out.split())
    fix = catalog.fill(problem.fix, {})
    for text in (problem.what, problem.why, fix.text, *problem.looks_like, *problem.wrong_advice):
        assert " ".join(text.split()) in words
    for line in problem.example:
        assert f"  | {line}".rstrip() in lines
    assert ("  safe: " if problem.fix.safe else "  care: ") in outcome.out


def test_code_and_name_in_any_case_are_the_same(run):
    outputs = {run("explain", name).out for name in ("TK101", "tk101", "nvcc-missing")}
    assert len(outputs) == 1


def test_the_commands_are_those_of_the_shell(run):
    page = {shell: run("explain", "nvcc-missing", "--shell", shell).out for shell in shells.SHELLS}
    assert "    export CUDA_HOME=/usr/local/cuda\n" in page["bash"]
    assert "    $env:CUDA_HOME = 'C:\\Program Files\\" in page["powershell"]
    assert '    set "CUDA_HOME=C:\\Program Files\\' in page["cmd"]


@pytest.mark.parametrize(("platform", "shell"), [("linux", "bash"), ("win32", "powershell")])
def test_without_an_option_the_shell_is_the_usual_one(run, monkeypatch, platform, shell):
    monkeypatch.setattr(sys, "platform", platform)
    assert run("explain", "TK101").out == run("explain", "TK101", "--shell", shell).out


def test_it_says_that_values_are_examples_and_keeps_that_out_of_the_page(run):
    outcome = run("explain", "TK101")
    assert outcome.err.startswith("\nhint: ")
    assert "examples" in outcome.err
    assert "hint" not in outcome.out


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.slug)
def test_json_of_a_problem(run, problem):
    shown = document(run("explain", problem.code, "--json"))["problem"]
    assert (shown["code"], shown["id"]) == (problem.code, problem.slug)
    assert shown["fix"]["safe"] is problem.fix.safe
    assert len(shown["fix"]["commands"]) == len(problem.fix.commands)


@pytest.mark.parametrize("entry", advice.entries().values(), ids=lambda entry: entry.code)
def test_advice_is_printed_and_its_json_fits(run, entry):
    outcome = run("explain", entry.code.lower())
    assert outcome.code == 0
    assert outcome.out.startswith(f"{entry.code}: ")
    assert f"\n{entry.verdict}: {advice.VERDICTS[entry.verdict]}\n" in outcome.out
    shown = document(run("explain", entry.code, "--json"))["advice"]
    assert shown["verdict"] == entry.verdict
    assert shown["instead"]


def test_advice_is_found_by_what_people_paste(run):
    assert run("explain", "sudo pip").out.startswith("ADV")
    assert "\nignored: changes nothing\n" in run("explain", "TORCH_CUDA_ARCH_LIST").out
    whole = next(iter(advice.entries().values()))
    assert run("explain", whole.advice).out.startswith(f"{whole.code}: ")


def test_list_names_every_code(run):
    outcome = run("explain", "--list")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    for code in [*(problem.code for problem in PROBLEMS), *advice.entries()]:
        assert f"  {code}" in outcome.out
    content = document(run("explain", "--list", "--json"))
    assert [row["id"] for row in content["problems"]] == [problem.slug for problem in PROBLEMS]
    assert [row["code"] for row in content["advice_entries"]] == list(advice.entries())


def test_json_of_an_op_fits_the_same_schema(run):
    assert document(run("explain", "causal_conv1d", "--json"))["chosen"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nvccmissing", "nvcc-missing"),
        ("TK10", "TK101"),
        ("selectivescan", "selective_scan"),
        ("nvcc", "nvcc-missing"),
        ("conda install", "ADV"),
    ],
)
def test_an_unknown_name_is_a_usage_error_with_what_is_near(run, name, near):
    outcome = run("explain", name)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith(f"error: explain: {name!r} is no op, no code")
    assert near in outcome.err.splitlines()[1]
    assert "`statescan explain --list`" in outcome.err


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        ((), "nothing to explain is named"),
        (("xyzzy",), "Nothing that is known is near it"),
        (("TK101", "--reverse"), "--reverse is given without one of the ops"),
        (("TK101", "--dstate", "4"), "--dstate is given without one of the ops"),
        (("selective_scan", "--shell", "cmd"), "--shell is given for the op selective_scan"),
    ],
)
def test_what_does_not_fit_together_is_refused(run, args, wrong):
    outcome = run("explain", *args)
    assert outcome.code == 2
    assert wrong in outcome.err


def test_a_page_needs_no_working_torch(spawn, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so is damaged')\n")
    source = str(Path(statescan.__file__).parents[1])
    outcome = spawn("explain", "TK101", PYTHONPATH=os.pathsep.join([str(tmp_path), source]))
    assert outcome.code == 0
    assert outcome.out.startswith("TK101 nvcc-missing: ")
