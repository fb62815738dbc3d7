# SPDX-License-Identifier: Apache-2.0
"""Times whole Mamba-1 models on a GPU, statescan's beside mamba-ssm's with the same weights.

    python benchmarks/gpu_models.py                     every row
    python benchmarks/gpu_models.py --rows train,write130m
    python benchmarks/gpu_models.py --quick             fewer tokens and samples

Before a row is timed, logits of both are compared with float64. Times are those that a user waits,
in turns. Rows are added to ``benchmarks/results/gpu_ops.jsonl``; where a row writes, its time
counts the reading of the prompt too, its tokens only those written. With ``--device cpu`` a tiny
model shows only that the script works; rows with CUDA graphs are left out there.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_bench import models, results, timing
from gpu_bench.gate import relative_error
from torch import Tensor, nn

from statescan.cli._timing import Timing
from statescan.dispatch import use_backend
from statescan.models import MambaLM

OURS, PEER = "statescan", "peer"
PROMPT = 128
MIB = 2**20
LOGITS = (2, 200)
"""Rows and tokens whose logits are compared."""


@dataclass(frozen=True)
class Row:
    """One line: what to do with which model.

    Attributes:
        name: How ``--rows`` calls it.
        model: One of ``models.SIZES``.
        mode: train, forward, generate_graph or generate_eager.
        batch, tokens: Of a batch: tokens read, or written after a prompt of 128.
    """

    name: str
    model: str
    mode: str
    batch: int
    tokens: int

    @property
    def trains(self) -> bool:
        return self.mode in ("train", "forward")


ROWS = (
    Row("train130m", "130m", "train", 8, 2048),
    Row("read130m", "130m", "forward", 8, 2048),
    Row("write130m-b1", "130m", "generate_graph", 1, 256),
    Row("write130m-b1-eager", "130m", "generate_eager", 1, 64),
    Row("write130m-b64", "130m", "generate_graph", 64, 256),
    Row("write1.4b-b1", "1.4b", "generate_graph", 1, 256),
    Row("write1.4b-b64", "1.4b", "generate_graph", 64, 256),
    Row("train1.4b", "1.4b", "train", 4, 2048),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the rows asked for; the exit code."""
    args = _parse(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here.\nRun this on a machine with one.", file=sys.stderr)
        return 2
    chosen = _chosen(args.rows, device, args.quick)
    if not chosen:
        names = ", ".join(row.name for row in ROWS)
        print(f"--rows {args.rows}: no row's name begins so.\nThere are: {names}.", file=sys.stderr)
        return 2
    about = results.environment(device, args.commit)
    print(f"{about['gpu'] or 'CPU'}, {about['versions']}")
    failed = False
    with_peer = args.peers and _peer_is_there()
    with use_backend(args.backend):
        for row in chosen:
            failed |= not _run(row, args, device, with_peer, about)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 1 if failed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", metavar="NAMES", help="separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and samples")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="of statescan (default: cuda, torch on the CPU)")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--commit", help="measured commit, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "gpu_ops.jsonl")
    args = parser.parse_args(arguments)
    if args.backend is None:
        args.backend = "cuda" if torch.device(args.device).type == "cuda" else "torch"
    if args.quick:
        args.seconds = min(args.seconds, 2.0)
    return args


def _chosen(words: str, device: torch.device, quick: bool) -> list[Row]:
    names = tuple(word for word in words.replace(",", " ").split() if word)
    rows = [row for row in ROWS if not names or row.name in names]
    rows = rows or [row for row in ROWS if row.name.startswith(names)]
    if device.type != "cuda":
        return [
            replace(row, model="tiny", batch=min(row.batch, 2), tokens=min(row.tokens, 16))
            for row in rows
            if row.mode != "generate_graph"
        ]
    return [replace(row, tokens=64) if quick and not row.trains else row for row in rows]


def _peer_is_there() -> bool:
    try:
        import mamba_ssm  # noqa: F401
    except Exception as error:  # noqa: BLE001, packages with compiled parts fail in any way
        print(
            f"without mamba_ssm ({type(error).__name__}: {error}): statescan is timed alone.\n"
            "  To have it: pip install mamba-ssm causal-conv1d --no-build-isolation"
        )
        return False
    return True


def _run(
    row: Row, args: argparse.Namespace, device: torch.device, with_peer: bool, about: dict[str, Any]
) -> bool:
    """Judge, time and write one row; whether our logits are right."""
    # Training keeps float32 weights under autocast; writing has a model in half precision.
    dtype = torch.float32 if row.trains or device.type != "cuda" else torch.bfloat16
    ours = models.make_model(row.model, device, dtype)
    versions: dict[str, nn.Module] = {OURS: ours}
    if with_peer:
        versions[PEER] = models.make_peer(ours, row.model, dtype)
    vocabulary = models.SIZES[row.model][2]
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(vocabulary, LOGITS, generator=generator, device=device)
    problem = _judge(row, versions, ids, args.backend)
    if problem:
        print(f"{row.name:19} WRONG, not timed: {problem}")
        return False
    length = row.tokens if row.trains else PROMPT
    ids = torch.randint(vocabulary, (row.batch, length), generator=generator, device=device)
    works, peaks = {}, {}
    for name, model in versions.items():
        works[name], peaks[name] = _prepared(row, name, model, ids)
    least = 3 if row.mode != "train" else 5
    sets = {name: [work] for name, work in works.items()}
    found = timing.time_in_turns(sets, device, args.seconds, least=least, wall=True)
    _write(row, found, peaks, args, dtype, about)
    return True


def _prepared(
    row: Row, name: str, model: nn.Module, ids: Tensor
) -> tuple[Callable[[], Tensor], float | None]:
    """The work of one version, and the peak of memory that it alone needs."""
    on_gpu = ids.device.type == "cuda"
    # The weights and gradients of the other version are there too, and do not count.
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    before = torch.cuda.memory_allocated() - own if on_gpu else 0
    graph = row.mode == "generate_graph"
    if row.mode == "train":
        work = models.training_step(model.train(), ids)
    elif row.mode == "forward":
        work = models.reading(model.eval(), ids)
    elif name == OURS:
        assert isinstance(model, MambaLM)
        work = models.our_writing(model.eval(), ids, row.tokens, graph)
    else:
        work = models.peer_writing(model.eval(), ids, row.tokens, graph)
    for _ in range(2):
        work()
    if not on_gpu:
        return work, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return work, (torch.cuda.max_memory_allocated() - before) / MIB


def _judge(row: Row, versions: dict[str, nn.Module], ids: Tensor, backend: str) -> str:
    """What is wrong with our logits, "" if nothing: no worse than twice the original's error."""
    ours = versions[OURS]
    exact_model = models.make_model(row.model, ids.device, torch.float32).double()
    exact_model.load_state_dict(ours.state_dict())
    with torch.no_grad(), use_backend("torch"):
        exact = exact_model(ids).logits
    del exact_model
    errors = {}
    for name, model in versions.items():
        with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=row.trains):
            errors[name] = relative_error(model(ids).logits, exact)
    # Rounding adds up over the layers; a wrong model is off by about 1.
    allowed = max(0.03, 2 * errors.get(PEER, 0.0))
    print(f"{row.name:19} logits: {', '.join(f'{n} {e:.1e}' for n, e in errors.items())}")
    if not errors[OURS] <= allowed:
        return f"logits have error {errors[OURS]:.2e} on {backend}, allowed is {allowed:.2e}"
    return ""


def _write(
    row: Row,
    found: dict[str, Timing],
    peaks: dict[str, float | None],
    args: argparse.Namespace,
    dtype: torch.dtype,
    about: dict[str, Any],
) -> None:
    tokens = row.batch * row.tokens
    ours, peer = found[OURS], found.get(PEER)
    half = row.trains or dtype == torch.bfloat16
    line: dict[str, Any] = {
        "op": "model",
        "row": row.name,
        "name": f"mamba-{row.model}",
        "mode": row.mode,
    }
    line |= {"batch": row.batch, "tokens": row.tokens, "dtype": "bf16" if half else "fp32"}
    line |= {"prompt": None if row.trains else PROMPT, "backend": args.backend}
    line |= {"tokens_per_s": 1e3 * tokens / ours.median, "spread": ours.spread}
    line |= {"samples": ours.samples, "peak_mib": peaks[OURS]}
    line |= {"peer_tokens_per_s": peer and 1e3 * tokens / peer.median}
    line |= {"peer_spread": peer and peer.spread, "peer_peak_mib": peaks.get(PEER)}
    results.append(args.out, line | about)
    text = f"{row.name:19} {line['tokens_per_s']:10.0f} tokens/s ±{ours.spread:.0%}"
    if peer:
        speed = peer.median / ours.median
        text += f"  original {line['peer_tokens_per_s']:.0f} ({speed:.2f}x)"
    if peaks[OURS] is not None:
        text += f"  peak {peaks[OURS]:.0f} MiB"
        text += f", original {peaks[PEER]:.0f}" if peer else ""
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
