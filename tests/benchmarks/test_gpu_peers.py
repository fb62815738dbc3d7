# SPDX-License-Identifier: Apache-2.0
"""The comparison on a GPU, run on the CPU with small rows: gate, fields, remarks and refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import gpu_peers
import pytest
import torch
from gpu_bench import calls, gate, memory, results, rows, timing

from statescan import ops

ON_CPU = ["--device", "cpu", "--quick", "--commit", "abc"]
KEYS = {"op", "direction", "batch", "layout", "dtype", "gpu", "driver", "versions", "date"}


def row_named(name):
    return next(row for row in rows.ROWS if row.name == name)


def spoil(call):
    """The same call with one element of its result a little off."""

    def spoiled(**inputs):
        out = call(**inputs)
        off = torch.zeros_like(out)
        off[(0,) * out.dim()] = 0.1 * out.detach().abs().max()
        return out + off

    return spoiled


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the script: exit code, rows written, what it printed."""
    monkeypatch.setattr(timing, "HOST_CALLS", 3)
    monkeypatch.setattr(gate, "LARGEST", {"batch": 2, "dim": 6, "nheads": 2, "seqlen": 11})

    def script(*arguments):
        out = tmp_path / "rows.jsonl"
        code = gpu_peers.main([*ON_CPU, "--out", str(out), *arguments])
        printed = capsys.readouterr()
        return code, results.read(out), printed.out + printed.err

    return script


def test_every_row_passes_its_gate_and_is_written(run):
    code, written, printed = run()
    assert code == 0
    expected = [(row.name, way) for row in rows.ROWS for way in row.directions]
    assert [(line["row"], line["direction"]) for line in written] == expected
    for line in written:
        assert line.keys() >= KEYS
        assert line["commit"] == "abc"
        assert math.isfinite(line["spread"])
        if line["op"] in rows.UPDATES:
            assert line["device_ms"] > 0
            assert line["host_us"] > 0
        else:
            assert line["statescan_ms"] > 0
    assert "pip install mamba-ssm" in printed or written[0]["peer_ms"] is not None


def test_a_peer_stands_beside_ours(run, monkeypatch):
    """Here a stand-in: another backend of the same op."""
    monkeypatch.setattr(
        gpu_peers, "_load_peers", lambda names: {n: calls.our_call(n, "reference") for n in names}
    )
    _, written, printed = run("--rows", "scan2,decode4")
    assert [line["row"] for line in written] == ["scan2", "scan2", "decode4"]
    assert all(line["peer_ms"] > 0 and line["peer_spread"] >= 0 for line in written[:2])
    assert written[2]["peer_device_ms"] > 0
    assert written[2]["peer_host_us"] > 0
    assert printed.count("original") == 4


@pytest.mark.parametrize("name", ["scan1", "conv2", "decode3", "decode6"])
def test_a_wrong_result_of_ours_is_not_timed(run, monkeypatch, name):
    honest = calls.our_call
    monkeypatch.setattr(gpu_peers, "our_call", lambda *given: spoil(honest(*given)))
    monkeypatch.setattr(gate, "our_call", lambda *given: spoil(honest(*given)))
    code, written, printed = run("--rows", name)
    assert (code, written) == (1, [])
    assert "WRONG" in printed
    assert "out: error" in printed


def test_a_wrong_gradient_of_ours_is_not_timed(run, monkeypatch):
    def call(**inputs):
        out = ops.causal_conv1d(**inputs, activation="silu")
        bias = inputs["bias"]
        return out + 0.2 * (bias - bias.detach()).unsqueeze(-1).to(out.dtype)

    monkeypatch.setattr(gate, "our_call", lambda *given: call)
    code, written, printed = run("--rows", "conv1")
    assert (code, written) == (1, [])
    assert "dbias: error" in printed
    assert "out: error" not in printed


def test_a_wrong_peer_is_left_out_and_named(run, monkeypatch):
    monkeypatch.setattr(
        gpu_peers,
        "_load_peers",
        lambda names: {n: spoil(calls.our_call(n, "torch")) for n in names},
    )
    code, written, printed = run("--rows", "scan6")
    assert code == 0
    assert all(line["peer_ms"] is None for line in written)
    assert "the original is not timed: wrong: out has error" in printed


def test_peer_limits_what_is_allowed():
    """In bf16 no worse than the original or than rounding; float32 results twice, or 1e-6."""
    row = replace(row_named("scan1"), sizes={"batch": 1, "dim": 4, "seqlen": 9, "dstate": 3})
    judged = gate.judge(row, "torch", calls.our_call("selective_scan", "reference"), "cpu",
                        at_full_size=False)  # fmt: skip
    assert {item.name for item in judged} >= {"out", "dx", "ddt", "dA", "dB", "dC", "dD", "dz"}
    for item in judged:
        assert item.passed
        if item.name in ("dA", "dD", "ddt_bias"):
            assert item.allowed == max(1e-6, 2 * item.peer_error)
        else:
            assert item.allowed >= 1.05 * item.peer_error
            assert 1e-4 < item.allowed < 1e-2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rows", "scan1,nothing"], "'nothing' is not the name of a row"),
        (["--backend", "fast"], "there is no backend 'fast'"),
    ],
)
def test_what_cannot_be_run_is_refused(run, arguments, text):
    code, written, printed = run(*arguments)
    assert (code, written) == (2, [])
    assert text in printed


def test_without_a_gpu_the_way_out_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_peers.main(["--commit", "abc"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_rows_are_chosen_by_name_and_by_beginning():
    found, with_memory = rows.chosen(["scan1", "conv"])
    assert [row.name for row in found] == ["scan1", *(f"conv{i}" for i in range(1, 7))]
    assert not with_memory
    assert rows.chosen(["memory"]) == ([], True)
    everything, with_memory = rows.chosen([])
    assert everything == list(rows.ROWS)
    assert with_memory
    assert len({row.name for row in rows.ROWS}) == len(rows.ROWS)


def test_floors_are_those_of_the_table():
    """Milliseconds on an H200, as counted by hand once."""
    ceilings = rows.CEILINGS["NVIDIA H200"]
    for name, fwd, bwd in (("scan1", 0.161, 0.323), ("scan7", 0.548, 1.097),
                           ("scan4", 0.484, 0.968), ("conv1", 0.063, 0.095),
                           ("conv6", 0.047, 0.071)):  # fmt: skip
        assert row_named(name).floor_ms("fwd", ceilings) == pytest.approx(fwd, rel=0.02)
        assert row_named(name).floor_ms("bwd", ceilings) == pytest.approx(bwd, rel=0.02)
    for name, floor in (("decode3", 0.0123), ("decode6", 0.084), ("decode9", 0.637)):
        assert row_named(name).floor_ms("fwd", ceilings) == pytest.approx(floor, rel=0.02)


def test_layout_and_dtypes_of_inputs():
    row = gate.reduced(row_named("conv2"))
    x = calls.make_inputs(row, "cpu")["x"]
    assert x.stride(1) == 1
    assert x.dtype == torch.bfloat16
    out = calls.our_call("causal_conv1d", "torch")(**calls.make_inputs(row, "cpu"))
    assert calls.make_cotangent(row, out).stride() == out.stride()
    headed = calls.make_inputs(gate.reduced(row_named("decode9")), "cpu")
    assert headed["A"].stride()[-2:] == (0, 0)
    assert headed["dt"].stride(-1) == 0
    assert headed["ssm_state"].dtype == torch.float32


def test_results_are_added_not_replaced(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    results.append(path, {"a": 1})
    results.append(path, {"a": 2})
    assert results.read(path) == [{"a": 1}, {"a": 2}]
    assert results.read(tmp_path / "none.jsonl") == []


def test_the_child_for_memory_says_why_it_fails():
    grown, reason = memory.grow("scan1", "torch", "meta")
    assert grown is None
    assert reason.startswith("the child process ended with code")


@pytest.mark.gpu
def test_growth_of_memory_is_measured():
    grown, reason = memory.grow("scan1", "torch", "cuda")
    assert reason == ""
    # Out and the gradients of x, dt and z alone are four tensors of 64 MiB.
    assert 256 <= grown < 4096


@pytest.mark.gpu
def test_one_row_on_the_gpu(tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["--quick", "--backend", "torch", "--rows", "decode2", "--out", str(out)]
    assert gpu_peers.main([*arguments, "--commit", "abc"]) == 0
    (line,) = [json.loads(text) for text in out.read_text("utf-8").splitlines()]
    assert line["gpu"] == torch.cuda.get_device_name()
    assert line["driver"]
    assert 0 < line["device_ms"] < 10
