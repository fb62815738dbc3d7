# SPDX-License-Identifier: Apache-2.0
"""Makes the page of GPU results, docs/benchmarks-gpu.md and its plots, from the lines of results.

    python benchmarks/report.py            writes them
    python benchmarks/report.py --check    exit code 1 if they would change

Of several results of one row on one GPU the latest by date counts. No number is typed by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_bench import plots, rows
from gpu_bench.results import FOLDER, read

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks-gpu.md"
Line = Mapping[str, Any]

INTRODUCTION = """\
Times are medians of samples taken in turns in one process; ± is half the distance between the
quartiles, over the median. They are times of the device: the host is kept ahead of it. Forward
runs without gradients, backward alone with its graph retained. The original is mamba-ssm or
causal-conv1d, built from its source. Before a row was timed, its outputs and every gradient were
compared with float64. A floor is the larger of two times: every byte moved once at the speed of
a copy, and every exponential once at the speed of that unit. The host's time of a decode step is
that of 1000 calls without waiting, over 1000. `benchmarks/README.md` says how to run it all."""

OP_COLUMNS = (
    *("row", "shape", "layout", "dtype", "way"),
    *("statescan ms", "±", "original ms", "speed-up", "floor ms", "of floor", "target ms"),
)
STEP_COLUMNS = (
    *("row", "shape", "statescan us", "original us", "device ms", "±", "original ms"),
    *("floor ms", "of floor", "target us, ms"),
)
MODEL_COLUMNS = (
    *("model", "what", "batch", "tokens", "tokens/s", "±", "original", "speed-up"),
    *("peak MiB", "original"),
)


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=FOLDER / "gpu_ops.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(arguments)
    lines = latest(read(args.results))
    if not lines:
        print(f"no GPU results in {args.results}: nothing to write.\n"
              "benchmarks/gpu_peers.py makes them, on a machine with a GPU.")  # fmt: skip
        return 0
    stale = []
    for path, text in make(lines, args.page).items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    if args.check and stale:
        print("not up to date: " + ", ".join(map(str, stale)), file=sys.stderr)
        print("Run python benchmarks/report.py and commit what it writes.", file=sys.stderr)
        return 1
    return 0


def latest(lines: Iterable[Line]) -> list[Line]:
    """The newest line of each row, direction and GPU, in the order of the tables."""
    found: dict[tuple[Any, ...], Line] = {}
    for line in sorted(lines, key=lambda line: str(line["date"])):
        if line["gpu"] is None:
            continue
        found[(line["gpu"], line["row"], line.get("direction"))] = line
    order = {row.name: number for number, row in enumerate(rows.ROWS)}
    return sorted(
        found.values(),
        key=lambda line: (
            line["gpu"], order.get(line["row"], len(order)), line["row"],
            line.get("direction") == "bwd",
        ),
    )  # fmt: skip


def make(lines: Sequence[Line], page: Path) -> dict[Path, str]:
    """The text of every file, by its path."""
    files: dict[Path, str] = {}
    parts = [
        "<!-- Made by benchmarks/report.py from benchmarks/results/gpu_ops.jsonl: do not edit. -->",
        "# Benchmarks on GPUs",
        INTRODUCTION,
    ]
    for gpu in dict.fromkeys(line["gpu"] for line in lines):
        mine = [line for line in lines if line["gpu"] == gpu]
        parts += _gpu(gpu, mine, page, files)
    files[page] = "\n\n".join(parts) + "\n"
    return files


def _gpu(gpu: str, lines: list[Line], page: Path, files: dict[Path, str]) -> list[str]:
    """The parts of one GPU; its plots go to ``files``."""
    parts = [f"## {gpu}", _measured_with(lines)]
    slug = gpu.lower().replace(" ", "-")
    by_kind: tuple[tuple[str, Callable[[Line], bool], Callable[[list[Line]], str]], ...] = (
        ("Selective scan", lambda line: line["op"] == "selective_scan", _op_table),
        ("Causal convolution", lambda line: line["op"] == "causal_conv1d", _op_table),
        ("Decode, one token", lambda line: line["op"] in rows.UPDATES, _step_table),
        ("Models", lambda line: line["op"] == "model", _model_table),
    )
    for title, belongs, table in by_kind:
        chosen = [line for line in lines if belongs(line) and line["row"] != rows.MEMORY]
        if not chosen:
            continue
        parts += [f"### {title}", table(chosen)]
        for kind, draw in (("floor", plots.against_floor), ("speed-up", plots.speed_ups)):
            text = draw(chosen, f"{title}, {gpu}")
            if text:
                name = f"{slug}-{title.lower().split(',')[0].replace(' ', '-')}-{kind}.svg"
                files[page.parent / page.stem / name] = text
                parts.append(f"![{title}: {kind}]({page.stem}/{name})")
    parts += [_memory(line) for line in lines if line["row"] == rows.MEMORY]
    return parts


def _measured_with(lines: Sequence[Line]) -> str:
    """Versions, dates and commits; a mixture is said as one."""
    versions: dict[str, list[str]] = {}
    for line in lines:
        facts = {**line["versions"], "driver": line["driver"], "commit": line["commit"]}
        facts["date"] = line["date"][:10]
        for name, value in facts.items():
            if value is not None and str(value) not in versions.setdefault(name, []):
                versions[name].append(str(value))
    return (
        "; ".join(f"{name} {', '.join(found)}" for name, found in versions.items() if found) + "."
    )


def _op_table(lines: list[Line]) -> str:
    cells = []
    for line in lines:
        row, floor = plots.row_and_floor(line)
        target = row.targets.get(line["direction"]) if row else None
        mine, theirs = line["statescan_ms"], line["peer_ms"]
        cells.append([
            line["row"], _shape(line), line["layout"], line["dtype"], line["direction"],
            _ms(mine), _percent(line["spread"]), _ms(theirs), _times(theirs, mine),
            _ms(floor), _times(mine, floor), _aim(target, mine),
        ])  # fmt: skip
    return _table(OP_COLUMNS, cells)


def _step_table(lines: list[Line]) -> str:
    cells = []
    for line in lines:
        row, floor = plots.row_and_floor(line)
        targets = row.targets if row else {}
        aims = (_aim(targets.get("host_us"), line["host_us"]),
                _aim(targets.get("device_ms"), line["device_ms"]))  # fmt: skip
        cells.append([
            line["row"], f"{line['op']} {_shape(line)}", f"{line['host_us']:.1f}",
            "" if line["peer_host_us"] is None else f"{line['peer_host_us']:.1f}",
            _ms(line["device_ms"]), _percent(line["spread"]), _ms(line["peer_device_ms"]),
            _ms(floor), _times(line["device_ms"], floor), ", ".join(filter(None, aims)),
        ])  # fmt: skip
    return _table(STEP_COLUMNS, cells)


def _model_table(lines: list[Line]) -> str:
    cells = []
    for line in lines:
        mine, theirs = line["tokens_per_s"], line["peer_tokens_per_s"]
        cells.append([
            line["name"], line["mode"].replace("_", ", "), line["batch"], line["tokens"],
            f"{mine:,.0f}", _percent(line["spread"]), "" if theirs is None else f"{theirs:,.0f}",
            _times(mine, theirs), _mib(line["peak_mib"]), _mib(line["peer_peak_mib"]),
        ])  # fmt: skip
    return _table(MODEL_COLUMNS, cells)


def _memory(line: Line) -> str:
    theirs = line["peer_peak_mib"]
    peer = "" if theirs is None else f", the original's by {theirs:.0f} MiB"
    return (
        f"Memory: forward and backward of {rows.ROWS[0].name} in a process of its own grow by "
        f"{line['peak_mib']:.0f} MiB over the inputs{peer}."
    )


def _shape(line: Line) -> str:
    names = ("batch", "dim", "nheads", "headdim", "seqlen", "dstate", "width")
    return " ".join(f"{name} {line[name]}" for name in names if name in line)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _times(upper: float | None, lower: float | None) -> str:
    return f"{upper / lower:.2f}x" if upper is not None and lower else ""


def _aim(target: float | None, mine: float) -> str:
    return "" if target is None else f"{target:g} {'reached' if mine <= target else 'missed'}"


def _table(columns: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
