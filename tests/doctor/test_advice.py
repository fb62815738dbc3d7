# SPDX-License-Identifier: Apache-2.0
"""The advice that the web gives: every entry complete, found by its words, its cure typeable."""

from __future__ import annotations

import re
import shlex

import pytest

from statescan.doctor import advice, catalog, shells
from statescan.doctor.render import problem as pages

every_entry = pytest.mark.parametrize(
    "entry", advice.entries().values(), ids=lambda entry: entry.code
)


def test_there_are_at_least_forty_with_codes_in_order():
    codes = list(advice.entries())
    assert len(codes) >= 40
    assert codes == [f"ADV{number:03d}" for number in range(1, len(codes) + 1)]


def test_no_advice_is_there_twice():
    said = [entry.advice.lower() for entry in advice.entries().values()]
    assert len(set(said)) == len(said)


@every_entry
def test_an_entry_is_complete(entry):
    assert entry.verdict in advice.VERDICTS
    assert entry.advice and entry.since and entry.why and entry.instead
    assert entry.why.endswith(".")
    for text in (entry.advice, entry.since, entry.why):
        assert "\n" not in text
    for reference in entry.references:
        assert pages.report_url(reference).startswith("https://github.com/"), reference


@every_entry
@pytest.mark.parametrize("shell", shells.SHELLS)
def test_what_to_type_instead_can_be_typed(entry, shell):
    lines = [
        line
        for step in advice.commands(entry, pages.example_values(shell))
        for line in shells.lines(step, shell)
    ]
    assert lines
    unfilled = re.sub(r"\$\{\w+:\+:\$\w+\}", "", " ".join(lines))
    assert not re.search(r"\{\w+\}", unfilled)
    if shell == "bash":
        assert all(shlex.split(line, comments=True) is not None for line in lines)


@every_entry
def test_placeholders_are_known(entry):
    used = re.findall(r"\{(\w+)\}", str([command.to_json() for command in entry.instead]))
    assert set(used) <= set(catalog.PLACEHOLDERS)


@every_entry
def test_the_cure_is_not_the_advice_itself(entry):
    """A harmful or ignored line must not come back as what to type instead."""
    if entry.verdict in ("harmful", "ignored"):
        typed = [
            line
            for step in advice.commands(entry, {})
            for line in shells.lines(step, "bash")
            if not line.startswith("#")
        ]
        assert entry.advice not in typed


@every_entry
def test_an_entry_is_found_by_its_own_words(entry):
    assert entry in advice.search(entry.advice)


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        ("CAUSAL_CONV1D_FORCE_CXX11_ABI=1", "ignored"),
        ("pip install --pre", "harmful"),
        ("--global-option", "ignored"),
        ("administrator WinError 5", "ignored"),
        ("edit setup.py gencode", "outdated"),
        ("nvidia/cuda image conda", "harmful"),
        ("install CUDA 11.8 beside CUDA 12", "harmful"),
        ("GCC 7.5 is enough", "outdated"),
        ("export TORCH_CUDA_ARCH_LIST", "ignored"),
        ("ninja --version", "harmful"),
        ("sudo pip", "harmful"),
        ("LD_PRELOAD libstdc++", "harmful"),
        ("ln -s libcudart", "harmful"),
        ("apt install nvidia-cuda-toolkit", "harmful"),
        ("python setup.py install", "outdated"),
        ("MAX_JOBS", "works"),
        ("no-cache-dir", "works"),
    ],
)
def test_the_closest_entry_comes_first(asked, verdict):
    assert advice.search(asked)[0].verdict == verdict


@pytest.mark.parametrize("asked", ["", "pip install", "no such advice anywhere"])
def test_nothing_telling_finds_nothing(asked):
    assert advice.search(asked) == []


def test_json_has_no_placeholder_left():
    for entry in advice.entries().values():
        assert not re.search(r"'\{\w+\}|\{(cuda|sm|torch)\w*\}", str(entry.to_json()))
