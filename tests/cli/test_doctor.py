# SPDX-License-Identifier: Apache-2.0
"""``statescan doctor`` from options to exit code, on recorded machines and on this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from statescan.doctor import catalog, checks
from statescan.doctor.model import Facts

MACHINES = Path(__file__).resolve().parents[1] / "doctor" / "machines"
SCHEMA = Path(checks.__file__).parents[1] / "schemas" / "doctor.schema.json"


def machine(name: str) -> str:
    return str(MACHINES / f"{name}.json")


@cache
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def valid(text: str):
    document = json.loads(text)
    validator().validate(document)
    return document


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("healthy-gpu", (), 0),
        ("healthy-gpu", ("--strict",), 0),
        ("nvcc-missing", (), 0),
        ("nvcc-missing", ("--for", "mamba-ssm"), 1),
        ("conv-missing", (), 0),
        ("conv-missing", ("--strict",), 1),
        ("torch-upgraded", ("gpu",), 0),
        ("torch-upgraded", ("abi",), 1),
        ("torch-upgraded", ("ABI601", "gpu"), 1),
    ],
)
def test_exit_code(run, name, options, code):
    outcome = run("doctor", "--facts", machine(name), *options)
    assert outcome.code == code
    document = valid(run("doctor", "--facts", machine(name), *options, "--json").out)
    assert document["ok"] is (code == 0)


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_every_machine_fits_the_schema_and_eighty_columns(run, path):
    options = ("--for", "mamba-ssm", "--facts", str(path))
    document = valid(run("doctor", *options, "--json").out)
    assert document["for"] == "mamba-ssm"
    assert document["facts_from"] == str(path)
    outcome = run("doctor", *options)
    commands = False
    for line in outcome.out.splitlines():
        # What is to be copied is never wrapped.
        commands = (commands and line.startswith("       ")) or line.startswith("  fix: ")
        assert commands or len(line) <= 80, line
    for finding in document["findings"]:
        assert f"[{finding['severity']}] {finding['code']} {finding['id']}" in outcome.out


def test_the_text_of_a_healthy_machine(run):
    outcome = run("doctor", "--facts", machine("healthy-gpu"))
    lines = outcome.out.splitlines()
    assert lines[0] == "Ubuntu 22.04.5 LTS, x86_64, glibc 2.35"
    assert lines[1] == "Judged: statescan, mamba-ssm and causal-conv1d."
    assert "[ok]      python       Python 3.11.9 (venv), pip 25.1" in lines
    assert "Not needed for this question: toolkit, compiler, resources." not in outcome.out
    assert any(line.split() == ["mamba-ssm", "2.3.1", "yes", "yes", "yes"] for line in lines)
    assert lines[-1] == "Nothing wrong for statescan, mamba-ssm and causal-conv1d."
    assert "[error]" not in outcome.out
    assert outcome.err == ""


def test_the_text_of_a_broken_machine(run):
    outcome = run("doctor", "--for", "mamba-ssm", "--facts", machine("torch-upgraded"))
    assert "[error]   toolkit      TK101: see below." in outcome.out
    assert "[error] ABI601 torch-abi-mismatch" in outcome.out
    assert "  fix: " in outcome.out
    assert outcome.out.splitlines()[-1] == "2 errors for mamba-ssm and causal-conv1d."
    assert "hint: `statescan plan mamba-ssm`" in outcome.err
    assert "hint: `statescan explain TK101`" in outcome.err
    assert "\033[" not in outcome.out


def test_a_choice_of_checks_says_that_it_is_one(run):
    outcome = run("doctor", "gpu", "--facts", machine("healthy-cpu-laptop"))
    assert outcome.out.splitlines()[-1] == (
        "Nothing wrong for statescan, as far as these checks go."
    )
    assert "packages" not in outcome.out


def test_what_nobody_needs_is_one_line(run):
    outcome = run("doctor", "--facts", machine("healthy-cpu-laptop"))
    assert "Not needed for this question: abi, api, triton, toolkit, compiler," in outcome.out
    assert "hint: `statescan doctor --for mamba-ssm`" in outcome.err
    assert outcome.code == 0


def test_colours_only_repeat_what_the_words_say(run, monkeypatch):
    plain = run("doctor", "--facts", machine("torch-upgraded")).out
    monkeypatch.setattr("statescan.cli.render.colour_wanted", lambda stream: True)
    coloured = run("doctor", "--facts", machine("torch-upgraded")).out
    assert "\033[31m[error]\033[0m" in coloured
    assert re.sub("\033\\[\\d*m", "", coloured) == plain


def test_commands_are_written_for_the_shell_of_the_facts(run):
    outcome = run("doctor", "--for", "mamba-ssm", "--facts", machine("windows-msvc-too-new"))
    assert "$env:PYTHONUTF8 = '1'" in outcome.out
    assert "export " not in outcome.out


def test_the_document_is_a_facts_file_itself(run, tmp_path):
    first = run("doctor", "--for", "mamba-ssm", "--facts", machine("gcc-14-nvcc-121"), "--json")
    saved = tmp_path / "saved.json"
    saved.write_text(first.out, encoding="utf-8")
    second = valid(run("doctor", "--for", "mamba-ssm", "--facts", str(saved), "--json").out)
    document = json.loads(first.out)
    assert second["findings"] == document["findings"] != []
    assert second["facts"] == document["facts"]
    assert Facts.read(saved).get("compiler.cxx")["version"] == "14.2.0"


def test_checks_tell_what_became_of_them(run):
    options = ("--for", "mamba-ssm", "--facts", machine("nvcc-missing"))
    document = valid(run("doctor", *options, "--json").out)
    rows = {row["name"]: row for row in document["checks"]}
    assert rows["nvcc-present"]["status"] == "found"
    assert rows["nvcc-age"]["status"] == "skipped"
    assert rows["nvcc-age"]["reason"] == "TK101 nvcc-missing comes first"
    assert rows["python-version"]["status"] == "ok"
    assert document["counts"] == {"error": 1, "warning": 0, "info": 0}


def test_redact_hides_homes_in_text_and_json(run, tmp_path):
    content = (MACHINES / "torch-upgraded.json").read_text(encoding="utf-8")
    path = tmp_path / "facts.json"
    path.write_text(content.replace("/home/user/", "/home/zaphod/"), encoding="utf-8")
    for options in (("--json",), ()):
        outcome = run("doctor", "--facts", str(path), *options)
        assert "zaphod" in outcome.out or not options
        outcome = run("doctor", "--facts", str(path), "--redact", *options)
        assert "zaphod" not in outcome.out + outcome.err


def test_list(run):
    outcome = run("doctor", "--list")
    assert outcome.code == 0
    for row in checks.all_checks():
        for slug in row.slugs:
            assert f"{catalog.problem(slug).code} " in outcome.out
            assert f"  {slug}" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    document = valid(run("doctor", "--list", "--json").out)
    assert len(document["checks"]) == len(checks.all_checks())
    chosen = valid(run("doctor", "--list", "triton", "--json").out)
    assert {row["area"] for row in chosen["checks"]} == {"triton"}


def test_matrix(run):
    outcome = run("doctor", "--matrix", "--facts", machine("two-cudas-wrong-first"))
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    for words in ("statescan", "mamba-ssm", "causal-conv1d", "11.8", "2.10.0+cu128", "Releases of"):
        assert words in outcome.out
    options = ("--for", "mamba-ssm", "--facts", machine("bare-venv"))
    document = valid(run("doctor", "--matrix", *options, "--json").out)
    assert {row["package"] for row in document["releases"]} == {"mamba-ssm"}
    assert document["here"]["torch"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("nvcc",), "nvcc-missing"),
        (("--facts", "absent.json"), "absent.json"),
        (("--list", "gpuu"), "gpu"),
    ],
)
def test_a_mistake_on_the_command_line(run, options, words):
    outcome = run("doctor", *options)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.out == ""


def test_other_packages_are_refused(run):
    outcome = run("doctor", "--for", "flash-attn")
    assert outcome.code == 2
    assert "flash-attn" in outcome.err


def test_a_file_that_holds_no_facts(run, tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"facts": {"system.os": "linux"}}', encoding="utf-8")
    outcome = run("doctor", "--facts", str(path))
    assert outcome.code == 2
    assert "statescan doctor --json" in outcome.err


def test_a_wrong_name_is_told_before_the_machine_is_looked_at(run, monkeypatch):
    def gather(*args, **kwargs):
        raise AssertionError("no probe may run")

    monkeypatch.setattr("statescan.doctor.facts.gather.gather", gather)
    assert run("doctor", "nvcc").code == 2
    assert run("doctor", "--list").code == 0


def test_here_without_imports(spawn):
    """The real probes on this machine: quick, and no torch in the process."""
    started = time.perf_counter()
    outcome = spawn("doctor", "--no-import", "--json", PYTHONPROFILEIMPORTTIME="1")
    seconds = time.perf_counter() - started
    assert outcome.code in (0, 1)
    assert seconds < 6, "two seconds on an idle machine; tests may share it"
    document = valid(outcome.out)
    assert document["facts"]["facts"]["python.version"]["value"] == sys.version.split()[0]
    assert not any(line.rpartition("|")[2].strip() == "torch" for line in outcome.err.splitlines())
    assert [row["id"] for row in document["findings"] if row["severity"] == "error"] == []


def test_here_with_the_child_process(spawn):
    outcome = spawn("doctor", "--json")
    document = valid(outcome.out)
    assert outcome.code == 0
    assert document["facts"]["facts"]["torch.import"]["value"]["ok"] is True
    assert document["facts"]["facts"]["statescan.smoke"]["value"]["ok"] is True
    own = next(row for row in document["packages"] if row["name"] == "statescan")
    assert (own["importable"], own["usable"]) == ("yes", "yes")


def test_here_without_torch(tmp_path):
    """A Python that sees this package and no site-packages: the standard library must do."""
    (tmp_path / "statescan").symlink_to(Path(checks.__file__).parents[2])
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    code = "import sys; from statescan.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "doctor", "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    document = valid(done.stdout)
    assert done.returncode == 1
    assert [row["id"] for row in document["findings"]] == ["torch-missing"]
    assert "Traceback" not in done.stderr
