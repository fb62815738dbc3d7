# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from statescan import dispatch, ops
from statescan.backends import native
from statescan.backends.base import ALL_OPS, Support
from statescan.backends.torch import TorchBackend
from statescan.cli.explain import FLAGS, SIZES
from statescan.errors import BackendUnavailableError
from statescan.testing import inputs
from statescan.testing.cases import all_cases


@pytest.mark.parametrize("op", ALL_OPS)
def test_every_op(run, op):
    outcome = run("explain", op)
    assert outcome.code == 0
    assert "chosen" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json(run):
    outcome = run(
        "explain", "selective_scan", "--dtype", "bf16", "--dstate", "8", "--seq-idx", "--json"
    )
    document = json.loads(outcome.out)
    assert document["schema_version"] == 1
    assert document["chosen"] == ("torch" if native.status().library is None else "cpu")
    assert document["request"]["dtypes"] == {"x": "bfloat16"}
    assert document["request"]["sizes"] == {"dstate": 8}
    assert document["request"]["options"] == ["seq_idx"]
    assert [row["backend"] for row in document["backends"]] == ["cpu", "cuda", "torch", "reference"]


def test_forced(run):
    outcome = run("explain", "causal_conv1d", "--backend", "reference", "--json")
    assert json.loads(outcome.out)["chosen"] == "reference"
    outcome = run("explain", "causal_conv1d", "--backend", "nothing")
    assert outcome.code == 2
    assert "`statescan backends`" in outcome.err


def test_nothing_can_run_it(run, monkeypatch):
    monkeypatch.setattr(TorchBackend, "supports", lambda self, request: Support(False, "too odd"))
    outcome = run("explain", "mamba_inner", "--complex")
    assert outcome.code == 1
    assert "too odd" in outcome.out
    assert outcome.err == "error: no backend would run this mamba_inner\n"


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (("causal_conv1d", "--D"), "--D"),
        (("selective_scan", "--width", "4"), "--width"),
        (("causal_conv1d_update", "--reverse"), "--reverse"),
    ],
)
def test_options_of_another_op_are_refused(run, args, wrong):
    outcome = run("explain", *args)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: explain: {args[0]} has no {wrong}.\nIt has --")


@pytest.mark.parametrize("device", ["nonsense", "", "cpu:x", "cuda,cpu"])
def test_a_device_that_torch_does_not_know(run, device):
    outcome = run("explain", "selective_scan", "--device", device)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: explain: --device {device!r} is no device of this torch")


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "xpu", "mps", "meta"])
def test_a_device_that_is_not_in_this_machine(run, device):
    outcome = run("explain", "selective_scan", "--device", device, "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["request"]["device"] == device.partition(":")[0]


def test_two_kinds_of_packing_at_once_are_no_call(run):
    outcome = run("explain", "causal_conv1d", "--seq-idx", "--cu-seqlens")
    assert outcome.code == 2
    assert "--seq-idx and --cu-seqlens are both given" in outcome.err


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_options_are_those_of_real_requests(op, monkeypatch):
    """What the command can describe is what dispatch is asked, over all cases of the op."""
    seen: list[Any] = []

    def record(backend: str, request: Any) -> Any:
        seen.append(request)
        raise BackendUnavailableError("only recorded")

    for module in ("statescan.ops._register", "statescan.ops._update"):
        monkeypatch.setattr(f"{module}.select", record)
    for case in all_cases(op):
        with pytest.raises(BackendUnavailableError):
            getattr(ops, op)(**inputs.make(case, torch.float32))
    required = _required(seen)
    flags = set().union(*(request.flags for request in seen)) - required
    sizes = {name for request in seen for name in request.dims}
    assert set(FLAGS[op]) == flags
    assert set(SIZES[op]) == sizes


def _required(requests: Sequence[dispatch.OpRequest]) -> set[str]:
    """Names of arguments that every call has, which update ops list among the flags."""
    return set.intersection(*(set(request.flags) for request in requests))
