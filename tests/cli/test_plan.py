# SPDX-License-Identifier: Apache-2.0
"""``statescan plan``: text, document, shells, exit codes and usage errors, on recorded machines."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from statescan.doctor.plan import planner

MACHINES = Path(__file__).resolve().parents[1] / "doctor" / "machines"
SCHEMA = json.loads(
    (Path(planner.__file__).parents[1] / "schemas" / "plan.schema.json").read_text()
)


def test_text_has_numbered_ways_and_says_that_nothing_was_done(run):
    done = run("plan", "mamba-ssm", "--facts", str(MACHINES / "healthy-gpu.json"))
    assert done.code == 0
    assert "1. Use statescan instead of mamba-ssm  [safe]" in done.out
    assert "Ways that are closed here:" in done.out
    assert "Nothing was changed" in done.out
    assert done.err == ""


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "export MAX_JOBS="),
        ("powershell", "$env:MAX_JOBS = "),
        ("cmd", 'set "MAX_JOBS='),
    ],
)
def test_commands_are_written_for_the_shell_that_is_asked_for(run, shell, line):
    facts = str(MACHINES / "healthy-gpu.json")
    assert line in run("plan", "mamba-ssm", "--facts", facts, "--shell", shell).out


def test_document_fits_its_schema(run):
    facts = str(MACHINES / "nvcc-missing.json")
    done = run("plan", "causal-conv1d", "--facts", facts, "--json")
    document = json.loads(done.out)
    jsonschema.validate(document, SCHEMA)
    assert document["ways"][0]["name"] == "statescan"


def test_no_way_is_a_failure(run):
    done = run("plan", "statescan", "--facts", str(MACHINES / "python-39.json"))
    assert done.code == 1
    assert "statescan needs Python 3.10" in done.out


def test_unknown_packages_and_unreadable_facts_are_mistakes_of_usage(run, tmp_path):
    assert run("plan", "mamba").code == 2
    (tmp_path / "facts.json").write_text("{}")
    for path in ("facts.json", "nothing.json"):
        done = run("plan", "mamba-ssm", "--facts", str(tmp_path / path))
        assert done.code == 2
        assert "facts" in done.err
