# SPDX-License-Identifier: Apache-2.0
import json
import re
from html.parser import HTMLParser

import pytest

from statescan.cli import _bench_report
from statescan.errors import MissingExtraError

SMALL = ("--dim", "8", "--seqlen", "12", "--dstate", "4", "--seconds", "0.01", "--no-peers")


def op_row(version: str, kind: str, ms: float) -> dict:
    return {
        "op": "selective_scan", "direction": "fwd", "batch": 1, "dim": 8, "seqlen": 12,
        "dstate": 4, "dtype": "float32", "version": version, "kind": kind, "ms": ms,
        "spread": 0.1, "samples": 5, "times_naive": 20 / ms,
    }  # fmt: skip


def model_row(version: str, kind: str, rate: float) -> dict:
    return {
        "op": "model", "name": "embedded", "mode": "prefill", "tokens": 512, "dtype": "float32",
        "version": version, "kind": kind, "ms": 512e3 / rate, "tokens_per_s": rate,
        "spread": 0.0, "samples": 1,
    }  # fmt: skip


DOCUMENT = {
    "passed": True,
    "date": "2026-01-02T03:04:05Z",
    "machine": {
        "statescan": "0.1.0", "torch": "2.13", "python": "3.11", "processor": "<Some> CPU",
        "cpus": 2, "threads": 1,
    },
    "gates": [],
    "peers": [
        {"peer": "other", "op": "model", "timed": False, "reason": "not importable: a&b"},
        {"peer": "third", "op": "model", "timed": True, "package": "third", "version": "7.8.9"},
    ],
    "refused": [{"backend": "slow", "op": None, "reason": "its library is missing"}],
    "timings": [
        op_row("naive", "peer", 20.0), op_row("torch", "backend", 4.0),
        model_row("torch", "backend", 1500.0),
    ],
    "rows": [],
}  # fmt: skip


class Reader(HTMLParser):
    """Open elements, texts, and everything that a browser would fetch."""

    VOID = ("meta", "br", "use", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {value}")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


@pytest.fixture
def page() -> str:
    pytest.importorskip("matplotlib", reason="pip install 'statescan[bench]'")
    return _bench_report.page(DOCUMENT)


def test_the_page_is_whole_and_fetches_nothing(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.fetched == []
    assert page.count("<svg") == 2


def test_the_page_has_machine_date_results_and_reasons(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    shown = "\n".join(reader.texts)
    for text in ("<Some> CPU", "2026-01-02T03:04:05Z", "2.13", "7.8.9", "slow",
                 "not importable: a&b", "its library is missing",
                 "selective_scan, forward, 1 × 8 × 12 × 4, float32",
                 "model embedded, prefill 512 tokens, float32", "5.00", "1500", "±"):  # fmt: skip
        assert text in shown, text
    data = re.search(r'id="data">\n(.*?)\n</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data.group(1)) == DOCUMENT


def test_the_same_document_gives_the_same_page(page: str) -> None:
    assert _bench_report.page(DOCUMENT) == page


def test_a_wrong_result_is_said_first(page: str) -> None:
    gate = {"op": "selective_scan", "backend": "torch", "passed": False, "error": "off </script>"}
    failed = _bench_report.page({**DOCUMENT, "passed": False, "gates": [gate]})
    assert failed.index("A result was wrong") < failed.index("<table>")
    assert "WRONG: off &lt;/script&gt;" in failed
    assert "A result was wrong" not in page
    Reader().feed(failed)


def test_files_of_a_run(run, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'statescan[bench]'")
    plot, html = tmp_path / "p.png", tmp_path / "p.html"
    outcome = run(
        "bench", "causal_conv1d", *SMALL, "--direction", "fwd", "--plot", str(plot), "--html",
        str(html), "--json",
    )  # fmt: skip
    assert outcome.code == 0
    assert f"wrote {plot}" in outcome.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "causal_conv1d, forward" in html.read_text(encoding="utf-8")
    json.loads(outcome.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--plot", "bars.jpeg"), ".png"), (("--html", "no/such/folder/x.html"), "does not exist")],
)
def test_bad_file_names_are_refused_before_measuring(run, arguments, message: str) -> None:
    outcome = run("bench", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.out == ""


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch, tmp_path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"statescan\[bench\]"):
        _bench_report.import_figure()
    outcome = run("bench", "--html", str(tmp_path / "x.html"))
    assert outcome.code == 1
    assert "statescan[bench]" in outcome.err
    assert outcome.out == ""
