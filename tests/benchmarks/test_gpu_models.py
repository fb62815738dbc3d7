# SPDX-License-Identifier: Apache-2.0
"""The comparison of whole models on a GPU, run on the CPU with a tiny model."""

from __future__ import annotations

import gpu_models
import pytest
import torch
from gpu_bench import models, results

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the script: exit code, rows written, what it printed."""

    def script(*arguments):
        out = tmp_path / "rows.jsonl"
        fixed = ["--device", "cpu", "--seconds", "0.1", "--commit", "abc", "--out", str(out)]
        code = gpu_models.main([*fixed, *arguments])
        printed = capsys.readouterr()
        return code, results.read(out), printed.out + printed.err

    return script


def test_rows_are_judged_timed_and_written(run):
    code, written, printed = run("--rows", "read130m,write130m-b1-eager")
    assert code == 0
    assert [line["mode"] for line in written] == ["forward", "generate_eager"]
    for line in written:
        assert line["op"] == "model"
        assert line["name"] == "mamba-tiny"
        assert line["tokens_per_s"] > 0
        assert line["commit"] == "abc"
    assert printed.count("logits: statescan") == 2


def test_a_peer_with_the_same_weights_stands_beside_ours(run, monkeypatch):
    """Here a stand-in: a second model of ours."""

    def copy(model, name, dtype):
        peer = models.make_model(name, CPU, dtype)
        peer.load_state_dict(model.state_dict())
        return peer

    monkeypatch.setattr(gpu_models, "_peer_is_there", lambda: True)
    monkeypatch.setattr(models, "make_peer", copy)
    code, (line,), printed = run("--rows", "train130m")
    assert code == 0
    assert line["peer_tokens_per_s"] > 0
    assert "original" in printed


def test_wrong_logits_are_not_timed(run, monkeypatch):
    honest = models.make_model

    def spoiled(name, device, dtype):
        model = honest(name, device, dtype)
        with torch.no_grad():
            model.backbone.layers[0].mixer.register_forward_hook(lambda *call: 2 * call[2])
        return model

    made = iter([spoiled, honest])
    monkeypatch.setattr(models, "make_model", lambda *given: next(made)(*given))
    code, written, printed = run("--rows", "read130m")
    assert (code, written) == (1, [])
    assert "WRONG, not timed: logits have error" in printed


def test_a_training_step_trains():
    model = models.make_model("tiny", CPU, torch.float32)
    ids = torch.randint(512, (2, 24), generator=torch.Generator().manual_seed(0))
    step = models.training_step(model, ids)
    first = float(step())
    for _ in range(5):
        last = float(step())
    assert last < first


def test_writing_has_prompt_and_new_tokens():
    model = models.make_model("tiny", CPU, torch.float32).eval()
    ids = torch.randint(512, (2, 5), generator=torch.Generator().manual_seed(0))
    written = models.our_writing(model, ids, 7, graph=False)()
    assert written.shape == (2, 12)
    assert torch.equal(written[:, :5], ids)


def test_rows_that_do_not_exist_are_refused(run):
    code, written, printed = run("--rows", "nothing")
    assert (code, written) == (2, [])
    assert "train130m" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "torch"])
def test_writing_with_a_graph_writes_the_same(backend):
    from statescan.dispatch import use_backend

    gpu = torch.device("cuda")
    model = models.make_model("tiny", gpu, torch.float32).eval()
    ids = torch.randint(512, (3, 5), device=gpu)
    with use_backend(backend):
        plain = models.our_writing(model, ids, 20, graph=False)()
        graphed = models.our_writing(model, ids, 20, graph=True)
        assert torch.equal(graphed(), plain)
        assert torch.equal(graphed(), plain), "the second time begins anew"
