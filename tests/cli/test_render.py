# SPDX-License-Identifier: Apache-2.0
import io
import json
import math

import pytest

from statescan.cli import render

ROWS = [
    ("a", "1.5", "yes", "short"),
    ("longer", "10", "no", "a reason that needs several lines " * 3),
]
HEADERS = ("name", "size", "usable", "reason")


def test_tables_are_aligned_and_wrapped():
    lines = render.table_lines(HEADERS, ROWS, (1,), 60, coloured=False)
    assert lines[0] == "name    size  usable  reason"
    assert lines[1] == "a        1.5  yes     short"
    assert lines[2].startswith("longer    10  no      a reason that")
    assert all(line.startswith(" " * 22) for line in lines[3:])
    assert max(map(len, lines)) <= 60
    assert all(line == line.rstrip() for line in lines)


def test_colour_only_repeats_words():
    plain = render.table_lines(HEADERS, ROWS, (1,), 60, coloured=False)
    coloured = render.table_lines(HEADERS, ROWS, (1,), 60, coloured=True)
    assert coloured != plain
    for code in ("\033[1m", "\033[32m", "\033[33m", "\033[0m"):
        assert any(code in line for line in coloured)
        coloured = [line.replace(code, "") for line in coloured]
    assert [line.rstrip() for line in coloured] == plain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert render.colour_wanted(Terminal())
    assert not render.colour_wanted(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not render.colour_wanted(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    # https://no-color.org asks for presence, whatever the value.
    monkeypatch.setenv("NO_COLOR", "1")
    assert not render.colour_wanted(Terminal())


def test_hints_follow_a_blank_line(capsys):
    render.hints(["first", "second", "first"])
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "\nhint: first\nhint: second\n")
    render.hints([])
    assert capsys.readouterr().err == ""


def test_json_is_valid_also_for_infinite_errors(capsys):
    render.document("test", {"rows": [{"error": math.inf}, {"error": math.nan}, {"error": 0.5}]})
    text = capsys.readouterr().out

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    document = json.loads(text, parse_constant=refuse)
    assert document == {
        "schema_version": render.SCHEMA_VERSION,
        "command": "test",
        "rows": [{"error": "inf"}, {"error": "nan"}, {"error": 0.5}],
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "n/a"), (0, "0 KiB"), (2048, "2 KiB"), (3 << 20, "3.0 MiB"), (300 << 20, "300 MiB")],
)
def test_sizes(count, text):
    assert render.size(count) == text


@pytest.mark.parametrize(("value", "text"), [(0.123, "0.12"), (12.34, "12.3"), (1234.5, "1234")])
def test_figures(value, text):
    assert render.figure(value) == text
