# SPDX-License-Identifier: Apache-2.0
"""The page of GPU results: made from the lines alone, the newest of each row, and up to date."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
import report

GPU = "NVIDIA H200"
SHARED = {
    "gpu": GPU, "driver": "580.1", "versions": {"torch": "2.11.0", "triton": None},
    "date": "2026-11-30T10:00:00Z", "commit": "abc",
}  # fmt: skip
SCAN = SHARED | {
    "op": "selective_scan", "row": "scan1", "direction": "fwd", "batch": 8, "dim": 2048,
    "seqlen": 2048, "dstate": 16, "layout": "channel-first", "dtype": "bf16",
    "statescan_ms": 0.2, "spread": 0.01, "peer_ms": 0.6, "peer_spread": 0.01,
}  # fmt: skip
STEP = SHARED | {
    "op": "selective_state_update", "row": "decode6", "direction": "fwd", "batch": 512,
    "dim": 5120, "dstate": 16, "device_ms": 0.09, "spread": 0.0, "peer_device_ms": 0.1,
    "host_us": 20.0, "peer_host_us": 84.0,
}  # fmt: skip
MODEL = SHARED | {
    "op": "model", "row": "train130m", "name": "mamba-130m", "mode": "train", "batch": 8,
    "tokens": 2048, "tokens_per_s": 250000.0, "spread": 0.02, "peak_mib": 17000.0,
    "peer_tokens_per_s": 160000.0, "peer_peak_mib": 18000.0,
}  # fmt: skip
MEMORY = SHARED | {
    "op": "selective_scan", "row": "memory", "direction": "fwd_bwd", "peak_mib": 310.0,
    "peer_peak_mib": 325.0,
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Writes the page of some lines: its text and the plots by name."""

    def write(*lines):
        source, page = tmp_path / "rows.jsonl", tmp_path / "docs" / "page.md"
        source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        given = ["--results", str(source), "--page", str(page)]
        assert report.main(given) == 0
        assert report.main([*given, "--check"]) == 0
        plots = {path.name: path.read_text("utf-8") for path in page.parent.rglob("*.svg")}
        return page.read_text("utf-8"), plots

    return write


def test_each_kind_has_its_table_and_plots(written):
    page, plots = written(SCAN, STEP, MODEL, MEMORY)
    assert "| scan1 | batch 8 dim 2048 seqlen 2048 dstate 16 | channel-first | bf16 | fwd |" in page
    assert "| 0.200 | 1.0% | 0.600 | 3.00x | 0.161 | 1.24x | 0.22 reached |" in page
    assert "15 missed, 0.104 reached" in page
    assert "| 250,000 | 2.0% | 160,000 | 1.56x | 17000 | 18000 |" in page
    assert "grow by 310 MiB over the inputs, the original's by 325 MiB" in page
    assert len(plots) == 5
    for name, text in plots.items():
        assert f"(page/{name})" in page
        ElementTree.fromstring(text)


def test_the_newest_line_of_a_row_counts(written):
    newer = SCAN | {"statescan_ms": 0.25, "date": "2026-12-01T10:00:00Z", "commit": "def"}
    page, _ = written(newer, SCAN)
    assert "| 0.250 |" in page
    assert "| 0.200 |" not in page
    assert "0.22 missed" in page
    assert "commit def" in page


def test_without_an_original_nothing_is_said_of_it(written):
    page, plots = written(SCAN | {"peer_ms": None, "peer_spread": None})
    assert "| 0.200 | 1.0% |  |  | 0.161 |" in page
    assert list(plots) == ["nvidia-h200-selective-scan-floor.svg"]


def test_another_gpu_has_no_floor(written):
    page, plots = written(SCAN | {"gpu": "NVIDIA L4"})
    assert "## NVIDIA L4" in page
    assert list(plots) == ["nvidia-l4-selective-scan-speed-up.svg"]


def test_a_stale_page_is_found(tmp_path, capsys):
    source, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    source.write_text(json.dumps(SCAN), encoding="utf-8")
    page.write_text("something else", encoding="utf-8")
    assert report.main(["--results", str(source), "--page", str(page), "--check"]) == 1
    assert "not up to date" in capsys.readouterr().err
    assert page.read_text("utf-8") == "something else"


def test_results_of_a_cpu_are_left_out():
    assert report.latest([SCAN | {"gpu": None}]) == []


def test_the_page_of_this_checkout_is_up_to_date():
    assert report.main(["--check"]) == 0
