# SPDX-License-Identifier: Apache-2.0
"""``statescan train``: learns a byte-level model from a text file, and continues stopped runs.

The loop, its progress and its checks are in ``training``; only options are read here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from statescan.cli import options, render


class _Setting(NamedTuple):
    """An option that becomes a field of TrainConfig; the default is only shown, never passed."""

    name: str
    kind: type
    default: Any
    text: str


SETTINGS = (
    _Setting("steps", int, 1000, "optimiser steps of the whole run"),
    _Setting("d_model", int, 128, "width of the model"),
    _Setting("n_layer", int, 4, "number of Mamba blocks"),
    _Setting("d_state", int, 16, "states of each channel"),
    _Setting("d_conv", int, 4, "taps of the convolution"),
    _Setting("expand", int, 2, "inner width over d_model"),
    _Setting("batch", int, 8, "windows a step"),
    _Setting("seqlen", int, 256, "bytes of a window"),
    _Setting("lr", float, 3e-3, "highest learning rate"),
    _Setting("min_lr_ratio", float, 0.05, "last learning rate over the highest"),
    _Setting("warmup", int, 50, "steps until the highest learning rate"),
    _Setting("weight_decay", float, 0.1, "of matrices"),
    _Setting("beta1", float, 0.9, "of AdamW"),
    _Setting("beta2", float, 0.95, "of AdamW"),
    _Setting("grad_clip", float, 1.0, "largest norm of the gradient, 0 for no limit"),
    _Setting("windows", str, "random", "random, or carried: in order, states kept"),
    _Setting("held_out", float, 0.05, "fraction of the text kept for evaluation"),
    _Setting("seed", int, 0, "of initial weights and order"),
    _Setting("eval_every", int, 500, "steps between evaluations, 0 only at the end"),
    _Setting("eval_bytes", int, 65536, "bytes of an evaluation before the last"),
    _Setting("save_every", int, 500, "steps between saves"),
    _Setting("log_every", int, 10, "steps between progress lines without a terminal"),
    _Setting("dtype", str, "bfloat16", "of the stored weights"),
    _Setting("device", str, "auto", "auto: CUDA where there is a GPU, else the CPU"),
)


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "train", execute, "Train a byte-level Mamba model on a text file."),
        "The folder gets config.json and model.safetensors, which `statescan generate --model`\n"
        "reads, and training.pt, from which --resume continues exactly. Ctrl-C stops after the\n"
        "current step with everything saved (exit code 130).\n\n"
        "example: statescan train --text book.txt --out book-model --steps 500",
    )
    parser.add_argument("--text", metavar="FILE", help="file to learn from")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the run")
    parser.add_argument(
        *("--resume",),
        action="store_true",
        help="continue the run in --out; its settings are read from there",
    )
    options.add_threads(parser)
    options.add_json(parser)
    group = parser.add_argument_group("settings of a run")
    for setting in SETTINGS:
        group.add_argument(
            f"--{setting.name.replace('_', '-')}",
            dest=setting.name,
            type=options.dtype_name if setting.name == "dtype" else setting.kind,
            metavar=setting.kind.__name__.upper()[:5],
            help=f"{setting.text} (default: {setting.default})",
        )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from statescan.training import TrainConfig, train

    options.set_threads(args.threads)
    values = _given(args)
    if args.resume:
        values = _saved(args.out) | values
    if "text" not in values:
        raise options.UsageError(
            "train: --text is missing.\n"
            "A new run needs a file to learn from.\n"
            "Give --text FILE, or --resume to continue the run in --out."
        )
    # As typed: an empty --out would as a Path be the current folder.
    result = train(TrainConfig(**{**values, "out": args.out, "resume": args.resume}))
    if args.json:
        render.document("train", _document(result))
    else:
        _summary(result)
    return 130 if result.interrupted else 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings on the command line; the rest keeps TrainConfig's defaults."""
    names = ("text", *(setting.name for setting in SETTINGS))
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _saved(out: str) -> dict[str, Any]:
    """The settings that a run was started with."""
    from statescan.training.state import load_state

    settings: dict[str, Any] = load_state(Path(out))["settings"]
    return settings


def _summary(result: Any) -> None:
    quality = result.bits_per_byte
    # An interrupted run has no evaluation of its last weights.
    shown = (
        "" if quality is None or result.interrupted else f", {quality:.4f} bits per byte held out"
    )
    render.say(
        f"{result.out}: {result.parameters:,} parameters, step {result.step}, "
        f"{result.tokens_per_second:,.0f} tokens/s{shown}"
    )
    if not result.interrupted:
        render.hints([f'statescan generate --model {result.out} --prompt "..."'])


def _document(result: Any) -> dict[str, Any]:
    return {
        "out": str(result.out),
        "step": result.step,
        "interrupted": result.interrupted,
        "last_loss": result.losses[-1] if result.losses else None,
        "held_out_bits_per_byte": [
            {"step": step, "bits_per_byte": bits} for step, bits in result.held_out
        ],
        "tokens_per_second": result.tokens_per_second,
        "seconds": result.seconds,
        "parameters": result.parameters,
        "corpus_sha256": result.corpus_sha256,
    }
