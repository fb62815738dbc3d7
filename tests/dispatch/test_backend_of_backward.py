# SPDX-License-Identifier: Apache-2.0
"""The backward runs on the backend that the forward ran on, whatever is chosen in between.

What one backend saves for its backward need not be of use to another.
"""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.differential import BACKENDS, leaves_of
from helpers.integration import SEQUENCE_OPS, TORCH_WARNINGS, backend_calls, make, public, weigh
from torch.utils.checkpoint import checkpoint

import statescan
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)


LONG = {"selective_scan": "chunk_edge_above", "mamba_inner": "chunks"}
"""Cases with more tokens than lie between two saved states."""


def setting(op, case="bare"):
    kwargs = make(op, case)
    leaves = leaves_of(kwargs)
    return {**kwargs, **leaves}, list(leaves.values())


@pytest.mark.parametrize("op", SEQUENCE_OPS)
@pytest.mark.parametrize("how", ["context", "environment", "argument"])
def test_changes_between_forward_and_backward_have_no_effect(op, how, monkeypatch):
    kwargs, leaves = setting(op)
    with backend_calls() as ran:
        if how == "context":
            with statescan.use_backend("reference"):
                loss = weigh(public(op)(**kwargs))
        elif how == "environment":
            monkeypatch.setenv("STATESCAN_BACKEND", "reference")
            loss = weigh(public(op)(**kwargs))
        else:
            loss = weigh(public(op)(**kwargs, backend="reference"))
        monkeypatch.setenv("STATESCAN_BACKEND", "torch")
        with statescan.use_backend("torch"):
            torch.autograd.grad(loss, leaves)
    assert [(call.backend, call.direction) for call in ran] == [
        ("reference", "fwd"),
        ("reference", "bwd"),
    ]


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_automatic_choice_is_kept_too(op):
    kwargs, leaves = setting(op)
    with backend_calls() as ran:
        loss = weigh(public(op)(**kwargs))
        with statescan.use_backend("reference"):
            torch.autograd.grad(loss, leaves)
    assert [call.backend for call in ran] == [BACKENDS[0]] * 2


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_backward_in_another_thread(op):
    """As autograd's threads for accelerators, which know nothing of this thread's context."""
    kwargs, leaves = setting(op)
    with backend_calls() as ran:
        with statescan.use_backend("reference"):
            loss = weigh(public(op)(**kwargs))
        thread = threading.Thread(target=torch.autograd.grad, args=(loss, leaves))
        thread.start()
        thread.join()
    assert [call.backend for call in ran] == ["reference", "reference"]


def test_backward_with_a_graph_and_under_torch_func():
    kwargs, leaves = setting("causal_conv1d")
    with backend_calls() as ran:
        with statescan.use_backend("reference"):
            loss = weigh(public("causal_conv1d")(**kwargs))
        torch.autograd.grad(loss, leaves, create_graph=True)
    assert [call.backend for call in ran] == ["reference", "reference"]
    weight = kwargs["weight"].detach()
    with backend_calls() as ran:
        with statescan.use_backend("reference"):
            _, pull_back = torch.func.vjp(
                lambda w: weigh(public("causal_conv1d")(kwargs["x"].detach(), w)), weight
            )
        pull_back(torch.ones((), dtype=torch.float64))
    assert [call.backend for call in ran] == ["reference", "reference"]


def test_recomputation_in_a_checkpoint_chooses_anew():
    """A checkpoint calls the function again; inside one use_backend belongs into the function."""
    kwargs, leaves = setting("selective_scan")

    def scan(x):
        with statescan.use_backend("reference"):
            return public("selective_scan")(**{**kwargs, "x": x})

    with backend_calls() as ran:
        out = checkpoint(scan, kwargs["x"], use_reentrant=False)
        torch.autograd.grad(weigh(out), leaves)
    assert [call.backend for call in ran] == ["reference"] * 3


def test_backend_that_vanishes_before_the_backward_is_named(monkeypatch):
    from statescan.backends.base import Support
    from statescan.backends.reference import ReferenceBackend
    from statescan.errors import BackendUnavailableError

    kwargs, leaves = setting("causal_conv1d")
    loss = weigh(public("causal_conv1d")(**kwargs, backend="reference"))
    gone = Support(False, "it was unloaded")
    monkeypatch.setattr(ReferenceBackend, "availability", lambda self: gone)
    with pytest.raises(BackendUnavailableError, match="it was unloaded"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
@pytest.mark.parametrize(("first", "then"), [("reference", "torch"), ("torch", "reference")])
def test_traced_graph_stays_right_when_the_choice_changes_in_between(op, first, then):
    """Its backward chooses for itself, so what a forward saves must serve every backend."""
    kwargs, leaves = setting(op, LONG.get(op, "bare"))
    expected = torch.autograd.grad(weigh(public(op)(**kwargs)), leaves)
    compiled = torch.compile(public(op), backend="aot_eager", fullgraph=True)
    with statescan.use_backend(first):
        loss = weigh(compiled(**kwargs))
    with backend_calls() as ran, statescan.use_backend(then):
        found = torch.autograd.grad(loss, leaves)
    assert [(call.backend, call.direction) for call in ran] == [(then, "bwd")]
    # Each of the two backends may be off by the tolerance, on another side of the truth.
    bound = 2 * tolerance(op, torch.float32, gradient=True)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, bound)
