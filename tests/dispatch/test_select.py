# SPDX-License-Identifier: Apache-2.0
"""Which backend is chosen and who may decide it; on fake backends only.

How the choice is shown is in test_explain.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from types import MappingProxyType

import pytest

from statescan import dispatch
from statescan.backends.base import ALL_OPS, OpRequest, Support
from statescan.dispatch.select import BackendFallbackWarning
from statescan.errors import ArgumentError, BackendUnavailableError

BROKEN = Support(False, "its library is not built")
LIMIT = Support(False, "it has no float64", limit=True)


def chosen(request_, backend="auto"):
    return dispatch.select(backend, request_).name


def test_first_of_the_order_wins(ladder, fake, request_):
    _, second = ladder(fake("first"), fake("second"))
    assert chosen(request_) == "first"
    assert second.asked == 0


def test_what_may_only_be_forced_is_passed_over(ladder, fake, request_):
    ladder(fake("slow", automatic=False), fake("usual"))
    assert chosen(request_) == "usual"
    assert chosen(request_, "slow") == "slow"


def test_refusals_move_on_in_order(ladder, fake, request_):
    ladder(fake("a", supported=LIMIT), fake("b", available=LIMIT), fake("c"), fake("d"))
    assert chosen(request_) == "c"


def test_unavailable_backend_is_not_asked_about_the_call(ladder, fake, request_):
    broken, _ = ladder(fake("broken", available=LIMIT), fake("usual"))
    assert chosen(request_) == "usual"
    assert broken.asked == 0


def test_argument_over_context_over_environment(ladder, fake, request_, monkeypatch):
    ladder(*(fake(name) for name in ("auto_choice", "argument", "context", "environment")))
    assert chosen(request_) == "auto_choice"
    monkeypatch.setenv("STATESCAN_BACKEND", "environment")
    assert chosen(request_) == "environment"
    with dispatch.use_backend("context"):
        assert chosen(request_) == "context"
        assert chosen(request_, "argument") == "argument"
        with dispatch.use_backend("argument"):
            assert chosen(request_) == "argument"
        assert chosen(request_) == "context"
    assert chosen(request_) == "environment"


@pytest.mark.parametrize("value", ["", "auto", " AUTO ", "Second", " second\n"])
def test_environment_is_read_at_every_call_without_regard_to_case(
    ladder, fake, request_, monkeypatch, value
):
    ladder(fake("first"), fake("second"))
    assert chosen(request_) == "first"
    monkeypatch.setenv("STATESCAN_BACKEND", value)
    assert chosen(request_) == ("second" if "second" in value.lower() else "first")


def test_context_ends_with_an_exception(ladder, fake, request_):
    ladder(fake("first"), fake("second"))
    with pytest.raises(KeyError), dispatch.use_backend("second"):
        raise KeyError
    assert chosen(request_) == "first"


def test_context_is_of_one_thread_and_one_task(ladder, fake, request_):
    ladder(fake("first"), fake("second"))
    found = []
    with dispatch.use_backend("second"):
        thread = threading.Thread(target=lambda: found.append(chosen(request_)))
        thread.start()
        thread.join()
    assert found == ["first"]

    async def forced(name):
        with dispatch.use_backend(name):
            await asyncio.sleep(0)
            return chosen(request_)

    async def both():
        return await asyncio.gather(forced("first"), forced("second"))

    assert asyncio.run(both()) == ["first", "second"]


@pytest.mark.parametrize("refusal", ["available", "supported"])
def test_forced_backend_never_falls_back(ladder, fake, request_, monkeypatch, refusal):
    """The message says who asked and why it cannot."""
    ladder(fake("first"), fake("second", **{refusal: BROKEN}))
    text = (
        "selective_scan: backend 'second' was asked for by {source}, and cannot run this call:\n"
        "its library is not built.\n"
        "Choose another backend (`statescan backends`) or leave the choice to 'auto'."
    )
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(request_, "second")
    assert str(caught.value) == text.format(source="the argument backend=")
    with dispatch.use_backend("second"), pytest.raises(BackendUnavailableError) as caught:
        chosen(request_)
    assert str(caught.value) == text.format(source="statescan.use_backend")
    monkeypatch.setenv("STATESCAN_BACKEND", "second")
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(request_)
    assert str(caught.value) == text.format(source="the environment variable STATESCAN_BACKEND")


def test_unknown_name_says_who_asked_and_what_there_is(ladder, fake, request_, monkeypatch):
    ladder(fake("first"), fake("second"))
    text = (
        "backend 'third', asked for by {source}, is not known.\n"
        "It must be 'auto' or one of: first, second.\n"
        "`statescan backends` lists them and says which can run here."
    )
    with pytest.raises(ArgumentError) as caught:
        chosen(request_, "third")
    assert str(caught.value) == text.format(source="the argument backend=")
    with pytest.raises(ArgumentError) as caught, dispatch.use_backend("third"):
        pass
    assert str(caught.value) == text.format(source="statescan.use_backend")
    monkeypatch.setenv("STATESCAN_BACKEND", "third")
    with pytest.raises(ArgumentError) as caught:
        chosen(request_)
    assert str(caught.value) == text.format(source="the environment variable STATESCAN_BACKEND")


@pytest.mark.parametrize("value", [None, 3, b"torch"])
def test_backend_that_is_no_name(request_, value):
    with pytest.raises(ArgumentError) as caught:
        chosen(request_, value)
    assert str(caught.value) == (
        f"backend is {value!r}.\nIt must be a name such as 'auto' or 'torch'.\n"
        "`statescan backends` lists the names."
    )


def test_nobody_can(ladder, fake, request_):
    ladder(fake("a", supported=BROKEN), fake("b", available=LIMIT), fake("c", automatic=False))
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(request_)
    assert str(caught.value) == (
        "selective_scan: no backend can run this call.\n"
        "  a: its library is not built\n"
        "  b: it has no float64\n"
        "Change the call so that one of them can, or force backend='reference'."
    )


def test_broken_faster_backend_warns_once_for_each_reason(ladder, fake, request_):
    """B73: never silently slow."""
    broken, _ = ladder(fake("fast", available=BROKEN), fake("usual"))
    text = (
        "statescan: selective_scan runs on the slower backend 'usual', "
        "because 'fast' cannot: its library is not built"
    )
    with pytest.warns(BackendFallbackWarning) as caught:
        chosen(request_)
    assert [str(warning.message) for warning in caught] == [text]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(request_)
    broken.available = Support(False, "another reason")
    with pytest.warns(BackendFallbackWarning, match="another reason"):
        chosen(request_)


def test_documented_limit_is_no_cause_for_a_warning(ladder, fake, request_):
    ladder(fake("fast", supported=LIMIT), fake("usual"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(request_) == "usual"


def test_forcing_does_not_warn_about_the_others(ladder, fake, request_):
    ladder(fake("fast", available=BROKEN), fake("usual"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(request_, "usual") == "usual"


def test_each_decision_is_logged_once(ladder, fake, request_, caplog):
    ladder(fake("first"), fake("second"))
    with caplog.at_level(logging.INFO, logger="statescan.dispatch"):
        for _ in range(3):
            chosen(request_)
        chosen(request_, "second")
        chosen(OpRequest("causal_conv1d", "cpu"))
    assert caplog.messages == [
        "selective_scan on cpu runs on backend first",
        "selective_scan on cpu runs on backend second",
        "causal_conv1d on cpu runs on backend first",
    ]


def test_op_that_a_backend_lacks_is_refused_with_a_reason(request_):
    from statescan.backends.base import YES, Backend

    class Partial(Backend):
        name = "partial"
        modules = MappingProxyType(
            {name: stem for name, stem in ALL_OPS.items() if name != "selective_scan"}
        )

        def availability(self):
            return YES

    assert Partial().supports(request_) == Support(False, "it does not offer selective_scan")
    assert Partial().supports(OpRequest("causal_conv1d", "cpu")).ok
