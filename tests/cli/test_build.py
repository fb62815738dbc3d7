# SPDX-License-Identifier: Apache-2.0
"""``statescan build``: dry runs and refusals on recorded machines, options, and one real build."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from helpers import binaries, fake_build

from statescan.cli import build as command
from statescan.doctor.builder import model

MACHINES = Path(__file__).parents[1] / "doctor" / "machines"
SCHEMA = Path(model.__file__).parents[1] / "schemas" / "build.schema.json"


def facts(name):
    return str(MACHINES / f"{name}.json")


def dry(run, *args, machine="healthy-gpu"):
    return run("build", *args, "--dry-run", "--facts", facts(machine))


def document(outcome):
    content = json.loads(outcome.out)
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return content


def test_a_dry_run_prints_the_environment_and_every_command_and_does_nothing(run, monkeypatch):
    monkeypatch.setattr(command.time, "strftime", lambda _: "20260101-000000")
    outcome = dry(run, "causal-conv1d")
    assert outcome.code == 0
    for line in (
        "causal-conv1d 1.7.0",
        "GPU code: sm_86 (NVIDIA GeForce RTX 3090)",
        "export CUDA_HOME=/usr/local/cuda",
        "export MAX_JOBS=3",
        "export CAUSAL_CONV1D_FORCE_BUILD=TRUE",
        "export PATH=/usr/local/cuda/bin:/home/user/venv/bin${PATH:+:$PATH}",
        "/home/user/venv/bin/python -m pip wheel -v --no-deps --no-build-isolation --no-cache-dir",
        "Nothing was done: without --dry-run these commands are run.",
    ):
        assert line in outcome.out
    folder = re.search(r"PYTORCH_NVCC=(\S+)/nvcc", outcome.out)[1]
    assert folder.endswith("builds/causal-conv1d-20260101-000000")
    assert not Path(folder).exists()


def test_the_document_of_a_dry_run(run):
    content = document(dry(run, "mamba-ssm", "--arch", "9.0", "--json"))
    assert content["status"] == "planned"
    assert content["targets"]["names"] == ["sm_90"]
    assert content["environment"]["set"]["MAMBA_KEEP_CUDA_BUILD"] == "TRUE"
    assert [row["name"] for row in content["stages"]] == [
        *("tools", "source", "compile", "install", "import", "smoke")
    ]
    assert content["log"] is None


def test_a_refusal_comes_before_anything_is_started_with_the_fix(run, tmp_path):
    folder = tmp_path / "work"
    outcome = dry(run, "causal-conv1d", "--folder", str(folder), machine="nvcc-missing")
    assert outcome.code == 1
    assert "[error] TK101 nvcc-missing" in outcome.out
    assert "fix: " in outcome.out
    assert "Refused before anything was started" in outcome.out
    assert not folder.exists()
    content = document(dry(run, "causal-conv1d", "--json", machine="nvcc-missing"))
    assert (content["status"], content["stages"]) == ("refused", [])
    assert content["findings"][0]["id"] == "nvcc-missing"


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_every_recorded_machine_has_an_answer_that_fits_80_columns(run, path):
    for package in command.PACKAGES:
        outcome = run("build", package, "--dry-run", "--facts", str(path))
        assert outcome.code in (0, 1)
        assert outcome.err == ""
        # Commands are never broken; they and their notes are indented by four or more.
        prose = [line for line in outcome.out.splitlines() if not re.match(r"    |  export ", line)]
        assert max(map(len, prose)) <= 80
        document(run("build", package, "--dry-run", "--json", "--facts", str(path)))


def test_windows_is_told_the_way_out_in_its_own_shell(run):
    outcome = dry(run, "mamba-ssm", machine="windows-without-msvc")
    assert outcome.code == 1
    assert "wsl --install" in outcome.out
    assert "export" not in outcome.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["statescan"], "invalid choice"),
        (["mamba-ssm", "--facts", "x.json"], "only --dry-run makes sense"),
        (["mamba-ssm", "--dry-run", "--facts", "/nowhere.json"], "cannot be read"),
        (["mamba-ssm", "--arch", "hopper"], "is no GPU code"),
        (["mamba-ssm", "--version", "0.0.1"], "has no release 0.0.1"),
        (["mamba-ssm", "--folder", __file__], "that is a file"),
    ],
)
def test_mistakes_on_the_command_line(run, args, message):
    if "--facts" not in args and "--folder" not in args and len(args) > 1:
        args = [*args, "--dry-run", "--facts", facts("healthy-gpu")]
    outcome = run("build", *args)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.out == ""


def test_a_build_from_the_command_line_talks_on_stderr_and_answers_on_stdout(
    run, tmp_path, monkeypatch
):
    binaries.gcc()
    shop = fake_build.workshop(tmp_path / "shop")
    for name, value in shop.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "_facts", lambda _: shop.facts())
    monkeypatch.setattr(command.sys, "executable", shop.python)
    folder = tmp_path / "work"
    outcome = run("build", "causal-conv1d", "--arch", "90", "--folder", str(folder), "--json")
    content = document(outcome)
    assert (outcome.code, content["status"]) == (0, "built"), outcome.err
    assert content["folder"] == str(folder)
    assert Path(content["log"]).is_file()
    assert len(content["kernels"]) == 2
    assert f"log:      {folder}/build.log" in outcome.err
    assert "Compile it for sm_90 ..." in outcome.err
    assert "of 2 files compiled" in outcome.err
    assert "[ok]      Import causal_conv1d_cuda" in outcome.err


def test_home_folders_are_hidden_when_asked(run):
    outcome = dry(run, "causal-conv1d", "--redact")
    assert "/home/user/" not in outcome.out
    assert "/home/USER/venv/bin/python -m pip wheel" in outcome.out
    content = document(dry(run, "causal-conv1d", "--redact", "--json"))
    assert "/home/user/" not in json.dumps(content)
