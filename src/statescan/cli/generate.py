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
    from statescan.models import ByteTokenizer, MambaLM, TextTokenizer

    Tokenizer = ByteTokenizer | TextTokenizer

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "generate", execute, "Continue prompts with a model."),
        "Without --prompt and --file the prompt is read from stdin. Only the new text goes to\n"
        "stdout, piece by piece for one prompt, under a line with its number for several.\n"
        "--model takes folders and hub ids, in state-spaces' layout or in transformers'. The\n"
        "original state-spaces checkpoints bring no tokenizer.json; theirs is EleutherAI's:\n\n"
        '  statescan generate --prompt "In the beginning" --seed 1\n'
        "  statescan generate --model state-spaces/mamba-130m --tokenizer EleutherAI/gpt-neox-20b",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; repeat for a batch"
    )
    prompts.add_argument(
        "--file", metavar="FILE", help='file whose content is the prompt, "-" for stdin'
    )
    _add_model(parser)
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


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR|ID",
        help="folder of a checkpoint, or its id on the Hugging Face hub (default: built in)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR|FILE|ID",
        help="where tokenizer.json is, if not beside the model",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of --model's id")
    parser.add_argument(
        *("--dtype",),
        type=options.dtype_name,
        default="float32",
        metavar="NAME",
        help="of the weights; the state space stays float32 (default: float32)",
    )


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
    model, tokenizer = load(args)
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


def load(args: argparse.Namespace) -> tuple[MambaLM, Tokenizer]:
    """The model that the options name, or the built-in one, with its tokenizer."""
    import torch

    from statescan.models import load_embedded, load_model

    device, dtype = options.torch_device(args.device), getattr(torch, args.dtype)
    if args.model is not None:
        model = load_model(args.model, device=device, dtype=dtype, revision=args.revision)
        return model, _tokenizer(args, model)
    for name in ("tokenizer", "revision"):
        if getattr(args, name) is not None:
            raise options.UsageError(
                f"generate: --{name} was given without --model.\n"
                "The built-in model reads bytes and comes with statescan.\n"
                f"Give --model too, or leave --{name} out."
            )
    return load_embedded(device=device, dtype=dtype)


def _tokenizer(args: argparse.Namespace, model: MambaLM) -> Tokenizer:
    """tokenizer.json where there is one; bytes for a byte-level model without."""
    from statescan.models import ByteTokenizer, load_tokenizer
    from statescan.models.hub import why_offline
    from statescan.models.text_tokenizer import NEOX, find_tokenizer

    size = model.config.vocab_size
    if args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer)
    else:
        found = find_tokenizer(args.model, revision=args.revision)
        if found is None and size == ByteTokenizer.vocab_size:
            return ByteTokenizer()
        if found is None:
            raise options.UsageError(
                f"--model {args.model}: a vocabulary of {size} and no tokenizer.json"
                f"{why_offline(args.model)}.\n"
                f"Only byte-level models, {ByteTokenizer.vocab_size} tokens, need none.\n"
                f"Give --tokenizer DIR, FILE or ID; state-spaces' own models use {NEOX}."
            )
        tokenizer = found
    if tokenizer.vocab_size > size:
        raise options.UsageError(
            f"generate: the tokenizer has {tokenizer.vocab_size} tokens, the model {size}.\n"
            "A tokenizer must not know tokens that the model lacks.\n"
            "Give the tokenizer that the model was trained with by --tokenizer."
        )
    return tokenizer


def _eos(model: MambaLM, tokenizer: Tokenizer) -> int | list[int] | None:
    """What ends a text: the checkpoint's word, else the tokenizer's; nothing for bytes."""
    if model.config.eos_token_id is not None:
        return model.config.eos_token_id
    return getattr(tokenizer, "eos_token_id", None)


def _stream(
    args: argparse.Namespace,
    model: MambaLM,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: SamplingConfig,
) -> None:
    from statescan.generation import stream

    start = time.perf_counter()
    if args.echo:
        render.stream(prompt)
    size = 0
    pieces = stream(
        *(model, tokenizer, prompt, args.max_new_tokens),
        sampling=sampling,
        eos_token_id=_eos(model, tokenizer),
        stop=args.stop,
    )
    for piece in pieces:
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
    tokenizer: Tokenizer,
    prompts: list[str],
    sampling: SamplingConfig,
) -> None:
    from statescan.generation import generate

    start = time.perf_counter()
    output = generate(
        *(model, [tokenizer.encode(prompt) for prompt in prompts], args.max_new_tokens),
        sampling=sampling,
        eos_token_id=_eos(model, tokenizer),
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
