# SPDX-License-Identifier: Apache-2.0
import json

from statescan import dispatch
from statescan.backends.base import ALL_OPS, Support
from statescan.backends.torch import TorchBackend


def test_lists_every_backend_with_a_reason(run):
    outcome = run("backends")
    assert outcome.code == 0
    assert outcome.err == ""
    for backend in dispatch.all_backends():
        assert f"\n{backend.name} " in outcome.out
    for op in ALL_OPS:
        assert op in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json(run):
    outcome = run("backends", "--json")
    document = json.loads(outcome.out)
    assert document["schema_version"] == 1
    assert document["command"] == "backends"
    assert [row["backend"] for row in document["backends"]] == ["cpu", "cuda", "torch", "reference"]
    assert all(row["reason"] and row["ops"] == sorted(ALL_OPS) for row in document["backends"])
    assert set(document["native_library"]) == {"usable", "isa", "path", "reason"}


def test_an_unusable_backend_is_a_row_not_a_failure(run, monkeypatch):
    monkeypatch.setattr(
        TorchBackend, "availability", lambda self: Support(False, "its library is damaged")
    )
    outcome = run("backends")
    assert outcome.code == 0
    assert "its library is damaged" in outcome.out


def test_forcing_a_backend_that_cannot_run_is_a_finding(run, monkeypatch):
    monkeypatch.setattr(
        TorchBackend, "availability", lambda self: Support(False, "its library is damaged")
    )
    monkeypatch.setenv("STATESCAN_BACKEND", "torch")
    outcome = run("backends")
    assert outcome.code == 1
    assert outcome.err.startswith("error: the environment variable STATESCAN_BACKEND is 'torch'")
    assert "its library is damaged" in outcome.err
