# SPDX-License-Identifier: Apache-2.0
"""Plots and the page of ``statescan bench``, drawn from its JSON document.

Nothing is measured here, and nothing that the document lacks is shown.
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from statescan.cli import render
from statescan.errors import MissingExtraError

_COLOURS = {"backend": "#1f6f8b", "peer": "#b8b8b8"}
_WAYS = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_MODES = {"prefill": "prefill", "generate_eager": "decode"}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60em; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: .5em 0; }
th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
tr.backend td { font-weight: 600; color: #174f63; }
tr td.group { font-weight: 400; color: #222; }
tr.first td { border-top: 2px solid #999; }
.bad { color: #a11; font-weight: 600; }
svg { max-width: 100%; height: auto; }
.note { color: #555; }
"""


_FLOORS = (
    "<p>A floor is the larger of two times: every byte moved once at the speed of a copy on this "
    "GPU, and every exponential once at the speed of that unit.</p>"
)


def import_figure() -> Any:
    """matplotlib's Figure, or an error that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "plots and pages need matplotlib, which is not installed: "
            "pip install 'statescan[bench]'"
        ) from error
    return Figure


def groups(timings: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows that are versions of one call, with a title, in the order of the document."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in timings:
        found.setdefault(_title(row), []).append(row)
    return list(found.items())


def _title(row: Mapping[str, Any]) -> str:
    if row["op"] == "model":
        return f"model {row['name']}, {_MODES[row['mode']]} {row['tokens']} tokens, {row['dtype']}"
    names = ("batch", "dim", "seqlen", "dstate", "width")
    sizes = " × ".join(str(row[name]) for name in names if name in row)
    return f"{row['op']}, {_WAYS[row['direction']]}, {sizes}, {row['dtype']}"


def draw(timings: Sequence[Mapping[str, Any]]) -> Any:
    """A figure with one panel of bars a group: milliseconds of ops, tokens a second of models."""
    panels = groups(timings)
    heights = [0.9 + 0.32 * len(rows) for _, rows in panels]
    figure = import_figure()(figsize=(8, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, rows) in zip(axes, panels, strict=True):
        _draw_panel(axis, title, rows)
    return figure


def _draw_panel(axis: Any, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    is_model = rows[0]["op"] == "model"
    values = [row["tokens_per_s" if is_model else "ms"] for row in rows]
    spreads = [value * row["spread"] for value, row in zip(values, rows, strict=True)]
    names = [row["version"] for row in rows]
    bars = axis.barh(
        names, values, xerr=spreads, color=[_COLOURS[row["kind"]] for row in rows],
        ecolor="#444444", height=0.7,
    )  # fmt: skip
    unit = "tokens/s" if is_model else "ms"
    labels = [_number(value) for value in values]
    if not is_model:
        ratios = [f"  ({render.figure(row['times_naive'])}x)" for row in rows]
        labels = [label + ratio for label, ratio in zip(labels, ratios, strict=True)]
    if "floor_ms" in rows[0]:
        axis.axvline(rows[0]["floor_ms"], color="#a11", linewidth=1, linestyle="--")
    axis.bar_label(bars, labels=labels, padding=6, fontsize=8)
    better = "more is better" if is_model else "less is better; × naive in brackets"
    better += "; dashed: floor" if "floor_ms" in rows[0] else ""
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.set_xlabel(f"{unit} ({better})", fontsize=8)
    axis.set_xlim(0, max(v + s for v, s in zip(values, spreads, strict=True)) * 1.25)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def write_plot(document: Mapping[str, Any], path: Path) -> None:
    """The bars as PNG, SVG or PDF, by the ending of the name."""
    figure = draw(document["timings"])
    figure.supxlabel(_caption(document), fontsize=7, color="#555555")
    figure.savefig(path, dpi=150)


def write_html(document: Mapping[str, Any], path: Path) -> None:
    """One page that needs no other file: machine, tables, bars, what was not timed, the data."""
    path.write_text(page(document), encoding="utf-8")


def page(document: Mapping[str, Any]) -> str:
    """The page as text."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>statescan bench</title>',
        '<meta name="viewport" content="width=device-width">',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>statescan bench</h1>",
        f'<p class="note">{html.escape(_caption(document))}</p>',
        "" if document["passed"] else '<p class="bad">A result was wrong: see the end.</p>',
        "<h2>Machine and versions</h2>",
        _table(("", ""), _versions(document)),
        *_results(document["timings"]),
        *_not_timed(document),
        "<h2>How to read it</h2>",
        "<p>All versions of a group ran in turns in one process. A time is the median of its "
        "samples; ± is half the distance from the first to the third quartile. Before a version "
        "was timed, its results at these sizes were compared with a float64 reference.</p>",
        _FLOORS if any("floor_ms" in row for row in document["timings"]) else "",
        # A closing tag inside the data would end the element.
        '<script type="application/json" id="data">',
        json.dumps(document, ensure_ascii=False).replace("</", "<\\/"),
        "</script></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _versions(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The machine's facts, and the packages of the peers that were timed."""
    facts = {name: str(value) for name, value in document["machine"].items()}
    timed = (row for row in document["peers"] if row["timed"])
    return list({**facts, **{row["package"]: str(row["version"]) for row in timed}}.items())


def _caption(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    gpu = f"{machine['gpu']}, CUDA {machine['cuda']}, " if machine.get("gpu") else ""
    return (
        f"{gpu}statescan {machine['statescan']}, torch {machine['torch']}, "
        f"Python {machine['python']}, {machine['processor']}, "
        f"{machine['threads']} of {machine['cpus']} CPUs, {document['date']}"
    )


def _results(timings: Sequence[Mapping[str, Any]]) -> list[str]:
    ops = [row for row in timings if row["op"] != "model"]
    models = [row for row in timings if row["op"] == "model"]
    parts = []
    for title, rows in (("Ops", ops), ("Model", models)):
        if rows:
            parts += [f"<h2>{title}</h2>", _timing_table(rows), _svg(rows)]
    return parts


def _timing_table(rows: Sequence[Mapping[str, Any]]) -> str:
    is_model = rows[0]["op"] == "model"
    own = ("tokens/s", "ms/token") if is_model else ("ms", "× naive")
    with_floor = "floor_ms" in rows[0]
    headers = ["", "version", own[0], "±", "samples", own[1]]
    headers += ["of floor"] if with_floor else []
    lines = []
    for title, group in groups(rows):
        for number, row in enumerate(group):
            value = row["tokens_per_s" if is_model else "ms"]
            last = _number(row["ms"] / row["tokens"]) if is_model else _number(row["times_naive"])
            spread = f"{row['spread']:.0%}" if row["samples"] > 1 else "one call"
            cells = [_number(value), spread, str(row["samples"]), last]
            cells += [f"{value / row['floor_ms']:.2f}×"] if with_floor else []
            numbers = "".join(f'<td class="n">{html.escape(cell)}</td>' for cell in cells)
            kind = row["kind"] + (" first" if number == 0 else "")
            head = html.escape(title if number == 0 else "")
            name = html.escape(row["version"])
            lines.append(
                f'<tr class="{kind}"><td class="group">{head}</td><td>{name}</td>{numbers}</tr>'
            )
    head = "".join(
        f"<th{' class=n' if position > 1 else ''}>{html.escape(text)}</th>"
        for position, text in enumerate(headers)
    )
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _not_timed(document: Mapping[str, Any]) -> list[str]:
    rows = [
        (str(row["backend"]), str(row["op"] or "all"), str(row["reason"]))
        for row in document["refused"]
    ]
    rows += [
        (str(row["peer"]), str(row["op"]), str(row["reason"]))
        for row in document["peers"]
        if not row["timed"]
    ]
    rows += [
        (str(gate["backend"]), str(gate["op"]), f"WRONG: {gate['error']}")
        for gate in document["gates"]
        if not gate["passed"]
    ]
    return ["<h2>Not timed</h2>", _table(("version", "op", "reason"), rows)] if rows else []


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

    head = f"<tr>{line(headers, 'th')}</tr>" if any(headers) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def _svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """The bars as an element of the page."""
    import matplotlib

    buffer = io.StringIO()
    # Without a date, and with names from a fixed salt, the same document gives the same page.
    with matplotlib.rc_context({"svg.hashsalt": "statescan"}):
        draw(rows).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _number(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else render.figure(value)
