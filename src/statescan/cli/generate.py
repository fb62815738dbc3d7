# SPDX-License-Identifier: Apache-2.0
"""``statescan generate``: continues prompts, streaming for one and as a batch for several.

How tokens are chosen is in ``generation``; no sampling here.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from statescan.cli import options, render

if TYPE_CHECKING:
    from statescan.generation import SamplingConfig
    from statescan.models import ByteTokenizer, MambaLM

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "generate", execute, "Continue prompts with a model."),
        "Without --prompt and --file the prompt is read from stdin. Only the new text goes to\n"
        "stdout, piece by piece for one prompt, under a line with its number for several.\n\n"
        'example: statescan generate --prompt "In the beginning" --seed 1',
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; repeat for a batch"
    )
    prompts.add_argument(
        "--file", metavar="FILE", help='file whose content is the prompt, "-" for stdin'
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="model folder of `statescan train` (default: the built-in one)",
    )
    parser.add_argument(
        *("--max-new-tokens",),
        type=options.natural_int,
        default=256,
        metavar="N",
        help="most new tokens of a prompt (default: 256)",
    )
    parser.add_argument(
        *("--stop",),
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt before its new text")
    options.add_device(parser)
    options.add_threads(parser)
    options.add_json(parser)
    _add_sampling(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument("--greedy", action="store_true", help="always the most likely token")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="below 1 safer, above 1 wilder (default: 0.7)",
    )
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="only the likeliest tokens that sum to P"
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="only tokens P times as likely as the likeliest"
    )
    group.add_argument(
        *("--repetition-penalty",),
        type=float,
        metavar="R",
        help="above 1: make tokens that were seen less likely",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same text (default: random)"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    prompts = read_prompts(args)
    sampling = sampling_config(args)
    options.set_threads(args.threads)
    model, tokenizer = load(args.model, args.device)
    if len(prompts) == 1 and not args.json:
        _stream(args, model, tokenizer, prompts[0], sampling)
    else:
        _batch(args, model, tokenizer, prompts, sampling)
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts from the options, or stdin; refuses empty ones."""
    if args.prompt is not None:
        prompts = [options.user_text(text) for text in args.prompt]
    elif args.file is not None:
        prompts = [options.read_text(args.file, "--file")]
    elif sys.stdin is not None and not sys.stdin.isatty():
        prompts = [options.read_text("-", "stdin")]
    else:
        raise options.UsageError(
            "generate: there is no prompt.\n"
            "It needs text to continue.\n"
            "Give --prompt TEXT or --file FILE, or pipe text in."
        )
    if not all(prompts):
        raise options.UsageError(
            "generate: a prompt is empty.\n"
            "It must hold at least one character.\n"
            "Give a word or a newline to begin with."
        )
    return prompts


def sampling_config(args: argparse.Namespace) -> SamplingConfig:
    """What the options ask for; --greedy excludes the options that need chance."""
    from statescan.generation import SamplingConfig

    given = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.greedy and given:
        first = next(iter(given)).replace("_", "-")
        raise options.UsageError(
            f"generate: --greedy and --{first} were both given.\n"
            "--greedy leaves nothing to chance.\n"
            "Leave one of them out."
        )
    given.setdefault("temperature", 0.0 if args.greedy else 0.7)
    if args.repetition_penalty is not None:
        given["repetition_penalty"] = args.repetition_penalty
    # A seed of our own rather than none, so that every text can be made again.
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    return SamplingConfig(seed=seed, **given)


def load(directory: str | None, device: str) -> tuple[MambaLM, ByteTokenizer]:
    """The model of a folder, or the built-in one, with its tokenizer."""
    from statescan.models import ByteTokenizer, load_embedded, load_model

    where = options.torch_device(device)
    if directory is None:
        return load_embedded(device=where)
    import torch

    model = load_model(directory, device=where, dtype=torch.float32)
    if model.config.vocab_size != ByteTokenizer.vocab_size:
        raise options.UsageError(
            f"--model {directory}: the model has a vocabulary of {model.config.vocab_size}.\n"
            f"This command reads byte-level models, {ByteTokenizer.vocab_size} tokens.\n"
            "Use statescan.generation with the model's own tokenizer from Python."
        )
    return model, ByteTokenizer()


def _stream(
    args: argparse.Namespace,
    model: MambaLM,
    tokenizer: ByteTokenizer,
    prompt: str,
    sampling: SamplingConfig,
) -> None:
    from statescan.generation import stream

    start = time.perf_counter()
    if args.echo:
        render.stream(prompt)
    size = 0
    for piece in stream(
        *(model, tokenizer, prompt, args.max_new_tokens), sampling=sampling, stop=args.stop
    ):
        render.stream(piece)
        size += len(piece)
    render.stream("\n")
    seconds = time.perf_counter() - start
    render.talk(
        f"({size} characters in {seconds:.1f} s, {size / seconds:.0f} a second"
        f"{_repeat(args, sampling)})"
    )


def _batch(
    args: argparse.Namespace,
    model: MambaLM,
    tokenizer: ByteTokenizer,
    prompts: list[str],
    sampling: SamplingConfig,
) -> None:
    from statescan.generation import generate

    start = time.perf_counter()
    output = generate(
        *(model, [tokenizer.encode(prompt) for prompt in prompts], args.max_new_tokens),
        sampling=sampling,
        stop=args.stop,
        tokenizer=tokenizer,
    )
    seconds = time.perf_counter() - start
    texts = output.texts or []
    tokens = sum(len(row) for row in output.tokens)
    if args.json:
        columns = zip(prompts, texts, map(len, output.tokens), output.finish_reasons)
        results = [dict(zip(("prompt", "text", "tokens", "finish_reason"), row)) for row in columns]
        render.document(
            "generate",
            {"model": args.model, "sampling": asdict(sampling), "results": results}
            | {"seconds": seconds, "tokens_per_second": tokens / seconds},
        )
        return
    for number, (prompt, text) in enumerate(zip(prompts, texts), 1):
        render.say(f"--- {number} of {len(prompts)}")
        render.stream(f"{prompt}{text}\n" if args.echo else f"{text}\n")
    render.talk(
        f"({tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s"
        f"{_repeat(args, sampling)})"
    )


def _repeat(args: argparse.Namespace, sampling: SamplingConfig) -> str:
    """How to get this text again, when chance had a part in it."""
    if args.seed is not None or sampling.temperature == 0:
        return ""
    return f"; --seed {sampling.seed} repeats it"
