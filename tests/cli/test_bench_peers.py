# SPDX-License-Identifier: Apache-2.0
"""Peers of ``statescan bench``; packages that are absent are played by modules of their names."""

import json
import sys
import types

import pytest
import torch

from statescan.backends.base import ALL_OPS
from statescan.cli import _bench_peers, _gate
from statescan.cli._bench_peers import peers_of
from statescan.testing import naive

SMALL = ("--dim", "8", "--seqlen", "12", "--dstate", "4", "--seconds", "0.01", "--direction", "fwd")
SIZES = {"batch": 2, "dim": 8, "seqlen": 12, "dstate": 4, "width": 4}


def scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    assert delta_softplus
    return naive.selective_scan_naive(u, delta, A, B, C, D=D, z=z, dt_bias=delta_bias)


def state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    assert dt_softplus
    return naive.selective_state_update_naive(state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias)


def conv(x, weight, bias=None, initial_states=None, activation=None):
    assert activation == "silu"
    return naive.causal_conv1d_naive(x, weight, bias)


def conv_update(x, conv_state, weight, bias=None, activation=None):
    assert activation == "silu"
    return naive.causal_conv1d_update_naive(x, conv_state, weight, bias)


def inner(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight,
    out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, delta_softplus=True,
):  # fmt: skip
    assert B is None
    assert C is None
    assert out_proj_bias is None
    return naive.mamba_inner_naive(
        xz, conv1d_weight.squeeze(1), conv1d_bias, x_proj_weight, delta_proj_weight, A,
        D=D, dt_bias=delta_bias, out_proj_weight=out_proj_weight,
    )  # fmt: skip


def parallel(decay, entering):
    states = [torch.zeros_like(entering[:, 0])]
    for step in range(decay.shape[1]):
        states.append(decay[:, step] * states[-1] + entering[:, step])
    return torch.stack(states[1:], dim=1)


STAND_INS = {
    "selective_scan_ref": scan,
    "selective_state_update_ref": state_update,
    "causal_conv1d_ref": conv,
    "causal_conv1d_update_ref": conv_update,
    "mamba_inner_ref": inner,
    "pscan": parallel,
}


def install(monkeypatch, peer, function) -> None:
    """Put a module with this function where the peer is looked for."""
    parts = peer.module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[peer.module], peer.function, function, raising=False)


ALL_PEERS = [peer for op in ALL_OPS for peer in peers_of(op)]


@pytest.mark.parametrize("peer", ALL_PEERS, ids=lambda peer: f"{peer.name}-{peer.op}")
def test_a_peer_gets_our_inputs_by_its_own_names(monkeypatch, peer):
    install(monkeypatch, peer, STAND_INS[peer.function])
    call, reason = peer.load()
    assert reason == ""
    assert call is not None
    assert _gate.check_peer(peer.op, SIZES, "float32", call) == ""


def test_an_importable_peer_is_timed_beside_us(run, monkeypatch):
    (peer,) = peers_of("causal_conv1d")
    install(monkeypatch, peer, conv)
    document = json.loads(run("bench", "causal_conv1d", *SMALL, "--json").out)
    versions = {timing["version"]: timing["kind"] for timing in document["timings"]}
    assert versions["causal_conv1d ref"] == "peer"
    assert [(row["peer"], row["timed"]) for row in document["peers"]] == [(peer.name, True)]
    assert any(row["peer"] == "causal_conv1d ref" for row in document["rows"])


def test_a_missing_peer_is_named_with_the_reason(run, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_bench_peers.importlib, "import_module", missing)
    outcome = run("bench", "causal_conv1d", *SMALL)
    assert outcome.code == 0
    assert "not timed: causal_conv1d ref: not importable: ImportError: No module" in outcome.err


def test_a_peer_that_computes_something_else_is_not_timed_and_is_not_our_fault(run, monkeypatch):
    (peer,) = peers_of("causal_conv1d")
    install(monkeypatch, peer, lambda *args, **options: conv(*args, **options) * 2)
    outcome = run("bench", "causal_conv1d", *SMALL)
    assert outcome.code == 0
    assert "not timed: causal_conv1d ref: wrong: out has error" in outcome.err
    assert "causal_conv1d ref" not in outcome.out
    install(monkeypatch, peer, lambda: None)
    outcome = run("bench", "causal_conv1d", *SMALL)
    assert "not timed: causal_conv1d ref: fails: TypeError" in outcome.err


def test_peers_can_be_left_out(run, monkeypatch):
    (peer,) = peers_of("causal_conv1d")
    install(monkeypatch, peer, conv)
    document = json.loads(run("bench", "causal_conv1d", *SMALL, "--no-peers", "--json").out)
    assert document["peers"] == []
    assert "causal_conv1d ref" not in {timing["version"] for timing in document["timings"]}


def test_the_real_parallel_scan_of_mambapy(run):
    pytest.importorskip("mambapy", reason="pip install mambapy")
    document = json.loads(run("bench", "selective_scan", *SMALL, "--json").out)
    assert "mambapy pscan" in {timing["version"] for timing in document["timings"]}
