# SPDX-License-Identifier: Apache-2.0
"""The signatures as data: complete, reachable by their literals, and linear on hostile lines."""

import re
import time

import pytest

from statescan.doctor import catalog
from statescan.doctor.logs import commands, verdict
from statescan.doctor.logs.frame import unframed
from statescan.doctor.logs.opinion import RULES
from statescan.doctor.logs.signatures import (
    KINDS,
    Index,
    Signature,
    signatures,
    without_digits,
)

ROWS = signatures()
INDEX = Index(ROWS)
HOSTILE = ("{0}", "{0} ", "{0}(", "{0}:", "'{0}", "/{0}", "a-{0}", "[1/2] {0}", ".so: {0}")
AROUND = ("a", " ", "/", "x.", "_Z", "0", "\\", '"', "'a", ": ", "=1.", "错误：", "(1, ")
SECONDS = 0.25
"""For one line of the longest that is looked at; an exponential pattern takes years."""


def names(rows=ROWS):
    return [row.id for row in rows]


def test_identifiers_are_unique_and_kinds_known():
    assert len(set(names())) == len(ROWS)
    assert {row.kind for row in ROWS} <= set(KINDS)


@pytest.mark.parametrize("row", ROWS, ids=names())
def test_signature_is_complete(row: Signature):
    assert row.literals
    assert re.compile(row.regex)
    has_problem = row.kind in ("cause", "hint")
    assert bool(row.slug) == has_problem
    assert not has_problem or row.slug in catalog.problems()
    assert not row.rule or row.rule in RULES
    assert bool(row.meaning) == (row.kind in ("noise", "consequence"))
    assert set(row.instead_of) <= set(catalog.problems())


def test_every_rule_is_used_by_a_signature():
    assert verdict.RULE_MODULES
    assert {row.rule for row in ROWS if row.rule} == set(RULES)


def test_what_explains_what_names_problems():
    for winner, losers in catalog.load("patterns")["explains"].items():
        assert {winner, *losers} <= set(catalog.problems())


@pytest.mark.parametrize("row", ROWS, ids=names())
def test_every_literal_is_found_alone_and_within_a_line(row: Signature):
    for literal in row.literals:
        plain = without_digits(literal)
        for line in (plain, b"_" + plain + b"_", "错 ".encode() + plain + b" x"):
            assert literal in INDEX.holding([b"before", line, b"after"])[line], line
        assert row in INDEX.candidates([literal], b"a " + literal)[literal]


def test_literals_are_found_where_others_overlap_them():
    plain = {without_digits(literal) for row in ROWS for literal in row.literals}
    line = b"".join(sorted(plain))
    literals = {literal for row in ROWS for literal in row.literals}
    assert set(INDEX.holding([line])[line]) == literals


def test_a_dropped_signature_is_looked_for_no_more():
    row = next(row for row in ROWS if row.id == "ptxas")
    index = Index(ROWS)
    index.drop(row)
    for literal in row.literals:
        assert row not in index.candidates([literal], literal)[literal]
    alone = Index([row])
    line = without_digits(row.literals[0])
    assert alone.holding([line])
    alone.drop(row)
    assert alone.holding([line]) == {}


def test_a_spent_literal_comes_back():
    row = next(row for row in ROWS if row.id == "ptxas")
    index, literal = Index([row]), row.literals[0]
    line = without_digits(literal)
    for other in row.literals:
        index.spend(other)
    assert index.holding([line]) == {}
    index.revive()
    assert literal in index.holding([line])[line]


def hostile_lines(literal: str):
    """Lines of nearly 4096 characters, made so that searches start and fail as often as can be."""
    for form in HOSTILE:
        piece = form.format(literal)
        yield piece * (4000 // len(piece))
    for piece in AROUND:
        yield piece * (4000 // len(piece)) + literal
        yield literal + piece * (4000 // len(piece))


@pytest.mark.parametrize("row", ROWS, ids=names())
def test_pattern_is_fast_on_hostile_lines(row: Signature):
    pattern = row.pattern
    for literal in row.literals[:1]:
        for line in hostile_lines(literal.decode()):
            began = time.process_time()
            pattern.search(line)
            assert time.process_time() - began < SECONDS, line[:80]


@pytest.mark.parametrize("piece", [*AROUND, "FOO=bar ", "pip install ", "(env) ", "#1 1.1 ", "$ a"])
def test_frames_and_commands_are_fast_on_hostile_lines(piece):
    line = piece * (4000 // len(piece))
    began = time.process_time()
    unframed(line)
    command = commands.command_of(line, indented=False)
    for text in (line, command):
        commands.kind_of(text)
        commands.redirect(f"pip install {text}")
        commands.asks_for_torch(text)
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("      [end of output]", "[end of output]"),
        ("#41 15.12       running build", "running build"),
        ("2025-01-02T03:04:05.1234567Z   error: x", "error: x"),
        ("2025-01-02 03:04:05,123 INFO done", "done"),
        ("web-1  | Killed", "Killed"),
        ("  │ exit code: 1", "exit code: 1"),
        ("  \\u2502 exit code: 1", "exit code: 1"),
        ("[31merror[0m: x", "error: x"),
        ("2.3.0+cu118 11.8 False", "2.3.0+cu118 11.8 False"),
        ("[3/10] nvcc -c x.cu", "[3/10] nvcc -c x.cu"),
    ],
)
def test_frames_are_taken_off(line, plain):
    assert unframed(line) == plain


@pytest.mark.parametrize(
    ("line", "command", "kind"),
    [
        ("$ pip install mamba-ssm", "pip install mamba-ssm", "install"),
        ("(ssm) me@host:~/x$ python train.py", "python train.py", "run"),
        ("root@a1b2:/workspace# pip list", "pip list", "probe"),
        (r"PS C:\x> pip install mamba-ssm", "pip install mamba-ssm", "install"),
        (r"(ssm) C:\x>python setup.py install", "python setup.py install", "install"),
        ("[4/5] RUN pip install mamba-ssm", "pip install mamba-ssm", "install"),
        ("Step 4/9 : RUN pip install mamba-ssm", "pip install mamba-ssm", "install"),
        ("!pip install mamba-ssm", "pip install mamba-ssm", "install"),
        ("+ nvcc -V", "nvcc -V", "probe"),
        ("pip install mamba-ssm", "pip install mamba-ssm", "install"),
        ('$ python -c "import torch; print(torch.__version__)"', None, "probe"),
        ('$ python -c "import causal_conv1d"', None, "run"),
        ("# include <Python.h>", "", None),
        ("10% done", "", None),
        ("hint: pip install mamba-ssm", "", None),
    ],
)
def test_commands_are_found_after_prompts(line, command, kind):
    found = commands.command_of(line, indented=False)
    assert found == (line[2:] if command is None else command)
    assert kind is None or commands.kind_of(found) == kind


@pytest.mark.parametrize(
    ("command", "requirement"),
    [
        ("pip install causal-conv1d>=1.2.0", "causal-conv1d>=1.2.0"),
        ("pip install torch mamba-ssm[causal-conv1d]>=2", "mamba-ssm[causal-conv1d]>=2"),
        ("pip install causal-conv1d<1.5", "causal-conv1d<1.5"),
        ('pip install "causal-conv1d>=1.2.0"', None),
        ("pip install 'a>=1' \"b>=2\"", None),
        ("pip install mamba-ssm > log.txt 2>&1", None),
        ("pip install mamba-ssm==2.2.4", None),
        ("python train.py>1", None),
    ],
)
def test_unquoted_bounds_are_found(command, requirement):
    assert commands.redirect(command).get("found") == requirement
