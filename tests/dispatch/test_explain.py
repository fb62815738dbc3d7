# SPDX-License-Identifier: Apache-2.0
"""The ladder that ``explain`` shows: every backend, and chosen or the reason why not.

The choice itself is tested in test_select.py; the command ``statescan explain`` in tests/cli.
"""

from __future__ import annotations

import logging

import pytest
import torch
from helpers.differential import BACKENDS

import statescan
from statescan.backends.base import Support
from statescan.dispatch import explain_request, select, use_backend
from statescan.errors import ArgumentError


def test_reasons_in_the_order_of_asking(ladder, fake, request_):
    ladder(
        fake("broken", available=Support(False, "no library")),
        fake("limited", supported=Support(False, "no float64", limit=True)),
        fake("good"),
        fake("later"),
        fake("manual", automatic=False),
    )
    shown = explain_request(request_)
    assert shown.chosen == "good"
    assert [(row.backend, row.chosen, row.reason) for row in shown.rows] == [
        ("broken", False, "no library"),
        ("limited", False, "no float64"),
        ("good", True, "the first that can"),
        ("later", False, "can run it; a faster one is chosen"),
        ("manual", False, "can run it; only when forced by name"),
    ]
    assert str(shown) == (
        "selective_scan on cpu "
        "(float32, float64; batch 2, dim 4, seqlen 9, dstate 3; with reverse, z)\n"
        "  broken   -       no library\n"
        "  limited  -       no float64\n"
        "  good     chosen  the first that can\n"
        "  later    -       can run it; a faster one is chosen\n"
        "  manual   -       can run it; only when forced by name"
    )


def test_forced_choice_names_who_forced_it(ladder, fake, request_, monkeypatch):
    ladder(fake("first"), fake("second"))
    for source, shown in (
        ("the argument backend=", lambda: explain_request(request_, "second")),
        ("statescan.use_backend", lambda: within(request_)),
        (
            "the environment variable STATESCAN_BACKEND",
            lambda: by_environment(request_, monkeypatch),
        ),
    ):
        found = shown()
        assert [(row.chosen, row.reason) for row in found.rows] == [
            (False, f"can run it; 'second' is forced by {source}"),
            (True, f"forced by {source}"),
        ]


def test_explaining_neither_warns_nor_logs(ladder, fake, request_, caplog):
    """The warning is kept for the call that really runs slowly."""
    ladder(fake("broken", available=Support(False, "no library")), fake("good"))
    with caplog.at_level(logging.INFO, logger="statescan.dispatch"):
        explain_request(request_)
    assert caplog.messages == []
    with pytest.warns(UserWarning, match="runs on the slower backend 'good'"):
        select("auto", request_)


def within(request_):
    with use_backend("second"):
        return explain_request(request_)


def by_environment(request_, monkeypatch):
    monkeypatch.setenv("STATESCAN_BACKEND", "second")
    return explain_request(request_)


def test_nothing_is_chosen_when_nobody_can(ladder, fake, request_):
    ladder(fake("first", available=Support(False, "no library")), fake("manual", automatic=False))
    assert explain_request(request_).chosen == ""
    forced = explain_request(request_, "first")
    assert forced.chosen == ""
    assert forced.rows[0].reason == "no library"


class TestPublicFunction:
    """``statescan.explain`` on the real backends: describes a call without running it."""

    x = torch.randn(2, 4, 9)
    weight = torch.randn(4, 3)

    def test_of_a_call(self):
        state = torch.randn(2, 4, 3)
        shown = statescan.explain(
            *(statescan.causal_conv1d_update, self.x[..., 0], state, self.weight),
            cache_seqlens=torch.zeros(2, dtype=torch.int32),
        )
        assert shown.chosen == BACKENDS[0]
        assert shown.request.dims == {
            "batch": 2,
            "dim": 4,
            "width": 3,
            "state_len": 3,
            "ntokens": 1,
        }
        assert shown.request.flags == {"cache_seqlens"}
        assert shown.request.dtypes == dict.fromkeys(("x", "conv_state", "weight"), "float32")

    def test_options_are_flags(self):
        shown = statescan.explain(
            "causal_conv1d", self.x.double(), self.weight, activation="swish", reverse=True
        )
        assert shown.request.flags == {"silu", "reverse"}
        assert shown.request.dtypes == {"x": "float64", "weight": "float32"}

    def test_options_of_a_decode_step_are_flags(self):
        state = torch.randn(2, 4, 3)
        conv = (statescan.causal_conv1d_update, self.x[..., 0], state, self.weight)
        assert statescan.explain(*conv, activation="silu").request.flags == {"silu"}
        assert statescan.explain(*conv).request.flags == frozenset()
        x, A, B = self.x[..., 0], -torch.ones(4, 3), torch.ones(2, 3)
        scan = (statescan.selective_state_update, state, x, x, A, B, B)
        assert statescan.explain(*scan, dt_softplus=True).request.flags == {"dt_softplus"}
        assert statescan.explain(*scan, D=A[:, 0]).request.flags == {"D"}
        assert "with dt_softplus" in str(statescan.explain(*scan, dt_softplus=True))

    def test_backend_argument(self):
        shown = statescan.explain("causal_conv1d", self.x, self.weight, backend="reference")
        assert shown.chosen == "reference"
        assert statescan.explain("mamba_inner", backend="reference").chosen == "reference"

    def test_of_an_op_as_such(self):
        shown = statescan.explain("selective_scan")
        assert (shown.request.device, shown.request.dtypes) == ("cpu", {"x": "float32"})

    @pytest.mark.parametrize(
        ("args", "text"),
        [
            (("conv",), "explain: 'conv' is not an op.\nIt must be one of: selective_scan, "),
            ((len,), "explain: 'len' is not an op."),
            (("causal_conv1d", 1, 2, 3, 4, 5), "explain: the arguments are not those of "),
            (("causal_conv1d", 1, 2), "explain: the arguments do not make a call of causal_"),
            (("causal_conv1d", x[0], x), "explain: the arguments do not make a call of causal_"),
            (("causal_conv1d_update", x, 1, 2), "explain: the arguments do not make a call of "),
        ],
    )
    def test_mistakes(self, args, text):
        with pytest.raises(ArgumentError) as caught:
            statescan.explain(*args)
        assert str(caught.value).startswith(text)
        assert len(str(caught.value).splitlines()) == 3
