# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from statescan import ops
from statescan.backends.base import ALL_OPS, Support
from statescan.backends.torch import TorchBackend
from statescan.cli import _bench_run, _gate, _roofline, _timing, _workloads, bench
from statescan.cli._timing import summarise, time_in_turns
from statescan.dispatch import all_backends
from statescan.testing import naive
from statescan.testing.compare import error

SMALL = ("--dim", "8", "--seqlen", "12", "--dstate", "4", "--seconds", "0.01", "--no-peers")
SIZES = {"batch": 2, "dim": 8, "seqlen": 12, "dstate": 4, "width": 4}
DECODE = ("selective_state_update", "causal_conv1d_update")
USABLE = [b.name for b in all_backends() if b.automatic and b.availability().ok]


def test_json_rows_have_the_fields_of_results(run):
    outcome = run("bench", *ALL_OPS, *SMALL, "--json")
    assert outcome.code == 0
    document = json.loads(outcome.out)
    assert document["schema_version"] == 1
    assert document["passed"]
    ways = [
        (op, way) for op in ALL_OPS for way in (("fwd",) if op in DECODE else ("fwd", "fwd_bwd"))
    ]
    against_naive = [row for row in document["rows"] if row["peer"] == "naive"]
    assert [(r["op"], r["direction"], r["backend"]) for r in against_naive] == [
        (op, way, backend) for op, way in ways for backend in USABLE
    ]
    for row in document["rows"]:
        assert {"batch", "dim", "layout", "dtype", "statescan_ms", "peer_ms", "spread"} <= set(row)
        assert row["statescan_ms"] > 0
        assert row["peer_ms"] > 0
        assert row["samples"] >= 3
    assert {"torch", "python", "processor", "cpus", "threads"} <= set(document["machine"])


def test_every_usable_backend_is_timed_and_the_reference_is_not(run):
    document = json.loads(run("bench", "causal_conv1d", *SMALL, "--json").out)
    found = [t["version"] for t in document["timings"] if t["direction"] == "fwd"]
    assert sorted(found) == sorted(["naive", *USABLE])
    assert "reference" not in found
    for timing in document["timings"]:
        base = next(
            t for t in document["timings"]
            if t["version"] == "naive" and t["direction"] == timing["direction"]
        )  # fmt: skip
        assert timing["times_naive"] == pytest.approx(base["ms"] / timing["ms"])


def test_backends_are_beside_each_other_too(run):
    options = ("--backend", "torch", "--backend", "reference", "--direction", "fwd")
    document = json.loads(run("bench", "causal_conv1d", *SMALL, *options, "--json").out)
    pairs = {(row["backend"], row["peer"]) for row in document["rows"]}
    assert pairs == {
        ("torch", "naive"), ("torch", "reference"), ("reference", "naive"), ("reference", "torch"),
    }  # fmt: skip


def test_a_backend_that_is_not_usable_is_named_with_the_reason(run, monkeypatch):
    class Broken(TorchBackend):
        name = "broken"

        def availability(self):
            return Support(False, "its library is missing")

    monkeypatch.setattr(_bench_run, "all_backends", lambda: (Broken(), *all_backends()))
    outcome = run("bench", "causal_conv1d", *SMALL, "--direction", "fwd")
    assert outcome.code == 0
    assert "not timed: broken does not run here: its library is missing" in outcome.err


def test_a_backend_that_refuses_the_dtype_is_named_and_the_others_are_timed(run, monkeypatch):
    class Narrow(TorchBackend):
        name = "narrow"

        def supports(self, request):
            if "float64" in request.dtypes.values():
                return Support(False, "it has no float64", limit=True)
            return super().supports(request)

        def function(self, op, direction):
            return TorchBackend().function(op, direction)

    both = (Narrow(), *all_backends())
    monkeypatch.setattr(_bench_run, "all_backends", lambda: both)
    monkeypatch.setattr("statescan.dispatch.registry._BACKENDS", both)
    options = ("--direction", "fwd", "--dtype", "fp64")
    outcome = run("bench", "causal_conv1d", *SMALL, *options)
    assert outcome.code == 0
    assert "not timed: narrow does not run causal_conv1d: it has no float64" in outcome.err
    assert "torch" in outcome.out
    named = run("bench", "causal_conv1d", *SMALL, *options, "--backend", "narrow")
    assert named.code == 1
    assert "it has no float64" in named.err
    narrow = run("bench", "causal_conv1d", *SMALL, "--direction", "fwd")
    assert "narrow" in narrow.out


def test_table(run):
    outcome = run("bench", "causal_conv1d", *SMALL, "--dtype", "bf16")
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.count("naive") == 2
    assert "1.00x" in outcome.out
    assert "fwd+bwd" in outcome.out
    assert "bfloat16" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_floors_where_the_ceilings_are_known(run, monkeypatch, tmp_path):
    """As on a GPU, whose ceilings are measured."""
    page = tmp_path / "page.html"
    ceilings = _roofline.Ceilings(copy=1e9, exponentials=1e9)
    monkeypatch.setattr(bench, "_ceilings", lambda device, names: ceilings)
    outcome = run("bench", "causal_conv1d", "selective_scan", *SMALL, "--html", str(page))
    assert outcome.code == 0
    assert "of floor" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 90
    text = page.read_text()
    assert "<th class=n>of floor</th>" in text
    assert "every exponential once" in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    floors = {(row["op"], row["direction"]): row["floor_ms"] for row in data["rows"]}
    # x and out of 8 x 12 numbers, weight of 8 x 4 and bias of 8; behind it all gradients too.
    assert floors["causal_conv1d", "fwd"] == pytest.approx(4 * (2 * 96 + 40) / 1e6)
    assert floors["causal_conv1d", "fwd_bwd"] == pytest.approx(4 * (5 * 96 + 3 * 40) / 1e6)
    # Four states and four more exponentials for each of 96 tokens take longer than its bytes.
    slow = _roofline.Ceilings(copy=1e15, exponentials=1e6)
    workload = _workloads.make_workload("selective_scan", SIZES, torch.float32)
    assert _roofline.floor_ms(workload, SIZES, "fwd", slow) == pytest.approx(2 * 96 * 8 / 1e3)


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu(run, tmp_path):
    plot = tmp_path / "bars.png"
    outcome = run(
        *("bench", *ALL_OPS, "model", "--device", "cuda", "--seconds", "0.1", "--json"),
        *("--dtype", "bf16", "--direction", "fwd", "--no-peers", "--decode", "8"),
        *("--plot", str(plot)),
    )
    document = json.loads(outcome.out)
    assert outcome.code == 0, document["gates"]
    assert document["machine"]["gpu"] == torch.cuda.get_device_name()
    versions = {row["version"] for row in document["timings"]}
    assert {"naive", "cuda", "torch"} <= versions
    assert "cpu" not in versions
    assert all(row["ms"] > row["floor_ms"] > 0 for row in document["timings"] if "floor_ms" in row)
    assert plot.stat().st_size > 10_000


def test_a_wrong_result_has_no_speed(run, monkeypatch):
    real = ops.causal_conv1d
    monkeypatch.setattr(ops, "causal_conv1d", lambda *args, **kwargs: real(*args, **kwargs) * 1.01)
    outcome = run("bench", "causal_conv1d", *SMALL)
    assert outcome.code == 1
    assert "fwd" not in outcome.out
    assert "FAILED" in outcome.out
    assert outcome.err.startswith(f"error: causal_conv1d on {USABLE[0]} was not timed: ")
    outcome = run("bench", "causal_conv1d", *SMALL, "--json")
    document = json.loads(outcome.out)
    assert (outcome.code, document["passed"], document["rows"]) == (1, False, [])


def test_a_wrong_naive_algorithm_has_no_speed_either(monkeypatch):
    real = naive.causal_conv1d_naive
    monkeypatch.setattr(naive, "causal_conv1d_naive", lambda **kwargs: real(**kwargs) * 1.01)
    row = _gate.check_workload("causal_conv1d", SIZES, "float32", "auto")
    assert not row["passed"]
    assert "naive" in row["error"]


def test_a_result_that_is_wrong_only_at_these_sizes_is_found(monkeypatch):
    monkeypatch.setattr(_gate, "check_op", lambda *a, **k: {"passed": True, "error": None})
    real = ops.selective_scan
    monkeypatch.setattr(ops, "selective_scan", lambda **kwargs: real(**kwargs) + 1e-3)
    row = _gate.check_workload("selective_scan", SIZES, "float32", "auto")
    assert not row["passed"]
    assert "at these sizes" in row["error"]


def test_unknown_names(run):
    outcome = run("bench", "causal_conv1d", *SMALL, "--backend", "nothing")
    assert outcome.code == 2
    assert "'nothing'" in outcome.err
    outcome = run("bench", "nothing")
    assert outcome.code == 2
    assert "model" in outcome.err


@pytest.mark.parametrize("op", ALL_OPS)
@pytest.mark.parametrize("direction", ["fwd", "fwd_bwd"])
def test_the_naive_algorithms_compute_the_same(op, direction):
    workload = _workloads.make_workload(op, SIZES, torch.float64)
    if direction not in workload.directions:
        pytest.skip("decode steps have no gradient")
    exact = _gate._results(workload, "reference", direction)
    results = _gate._results(workload, "naive", direction)
    assert exact.keys() == results.keys()
    for name, truth in exact.items():
        assert error(results[name], truth) < 1e-12, name


def test_versions_are_timed_in_turns():
    order: list[str] = []
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_in_turns(works, seconds=0.0, least=3, most=5)
    assert {timing.samples for timing in timings.values()} == {3}
    blocks = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert blocks[-6:] == ["a", "b"] * 3


def test_a_very_slow_version_is_called_once(monkeypatch):
    monkeypatch.setattr(_timing, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(_timing, "_ONCE_SECONDS", 0.0)
    calls: list[int] = []
    timings = time_in_turns({"slow": lambda: calls.append(1)}, seconds=60.0)
    assert calls == [1]
    assert (timings["slow"].samples, timings["slow"].spread) == (1, 0.0)


def test_one_direction(run):
    outcome = run("bench", "causal_conv1d", *SMALL, "--direction", "fwd_bwd", "--json")
    assert {row["direction"] for row in json.loads(outcome.out)["rows"]} == {"fwd_bwd"}


def test_median_and_spread():
    timing = summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.median, timing.samples) == (3.0, 5)
    assert timing.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    assert summarise([2.0]).spread == 0.0
