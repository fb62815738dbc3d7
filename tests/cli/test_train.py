# SPDX-License-Identifier: Apache-2.0
import json
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from statescan.cli.train import SETTINGS
from statescan.training import TrainConfig, loop

TINY = (
    *("--d-model", "16", "--n-layer", "1", "--d-state", "2", "--batch", "2", "--seqlen", "16"),
    *("--warmup", "2", "--held-out", "0.1", "--eval-every", "0", "--save-every", "100"),
)


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(150)))
    return str(path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "training.pt", weights_only=True)["model"]


def test_the_options_are_the_fields_of_the_configuration():
    shown = {setting.name: setting.default for setting in SETTINGS}
    actual = {item.name: item.default for item in fields(TrainConfig)}
    for name in ("text", "out", "resume"):
        del actual[name]
    assert shown == actual


def test_trains_and_writes_a_model_that_generates(run, text, tmp_path):
    out = str(tmp_path / "out")
    outcome = run("train", "--text", text, "--out", out, "--steps", "3", *TINY)
    assert outcome.code == 0
    assert outcome.out.startswith(f"{out}: ")
    assert "bits per byte" in outcome.out
    assert "tokens/s" in outcome.err
    assert "loss" in outcome.err
    assert f"\n\nhint: statescan generate --model {out}" in outcome.err
    generated = run("generate", "--model", out, "--prompt", "1 and", "--max-new-tokens", "5")
    assert generated.code == 0


def test_resume_continues_exactly_with_the_saved_settings(run, text, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = ("--text", text, "--steps", "6", *TINY)
    assert run("train", "--out", str(whole), *args).code == 0

    real_step = loop._train_step

    def step_with_interrupt(run_state, lr):
        # As if Ctrl-C came in the middle of the third step.
        if run_state.step == 2:
            signal.raise_signal(signal.SIGINT)
        return real_step(run_state, lr)

    monkeypatch.setattr(loop, "_train_step", step_with_interrupt)
    stopped = run("train", "--out", str(parts), *args)
    assert stopped.code == 130
    assert "step 3" in stopped.out
    assert "--resume" in stopped.err
    monkeypatch.setattr(loop, "_train_step", real_step)
    resumed = run("train", "--out", str(parts), "--resume", "--json")
    assert resumed.code == 0
    document = json.loads(resumed.out)
    assert document["schema_version"] == 1
    assert (document["step"], document["interrupted"]) == (6, False)
    assert document["held_out_bits_per_byte"][-1]["step"] == 6
    expected, actual = weights(whole), weights(parts)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_ctrl_c_of_a_real_run_keeps_what_was_learned(run, text, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "statescan", "train", "--text", text, "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--log-every", "1", *TINY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 3/"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert torch.load(out / "training.pt", weights_only=True)["step"] >= 3


@pytest.mark.parametrize(
    "args",
    [
        ("--steps", "0"),
        ("--lr", "0"),
        ("--lr", "fast"),
        ("--windows", "odd"),
        ("--dtype", "int8"),
        ("--held-out", "1"),
        ("--seqlen", "100000"),
        ("--batch", "99999999999"),
        ("--seed", "99999999999999999999"),
        ("--threads", "99999999999"),
        ("--device", "meta"),
        ("--device", "nowhere"),
    ],
    ids=" ".join,
)
def test_wrong_values_are_usage_errors(run, text, tmp_path, args):
    out = tmp_path / "out"
    outcome = run("train", "--text", text, "--out", str(out), *TINY, *args)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "error: " in outcome.err
    assert not out.exists()


def test_an_empty_out_is_not_the_current_folder(run, text, tmp_path, monkeypatch):
    """As left by a variable of the shell that is not set."""
    monkeypatch.chdir(tmp_path)
    outcome = run("train", "--text", text, "--out", "", *TINY, "--steps", "1")
    assert outcome.code == 2
    assert outcome.err.startswith("error: train: got out=''.")
    assert not (tmp_path / "config.json").exists()


def test_an_out_that_is_a_file(run, text, tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    outcome = run("train", "--text", text, "--out", str(out), *TINY, "--steps", "1")
    assert outcome.code == 2
    assert "cannot be made" in outcome.err
    assert out.read_text() == "mine"


def test_what_does_not_fit_together(run, text, tmp_path):
    out = str(tmp_path / "out")
    missing = run("train", "--out", out)
    assert (missing.code, missing.err.splitlines()[0]) == (2, "error: train: --text is missing.")
    assert run("train", "--out", out, "--resume").code == 1
    assert run("train", "--text", str(tmp_path / "none"), "--out", out).code == 2
    assert run("train", "--text", text, "--out", out, "--steps", "1", *TINY).code == 0
    again = run("train", "--text", text, "--out", out, "--steps", "1", *TINY)
    assert again.code == 2
    assert "--resume" in again.err
    changed = run("train", "--out", out, "--resume", "--lr", "0.5")
    assert changed.code == 2
    assert "lr" in changed.err
