# SPDX-License-Identifier: Apache-2.0
"""The command around the writers: input, output, refusals, exit codes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import statescan
from statescan.cli import options, write
from statescan.doctor import generate
from statescan.doctor.facts import gather
from statescan.doctor.model import Fact, Facts

SCHEMA = Path(statescan.__file__).parent / "doctor/schemas/write.schema.json"
TARGET = "cuda=12.8 torch=2.7 python=3.11"


def document(outcome):
    """The one JSON document of a run, which fits the published schema."""
    content = json.loads(outcome.out)
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return content


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def facts_file(folder, **changes):
    values = {
        "system.os": "linux",
        "system.machine": "x86_64",
        "python.version": "3.11.7",
        "torch.version": "2.7.1+cu128",
        "torch.cuda": "12.8",
        **changes,
    }
    facts = Facts({name: Fact(name, value, "test") for name, value in values.items()})
    path = folder / "facts.json"
    path.write_text(json.dumps(facts.to_json()))
    return str(path)


@pytest.mark.parametrize("kind", list(generate.WRITERS))
@pytest.mark.parametrize("package", write.PACKAGES)
def test_every_kind_is_printed_and_nothing_else(run, kind, package):
    outcome = run("write", kind, "--for", package, "--target", TARGET)
    assert outcome.code == 0
    assert outcome.err == ""
    content = document(run("write", kind, "--for", package, "--target", TARGET, "--json"))
    assert outcome.out == content["text"]
    assert content["kind"] == kind
    assert content["package"] == package
    assert content["possible"] is True
    assert content["written"] is None
    assert content["target"].startswith("cuda=12.8 torch=2.7.1 python=3.11 os=linux")
    assert [row["name"] for row in content["choices"]].count("torch") == 1


def test_the_schema_is_strict(run):
    content = document(run("write", "requirements", "--target", TARGET, "--json"))
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for change in ({"more": 1}, {"text": None}, {"kind": "poetry"}, {"refusal": "no"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**content, **change}, schema)


def test_statescan_is_the_default_package(run):
    outcome = run("write", "requirements", "--target", TARGET)
    assert f"\nstatescan=={statescan.__version__}\n" in outcome.out


def test_output(run, tmp_path):
    path = tmp_path / "requirements.txt"
    outcome = run(
        *("write", "requirements", "--for", "mamba-ssm", "--target", TARGET),
        *("--output", str(path)),
    )
    assert outcome.code == 0
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[0] == f"wrote {path}"
    assert lines[1].startswith("note: ")
    assert lines[2:4] == ["next:", f"  pip install -r {path}"]
    assert "FORCE_BUILD=TRUE" in lines[-1]
    printed = run("write", "requirements", "--for", "mamba-ssm", "--target", TARGET).out
    assert path.read_bytes() == printed.encode()
    assert names_in(tmp_path) == ["requirements.txt"]


def test_output_as_json(run, tmp_path):
    path = tmp_path / "Dockerfile"
    outcome = run("write", "dockerfile", "--target", TARGET, "--output", str(path), "--json")
    content = document(outcome)
    assert outcome.err == ""
    assert content["written"] == str(path)
    assert content["text"] == path.read_text()
    assert content["steps"][0]["run"][:2] == ["docker", "build"]


def test_an_existing_file_is_left_alone(run, tmp_path):
    path = tmp_path / "Dockerfile"
    path.write_text("mine")
    outcome = run("write", "dockerfile", "--target", TARGET, "--output", str(path))
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: write: {str(path)!r} exists")
    assert "--force" in outcome.err
    assert path.read_text() == "mine"
    outcome = run("write", "dockerfile", "--target", TARGET, "--output", str(path), "--force")
    assert outcome.code == 0
    assert path.read_text().startswith("# ")
    assert names_in(tmp_path) == ["Dockerfile"]


def test_a_file_that_appears_meanwhile_is_left_alone(tmp_path):
    path = tmp_path / "lock"
    path.write_text("theirs")
    with pytest.raises(options.UsageError, match="exists"):
        write.put(path, "ours", force=False)
    assert path.read_text() == "theirs"
    assert names_in(tmp_path) == ["lock"]


@pytest.mark.parametrize("force", [False, True])
def test_without_hard_links(tmp_path, monkeypatch, force):
    def refuse(*_):
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "lock"
    write.put(path, "one\n", force)
    assert path.read_bytes() == b"one\n"
    if not force:
        with pytest.raises(options.UsageError, match="exists"):
            write.put(path, "two\n", force)
    assert names_in(tmp_path) == ["lock"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    def full(self, content):
        os.close(os.open(self, os.O_CREAT | os.O_WRONLY))
        raise OSError(28, "No space left on device")

    path = tmp_path / "lock"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write.put(path, "new", force=True)
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["lock"]


def test_the_mode_and_a_link_are_kept(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write.put(link, "new", force=True)
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("lock", "--force"), "--force is given without --output"),
        (("lock", "--output", "no/such/folder/file"), "cannot be a file"),
        (("lock", "--output", "."), "cannot be a file"),
        (("lock", "--target", "cudnn=9"), "'cudnn=9' is not understood"),
        (("lock", "--target", ""), "At least one KEY=VALUE"),
        (("lock", "--facts", "no-such-file"), "cannot be read"),
    ],
)
def test_usage_errors(run, args, said):
    outcome = run("write", *args)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert said in outcome.err
    assert len(outcome.err.splitlines()) >= 3


@pytest.mark.parametrize(
    "args",
    [
        ("write",),
        ("write", "poetry"),
        ("write", "lock", "--for", "mamba"),
        ("write", "lock", "--target", TARGET, "--facts", "x"),
    ],
)
def test_what_the_parser_refuses(run, args):
    assert run(*args).code == 2


def test_an_impossible_target(run, tmp_path):
    path = tmp_path / "lock"
    asked = ("write", "lock", "--for", "mamba-ssm", "--target", "torch=2.7 python=3.14")
    outcome = run(*asked, "--output", str(path))
    assert outcome.code == 1
    assert outcome.out == ""
    first, second, third = outcome.err.splitlines()
    assert first == "error: torch 2.7 has no wheels for Python 3.14."
    assert second.startswith("It has Python 3.9 to 3.13; Python 3.14 has torch 2.9 to ")
    assert third.startswith('Nearest possible: --target "cuda=')
    assert "python=3.13" in third
    assert not path.exists()


def test_an_impossible_target_as_json(run):
    asked = ("write", "ci", "--for", "mamba-ssm", "--target", "os=macos")
    outcome = run(*asked, "--json")
    assert outcome.code == 1
    content = document(outcome)
    assert content["possible"] is False
    assert content["text"] is None
    assert "macOS has no CUDA" in content["refusal"]["reason"]
    assert outcome.err.startswith("error: ")
    nearest = content["refusal"]["nearest"]
    assert run("write", "ci", "--for", "mamba-ssm", "--target", nearest).code == 0


def test_saved_facts(run, tmp_path):
    path = facts_file(tmp_path)
    outcome = run("write", "requirements", "--facts", path)
    assert outcome.code == 0
    assert "\ntorch==2.7.1+cu128\n" in outcome.out
    prose = " ".join(line.lstrip("# ") for line in outcome.out.splitlines())
    assert "from a machine's facts: cuda=12.8 torch=2.7.1 python=3.11 os=linux" in prose
    assert run("write", "requirements", "--facts", path).out == outcome.out


def test_facts_of_another_machine_are_all_that_counts(run, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("this machine was looked at")

    monkeypatch.setattr(gather, "gather", never)
    monkeypatch.setattr(gather, "gather_static", never)
    path = facts_file(tmp_path, **{"system.os": "macos", "system.machine": "arm64"})
    outcome = run("write", "requirements", "--for", "mamba-ssm", "--facts", path)
    assert outcome.code == 1
    assert "macOS has no CUDA" in outcome.err


def test_this_machine(run):
    one = run("write", "lock")
    assert one.code == 0
    assert one.out == run("write", "lock").out
    import torch

    release = torch.__version__.split("+")[0]
    assert f"\ntorch=={release}" in one.out


def test_redact(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "statescan.doctor.redact.local_secrets", lambda: {"secret-host-name": "HOST"}
    )
    folder = tmp_path / "secret-host-name"
    folder.mkdir()
    path = str(folder / "Dockerfile")
    asked = ("write", "dockerfile", "--target", TARGET, "--force", "--output", path, "--json")
    assert "secret-host-name" in run(*asked).out
    redacted = run(*asked, "--redact")
    assert "secret-host-name" not in redacted.out + redacted.err
    assert "HOST" in document(redacted)["written"]
    told = run(*asked[:-1], "--redact")
    assert "secret-host-name" not in told.out + told.err
    # The file lies where it was asked for all the same.
    assert Path(path).is_file()


def test_no_torch_is_imported():
    code = (
        "import sys; from statescan.cli.main import main; "
        f"code = main(['write', 'ci', '--for', 'mamba-ssm', '--target', {TARGET!r}]); "
        "assert not {'torch', 'yaml', 'packaging'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help(run):
    outcome = run("write", "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 90
    for kind in write.KINDS:
        assert f"  {kind} " in outcome.out
