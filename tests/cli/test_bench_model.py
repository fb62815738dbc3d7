# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from statescan.cli import _bench_model
from statescan.dispatch import all_backends
from statescan.models import MambaConfig, MambaLM
from statescan.testing.compare import error

SMALL = ("--prefill", "20", "--decode", "3", "--seconds", "0.01")
USABLE = [b.name for b in all_backends() if b.automatic and b.availability().ok]


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    """A model of two layers in the place of both."""

    def make(name: str, dtype: torch.dtype) -> MambaLM:
        torch.manual_seed(0)
        return MambaLM(MambaConfig(d_model=16, n_layer=2, vocab_size=253)).to(dtype).eval()

    monkeypatch.setattr(_bench_model, "make_model", make)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_have_tokens_a_second_of_reading_and_writing(run, dtype):
    outcome = run("bench", "model", *SMALL, "--no-peers", "--dtype", dtype, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    found = [(t["mode"], t["tokens"], t["version"]) for t in document["timings"]]
    assert found == [
        (mode, tokens, backend)
        for mode, tokens in (("prefill", 20), ("generate_eager", 3))
        for backend in USABLE
    ]
    for timing in document["timings"]:
        assert timing["tokens_per_s"] == pytest.approx(timing["tokens"] / timing["ms"] * 1e3)
        assert (timing["op"], timing["name"], timing["dtype"]) == ("model", "embedded", dtype)
    assert {row["op"] for row in document["rows"]} == {"model"}
    assert {"backend", "tokens_per_s", "peer", "peer_tokens_per_s"} <= set(document["rows"][0])


def test_table(run):
    outcome = run("bench", "model", *SMALL, "--no-peers", "--model", "130m")
    assert outcome.code == 0
    assert "130m" in outcome.out
    assert "tokens/s" in outcome.out
    assert outcome.out.index("prefill") < outcome.out.index("decode")
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_a_backend_with_wrong_logits_has_no_speed(run, monkeypatch):
    real = _bench_model._version

    def wrong(model, backend):
        version = real(model, backend)
        if backend == "reference":
            return version
        logits = lambda ids: version.logits(ids) * 1.01  # noqa: E731
        return _bench_model.ModelVersion(
            backend, "backend", logits, version.prefill, version.decode
        )

    monkeypatch.setattr(_bench_model, "_version", wrong)
    outcome = run("bench", "model", *SMALL, "--no-peers")
    assert outcome.code == 1
    assert "FAILED" in outcome.out
    assert f"error: model on {USABLE[0]} was not timed: logits have error" in outcome.err


def test_missing_transformers_is_named(run, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_bench_model.importlib, "import_module", missing)
    outcome = run("bench", "model", *SMALL)
    assert outcome.code == 0
    assert "not timed: transformers: not importable: ImportError" in outcome.err


@pytest.mark.filterwarnings("ignore")
def test_transformers_runs_the_same_model(run):
    pytest.importorskip("transformers", reason="pip install transformers")
    outcome = run("bench", "model", *SMALL, "--json")
    assert outcome.code == 0
    document = json.loads(outcome.out)
    assert [(row["peer"], row["timed"]) for row in document["peers"]] == [("transformers", True)]
    assert [t["version"] for t in document["timings"]].count("transformers") == 2


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_model_with_other_weights_is_not_timed(run, monkeypatch):
    module = pytest.importorskip("transformers", reason="pip install transformers")
    load = module.MambaForCausalLM.load_state_dict
    changed = lambda self, weights, **options: load(  # noqa: E731
        self, {name: tensor * 1.5 for name, tensor in weights.items()}, **options
    )
    monkeypatch.setattr(module.MambaForCausalLM, "load_state_dict", changed)
    outcome = run("bench", "model", *SMALL)
    assert outcome.code == 0
    assert "not timed: transformers: wrong: logits differ" in outcome.err


def test_every_backend_is_called_by_its_name():
    model = _bench_model.make_model("embedded", torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    exact = _bench_model._version(model, "reference").logits(ids)
    assert error(_bench_model._version(model, "torch").logits(ids), exact) < 1e-5
    assert exact.shape == (1, 3, 253)
