# SPDX-License-Identifier: Apache-2.0
import json
import re
import sys

import pytest
from helpers.tiny_models import tiny_lm

from statescan import dispatch, models
from statescan.backends import native
from statescan.backends.base import ALL_OPS, Support
from statescan.backends.reference import ReferenceBackend
from statescan.backends.torch import TorchBackend
from statescan.cli import _checks, _measure, quickstart
from statescan.cli._checks import QUICK_CASES, check_op
from statescan.models import ByteTokenizer
from statescan.testing.cases import get_case

AUTOMATIC = ("torch",) if native.status().library is None else ("cpu", "torch")
"""What ``auto`` may choose here, in its order."""


@pytest.fixture
def quick(run, monkeypatch):
    """The command with a tiny model and tiny sizes; what it shows is what is tested here."""
    monkeypatch.setattr(models, "load_embedded", lambda: (tiny_lm(), ByteTokenizer()))
    monkeypatch.setattr(quickstart, "SIZES", {**quickstart.SIZES, "dim": 8, "seqlen": 32})
    monkeypatch.setattr(quickstart, "NEW_TOKENS", 8)
    monkeypatch.setattr(_measure, "measure", _measure.run_here)
    monkeypatch.setattr(_checks, "QUICK_CASES", {op: QUICK_CASES[op][:1] for op in ALL_OPS})

    def short(spec):
        return _measure.run_here(_measure.Spec(**{**vars(spec), "seconds": 0.0}))

    monkeypatch.setattr(_measure, "measure", short)
    return lambda *args: run("quickstart", *args)


@pytest.mark.slow
def test_end_to_end_as_a_user(spawn):
    outcome = spawn("quickstart", "--prompt", "And God said")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "And God said" in outcome.out
    assert "All verdicts hold." in outcome.out
    for op in ALL_OPS:
        for backend in AUTOMATIC:
            assert re.search(rf"^{op} +{backend} +float32 .* ok$", outcome.out, re.MULTILINE)
    assert re.search(r"^naive algorithm +forward +[\d.]+ +[\d.]+ MiB$", outcome.out, re.MULTILINE)
    for way in ("forward", r"forward \+ backward"):
        for backend in AUTOMATIC:
            pattern = rf"^backend {backend} +{way} +[\d.]+ +[\d.]+ MiB$"
            assert re.search(pattern, outcome.out, re.MULTILINE)


def test_all_parts_in_order(quick):
    outcome = quick()
    assert outcome.code == 0, outcome.out + outcome.err
    parts = ("statescan ", "Backends", "Correctness", "Speed", "Text", "All verdicts hold.")
    places = [outcome.out.index(part) for part in parts]
    assert places == sorted(places)
    assert quickstart.DEFAULT_PROMPT in outcome.out
    assert outcome.err.startswith("\nhint: ")
    lines = outcome.out[: outcome.out.index(quickstart.DEFAULT_PROMPT)].splitlines()
    assert max(map(len, lines)) <= 80


def test_json_is_one_document_with_everything(quick):
    outcome = quick("--json", "--prompt", "ab")
    assert outcome.code == 0
    document = json.loads(outcome.out)
    assert document["schema_version"] == 1
    assert document["passed"] is True
    assert [row["backend"] for row in document["backends"]] == ["cpu", "cuda", "torch", "reference"]
    checks = {(row["op"], row["backend"], row["dtype"]) for row in document["checks"]}
    assert checks == {
        (op, backend, dtype)
        for op in ALL_OPS
        for backend in (*AUTOMATIC, "reference")
        for dtype in quickstart.DTYPES
    }
    assert [(row["version"], row["direction"]) for row in document["speed"]["rows"]] == [
        ("naive", "fwd"),
        *((backend, way) for backend in AUTOMATIC for way in ("fwd", "fwd_bwd")),
    ]
    assert document["generation"]["prompt"] == "ab"
    assert document["generation"]["error"] is None


def test_prompt_from_a_file_is_its_end(quick, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("start " + "é" * quickstart.LONGEST_PROMPT, encoding="utf-8")
    document = json.loads(quick("--json", "--file", str(path)).out)
    prompt = document["generation"]["prompt"]
    assert set(prompt) == {"é"}
    assert len(prompt.encode()) == quickstart.LONGEST_PROMPT


def test_a_wrong_op_fails_and_has_no_speed(quick, monkeypatch):
    real = TorchBackend.function

    def broken(self, op, direction):
        function = real(self, op, direction)
        if (op, direction) != ("selective_scan", "fwd"):
            return function

        def twice(*args):
            out, *rest = function(*args)
            return (out * 2, *rest)

        return twice

    monkeypatch.setattr(TorchBackend, "function", broken)
    outcome = quick()
    assert outcome.code == 1
    assert re.search(r"^selective_scan +torch +float32 .* FAILED$", outcome.out, re.MULTILINE)
    assert re.search(r"^backend torch +forward +- +n/a", outcome.out, re.MULTILINE)
    assert "verdicts FAILED." in outcome.out
    assert "error: selective_scan on torch in float32: case " in outcome.err


def test_a_crash_is_a_failed_row(monkeypatch):
    def crash(self, op, direction):
        raise RuntimeError("illegal instruction\nat 0x0")

    monkeypatch.setattr(ReferenceBackend, "function", crash)
    row = check_op("causal_conv1d", "reference", "float32", ("bias",))
    assert not row["passed"]
    assert row["error"] == "RuntimeError: illegal instruction"
    assert row["worst_error"] is None


def test_an_unusable_backend_is_a_row_not_a_failure(quick, monkeypatch):
    monkeypatch.setattr(
        ReferenceBackend, "availability", lambda self: Support(False, "left out here")
    )
    outcome = quick()
    assert outcome.code == 0
    assert re.search(r"^reference +no +left out here$", outcome.out, re.MULTILINE)
    assert not re.search(r"^selective_scan +reference", outcome.out, re.MULTILINE)


def test_without_the_models_extra_the_row_names_the_command(tmp_path, monkeypatch):
    models.save_model(tiny_lm(), tmp_path)
    monkeypatch.setattr("statescan.models.embedded.embedded_directory", lambda: tmp_path)
    assert quickstart._write_text("ab", False)["error"] is None
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    result = quickstart._write_text("ab", False)
    assert "pip install 'statescan[models]'" in result["error"]
    assert result["text"] == ""


def test_a_child_that_dies_is_a_row_with_the_reason():
    spec = _measure.Spec("selective_scan", quickstart.SIZES, "float32", "fwd", "nothing")
    result = _measure.measure(spec)
    assert result["seconds"] is None
    assert "nothing" in result["error"]


def test_each_measure_has_a_process_of_its_own_and_sees_growth():
    sizes = {"batch": 1, "dim": 256, "seqlen": 512, "dstate": 16, "width": 4}
    spec = _measure.Spec("selective_scan", sizes, "float32", "fwd", "naive", seconds=0.0)
    result = _measure.measure(spec)
    assert result["error"] is None
    assert result["seconds"] > 0
    if sys.platform == "linux":
        # Decay and input of every step must exist at once: two tensors of 8 MiB. The kernel
        # counts pages in batches, so a little may be missing.
        assert result["peak_bytes"] > 0.8 * 2 * 256 * 512 * 16 * 4


def test_a_torch_module_in_the_current_folder_is_not_picked_up(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    sizes = {"batch": 1, "dim": 4, "seqlen": 8, "dstate": 2, "width": 4}
    spec = _measure.Spec("selective_scan", sizes, "float32", "fwd", "torch", seconds=0.0)
    assert _measure.measure(spec)["error"] is None


def test_the_quick_cases_exist_and_cover_every_op():
    assert set(QUICK_CASES) == set(ALL_OPS)
    for op, names in QUICK_CASES.items():
        assert [get_case(op, name).name for name in names] == list(names)
    assert {backend.name for backend in dispatch.all_backends()} >= {"torch", "reference"}
