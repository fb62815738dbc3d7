# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import jsonschema
import pytest
from helpers import binaries

from statescan.doctor.model import Fact, Facts
from statescan.doctor.symbols import torch_files

SCHEMA = json.loads(
    (Path(torch_files.__file__).parents[1] / "schemas" / "symbols.schema.json").read_text()
)
WHEEL = "mamba_ssm-2.2.4+cu12torch2.5cxx11abiFALSE-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def facts(tmp_path) -> str:
    """A file of facts of a machine that has an A100 and a CUDA build of torch 2.8."""
    values = {
        "system.os": "linux",
        "system.machine": "x86_64",
        "system.libc": {"kind": "glibc", "version": "2.35"},
        "system.shell": "bash",
        "python.tag": "cp311",
        "python.version": "3.11.7",
        "torch.version": "2.8.0+cu128",
        "torch.cuda": "12.8",
        "torch.cxx11_abi": True,
        "driver.gpus": [{"name": "NVIDIA A100", "capability": "8.0"}],
    }
    made = Facts({name: Fact(name, value, "a test") for name, value in values.items()})
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(made.to_json()))
    return str(path)


@pytest.fixture
def old_extension(tmp_path) -> str:
    """Built for torch 2.2 or older, with old strings and code for one GPU."""
    torch = binaries.fake_torch(
        tmp_path / "build", cuda="12.1", symbols={"libc10_cuda.so": [binaries.SET_DEVICE_INT]}
    )
    code = binaries.gpu_section(tmp_path, binaries.fat_binary(["80"]))
    needs = [torch / "lib" / name for name in ("libc10.so", "libc10_cuda.so")]
    wants = [binaries.SET_DEVICE_INT, binaries.OLD_CHECK]
    return str(binaries.extension(tmp_path / binaries.MODULE, wants, needs, (), code))


def document(run, *args: str) -> tuple[int, dict]:
    outcome = run("symbols", *args, "--json")
    found = json.loads(outcome.out)
    jsonschema.validate(found, SCHEMA, jsonschema.Draft202012Validator)
    return outcome.code, found


def verdict(out: str) -> str:
    """The sentence at the end, put together from its lines."""
    return " ".join(out.partition("verdict: ")[2].split())


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_an_extension_for_another_torch(run, facts, old_extension):
    outcome = run("symbols", old_extension, "--facts", facts)
    assert outcome.code == 1
    assert "built for torch 2.2 or older, old C++ strings (cxx11abiFALSE)" in outcome.out
    assert "machine code for sm_80" in outcome.out
    assert "[error] ABI602 cxx11-abi-mismatch" in outcome.out
    assert "[error] ABI601 torch-abi-mismatch" in outcome.out
    assert verdict(outcome.out) == (
        f"{binaries.MODULE} uses the old (cxx11abiFALSE) C++ strings, "
        "and torch 2.8.0+cu128 the new (cxx11abiTRUE) ones."
    )


def test_the_same_as_json(run, facts, old_extension):
    code, found = document(run, old_extension, "--facts", facts)
    assert code == 1
    assert (found["command"], found["schema_version"], found["kind"]) == ("symbols", 1, "binary")
    assert [row["id"] for row in found["findings"]] == ["cxx11-abi-mismatch", "torch-abi-mismatch"]
    assert found["facts_from"] == facts
    assert found["wheel"] is None
    binary = found["binary"]
    assert binary["torch_generation"]["last"] == "2.2"
    assert binary["cuda_archs"] == {"cubin": ["sm_80"], "ptx": []}
    # Facts of another machine say nothing about the libraries of this one.
    assert binary["libraries"] is None


def test_with_the_torch_of_a_folder(run, facts, old_extension, tmp_path):
    folder = str(tmp_path / "build")
    code, found = document(run, old_extension, "--facts", facts, "--torch", folder)
    assert (code, found["findings"]) == (0, [])
    assert found["binary"]["missing"]["torch"] == []
    other = binaries.fake_torch(tmp_path / "other", version="2.6.0+cpu")
    code, found = document(run, old_extension, "--facts", facts, "--torch", str(other))
    assert code == 1
    assert [row["id"] for row in found["findings"]] == ["torch-is-cpu-only"]
    assert [row["readable"] for row in found["binary"]["missing"]["torch"]] == [
        "c10::cuda::SetDevice(int)"
    ]


def test_on_this_machine(run, old_extension, tmp_path):
    folder = str(tmp_path / "build")
    code, found = document(run, old_extension, "--torch", folder)
    states = {row["name"]: row["status"] for row in found["binary"]["libraries"]}
    assert states["libc.so.6"] == "found"
    assert states["libc10.so"] == "after-torch"
    # A library that `import torch` does not load in this folder, and that nothing else finds.
    assert states["libc10_cuda.so"] in ("missing", "after-torch")
    assert code == int(bool(found["findings"]))


def test_a_sound_extension_on_this_machine(run, tmp_path):
    path = binaries.extension(tmp_path / "plain.so", ["PyList_New"])
    outcome = run("symbols", str(path))
    assert outcome.code == 0
    assert verdict(outcome.out) == (
        "plain.so loads here: every library and symbol that it needs is there."
    )


def test_a_wheel(run, facts, old_extension, tmp_path):
    members = {binaries.MODULE: Path(old_extension).read_bytes()}
    path = str(binaries.wheel(tmp_path / "w" / WHEEL, members))
    outcome = run("symbols", path, "--facts", facts)
    assert outcome.code == 1
    assert "cu12, torch 2.5, cxx11abiFALSE" in outcome.out
    assert binaries.MODULE in outcome.out
    code, found = document(run, path, "--facts", facts)
    assert code == 1
    assert found["kind"] == "wheel"
    assert found["binary"] is None
    assert [row["id"] for row in found["findings"]] == ["cxx11-abi-mismatch", "torch-abi-mismatch"]
    assert [row["path"] for row in found["wheel"]["binaries"]] == [binaries.MODULE]


@pytest.mark.parametrize("name", [binaries.MODULE, WHEEL])
def test_a_damaged_file_is_a_finding(run, facts, tmp_path, name):
    path = tmp_path / "damaged" / name
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF" + bytes(40))
    outcome = run("symbols", str(path), "--facts", facts)
    assert outcome.code == 1
    assert "ABI611 binary-damaged" in outcome.out
    _, found = document(run, str(path), "--facts", facts)
    assert [row["id"] for row in found["findings"]] == ["binary-damaged"]
    assert found["verdict"].startswith(name)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("notes.so", b"plain words", "no binary of Linux, Windows or macOS"),
        ("part.a", b"!<arch>\n", "a static library"),
        ("page.so", b"<html>", "a page of HTML"),
        ("some.whl", b"PK\x03\x04", "is no name of a wheel"),
    ],
)
def test_files_of_another_kind_are_a_mistake(run, facts, tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    outcome = run("symbols", str(path), "--facts", facts)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err


def test_mistakes_on_the_command_line(run, facts, tmp_path):
    outcome = run("symbols", str(tmp_path / "absent.so"), "--facts", facts)
    assert outcome.code == 2 and "absent" in outcome.err
    outcome = run("symbols", str(tmp_path), "--facts", facts)
    assert outcome.code == 2 and "a folder" in outcome.err
    path = binaries.extension(tmp_path / "plain.so")
    outcome = run("symbols", str(path), "--facts", facts, "--torch", str(tmp_path))
    assert outcome.code == 2 and "no libraries of torch" in outcome.err
    outcome = run("symbols", str(path), "--facts", str(tmp_path / "none.json"))
    assert outcome.code == 2


def test_redact(run, facts, tmp_path):
    home = tmp_path / "home" / "somebody" / "x.so"
    path = binaries.extension(home)
    data = path.read_bytes()
    whole = run("symbols", str(path), "--facts", facts).out
    assert "somebody" in whole
    for more in ((), ("--json",)):
        outcome = run("symbols", str(path), "--facts", facts, "--redact", *more)
        assert "somebody" not in outcome.out
    assert path.read_bytes() == data


def test_hints_go_to_stderr(run, facts, old_extension, tmp_path):
    saved = json.loads(Path(facts).read_text())
    saved["facts"].pop("driver.gpus")
    other = tmp_path / "no-gpu.json"
    other.write_text(json.dumps(saved))
    outcome = run("symbols", old_extension, "--facts", str(other))
    assert "no GPU is known here" in outcome.err
    assert "no GPU is known here" not in outcome.out
    assert "no GPU is known here" not in run("symbols", old_extension, "--facts", facts).err


def test_an_answer_fits_a_terminal_of_80_columns(run, facts, old_extension):
    outcome = run("symbols", old_extension, "--facts", facts)
    path, *lines = outcome.out.splitlines()
    assert path == old_extension
    long = [line.split()[0] for line in lines if len(line) > 80]
    # Only commands and their comments, which are copied whole, may be longer.
    assert not [word for word in long if word not in ("python", "#") and "=TRUE" not in word]
    assert "\033" not in outcome.out
