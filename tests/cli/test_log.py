# SPDX-License-Identifier: Apache-2.0
"""The command around the analysis: input, output, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import statescan

SCHEMA = Path(statescan.__file__).parent / "doctor/schemas/log.schema.json"
LOGS = Path(__file__).parents[1] / "doctor" / "logs"
FAILED = b"""$ pip install mamba-ssm==2.2.2
  error: subprocess-exited-with-error
      File "/home/somebody/env/lib/python3.11/site-packages/torch/__init__.py", line 1, in <module>
      /home/somebody/x.h:1:10: fatal error: Python.h: No such file or directory
  ERROR: Failed building wheel for mamba-ssm
"""
WORKED = b"$ pip install mamba-ssm\nSuccessfully installed mamba-ssm-2.2.4\n"


def document(outcome):
    """The one JSON document of a run, which fits the published schema."""
    content = json.loads(outcome.out)
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return content


@pytest.fixture
def log(tmp_path) -> str:
    path = tmp_path / "build.log"
    path.write_bytes(FAILED)
    return str(path)


def test_answer_is_cause_line_fix_and_what_it_is_not(run, log):
    outcome = run("log", log)
    assert outcome.code == 1
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0].startswith("[error] CC205 python-headers-missing: ")
    order = ("line 4: ", "fix: ", "python3.11-dev", "not the cause: ", "confidence: high")
    places = [outcome.out.index(part) for part in order]
    assert places == sorted(places)


def test_json_says_the_same(run, log):
    outcome = run("log", log, "--json")
    assert outcome.code == 1
    content = document(outcome)
    assert content["root_cause"]["id"] == "python-headers-missing"
    assert content["root_cause"]["code"] == "CC205"
    assert content["evidence"][0]["line"] == 4
    assert content["confidence"]["level"] == "high"
    assert content["values"]["package"] == "mamba-ssm"
    assert content["values"]["version"] == "2.2.2"
    assert content["file"] == log
    assert any("python3.11-dev" in line for line in content["fix"]["lines"])
    assert content["not_causes"][0]["lines"] == [2, 5]


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log"))[::4], ids=lambda path: path.stem)
def test_logs_make_documents_of_the_schema(run, path):
    outcome = run("log", str(path), "--json")
    content = document(outcome)
    assert outcome.code == (0 if content["root_cause"]["id"] == "success" else 1)


def test_success_is_exit_code_0(run):
    outcome = run("log", "-", stdin=WORKED)
    assert outcome.code == 0
    assert outcome.out.startswith("[ok] LOG001 success: ")
    assert document(run("log", "-", "--json", stdin=WORKED))["root_cause"]["id"] == "success"


def test_empty_input_is_truncated(run):
    outcome = run("log", "-", stdin=b"")
    assert outcome.code == 1
    assert "LOG002 log-truncated" in outcome.out
    content = document(run("log", "-", "--json", stdin=b""))
    assert content["root_cause"]["id"] == "log-truncated"
    assert content["evidence"] == []
    assert "empty" in content["confidence"]["reason"]


@pytest.mark.parametrize("name", ["missing.log", "."])
def test_unreadable_file_is_a_usage_error(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    outcome = run("log", name)
    assert outcome.code == 2
    assert outcome.out == ""
    assert f"log: '{name}' cannot be read" in outcome.err


def test_redact_hides_users(run, log):
    for arguments in ((), ("--json",)):
        plain = run("log", log, *arguments).out
        hidden = run("log", log, "--redact", *arguments).out
        assert "somebody" in plain
        assert "somebody" not in hidden
        assert "/home/USER" in hidden


def test_shell_is_the_one_asked_for(run, log):
    assert "sudo apt-get" in run("log", log).out
    text = run("log", log, "--shell", "powershell").out
    assert "$env:MAMBA_KEEP_CUDA_BUILD" in text
    assert document(run("log", log, "--json", "--shell", "cmd"))["shell"] == "cmd"


def test_shell_must_be_known(run, log):
    assert run("log", log, "--shell", "fish").code == 2


def test_no_torch_and_nothing_beyond_the_standard_library_is_imported(log):
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from statescan.cli.main import main\n"
        f"code = main(['log', {log!r}])\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(code, sorted(new - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "1 ['statescan']", done.stderr
