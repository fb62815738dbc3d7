# SPDX-License-Identifier: Apache-2.0
"""``statescan explain``: which backend would run a call and why, or a page of the doctor's codes.

The decision is taken in ``dispatch``, and the pages are made in ``_explain_problem``; only the
description of the call is put together here.
"""

from __future__ import annotations

import argparse
from typing import Any

from statescan.backends.base import ALL_OPS, OpRequest
from statescan.cli import options, render

_SEQUENCE = ("initial_states", "seq_idx", "cu_seqlens", "reverse")
_SCAN = ("D", "z", "dt_bias", "dt_softplus", "complex")
_DECODE = ("intermediate_states", "num_accepted_tokens")

FLAGS: dict[str, tuple[str, ...]] = {
    "selective_scan": (*_SCAN, *_SEQUENCE),
    "selective_state_update": (
        *(*_SCAN, "state_batch_indices", "dst_state_batch_indices"),
        *_DECODE,
    ),
    "causal_conv1d": ("bias", "silu", *_SEQUENCE),
    "causal_conv1d_update": (
        *("bias", "silu", "cache_seqlens", "conv_state_indices", "dst_conv_state_indices"),
        *_DECODE,
    ),
    "mamba_inner": (
        *("B", "C", "D", "dt_bias", "dt_softplus", "complex", "silu", "conv_bias"),
        *("b_proj_bias", "c_proj_bias", "out_proj_weight", "out_proj_bias"),
        *("b_norm_weight", "c_norm_weight", "dt_norm_weight", "conv_initial_states"),
        *_SEQUENCE,
    ),
}
"""Options of each op that a backend may refuse, by the names of requests."""

SIZES: dict[str, tuple[str, ...]] = {
    "selective_scan": ("batch", "dim", "seqlen", "dstate"),
    "selective_state_update": ("batch", "dim", "nheads", "headdim", "dstate", "ntokens"),
    "causal_conv1d": ("batch", "dim", "seqlen", "width"),
    "causal_conv1d_update": ("batch", "dim", "width", "state_len", "ntokens"),
    "mamba_inner": ("batch", "dim", "seqlen", "dstate", "width", "dt_rank"),
}
"""Sizes of each op, by the names of requests."""


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "explain", execute),
        "Show which backend would run a call, or what a code of the doctor means.",
        "With an op, give what is special about the call: which backend would run it and why no\n"
        "other is shown, and nothing is computed. Exit code 1 when no backend, or not the forced\n"
        "one, can run it. With a code or name of the doctor, or a piece of advice found on the\n"
        "web: what it means, what causes it, what to type, and what not to follow.\n\n"
        "example: statescan explain selective_scan --dtype bf16 --dstate 16 --reverse\n"
        "example: statescan explain TK101",
    )
    parser.usage = (
        "statescan explain OP [--device TYPE] [--dtype NAME] [--backend NAME]\n"
        "                         [--SIZE N ...] [--OPTION ...] [--json] [-v] [-h]\n"
        "       statescan explain CODE [--shell NAME] [--json]\n"
        "       statescan explain --list [--json]"
    )
    parser.add_argument(
        *("op",),
        nargs="?",
        metavar="OP|CODE",
        help=f"{', '.join(ALL_OPS)}; or a code or name of the doctor (TK101, nvcc-missing, ADV003)",
    )
    parser.add_argument("--list", action="store_true", help="list all codes of the doctor")
    parser.add_argument(
        *("--shell",),
        choices=("bash", "powershell", "cmd"),
        help="for a code: write commands for this shell (default: the system's usual one)",
    )
    parser.add_argument(
        *("--device",), default="cpu", metavar="TYPE", help="cpu, cuda, ... (default: cpu)"
    )
    parser.add_argument(
        *("--dtype",),
        type=options.dtype_name,
        default="float32",
        metavar="NAME",
        help="of the activations: float32, bfloat16, float16, float64 (default: float32)",
    )
    parser.add_argument(
        *("--backend",), default="auto", metavar="NAME", help="as backend= in the call"
    )
    options.add_json(parser)
    sizes = parser.add_argument_group("sizes of the call")
    for name in _every(SIZES):
        sizes.add_argument(_option(name), dest=name, type=options.natural_int, metavar="N")
    flags = parser.add_argument_group("options that the call uses, each where its op has it")
    for name in _every(FLAGS):
        having = [op for op, names in FLAGS.items() if name in names]
        help_text = "" if len(having) > 2 else f"of {', '.join(having)}"
        flags.add_argument(_option(name), dest=f"flag_{name}", action="store_true", help=help_text)


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.list or args.op not in ALL_OPS:
        return _execute_code(args)
    if args.shell:
        raise options.UsageError(
            f"explain: --shell is given for the op {args.op}.\n"
            "It belongs to codes of the doctor, whose pages show commands.\n"
            "Leave it out, or give a code."
        )
    return _execute_op(args)


def _execute_code(args: argparse.Namespace) -> int:
    """Print a page of the doctor's catalogue, or the list of its codes."""
    from statescan.cli import _explain_problem

    if args.op is None and not args.list:
        raise options.UsageError(
            "explain: nothing to explain is named.\n"
            f"It must be an op ({', '.join(ALL_OPS)}), or a code of the doctor such as TK101.\n"
            "`statescan explain --list` lists all codes."
        )
    given = [_option(name) for name in _every(SIZES) if getattr(args, name) is not None]
    given += [_option(name) for name in _every(FLAGS) if getattr(args, f"flag_{name}")]
    if given:
        raise options.UsageError(
            f"explain: {given[0]} is given without one of the ops that have it.\n"
            f"The ops are {', '.join(ALL_OPS)}.\n"
            "Name one of them, or leave the option out."
        )
    return _explain_problem.execute(args)


def _execute_op(args: argparse.Namespace) -> int:
    from statescan.dispatch import explain_request

    request = build_request(args)
    explanation = explain_request(request, args.backend)
    if args.json:
        rows = [
            {"backend": row.backend, "chosen": row.chosen, "reason": row.reason}
            for row in explanation.rows
        ]
        described = {
            "op": request.op,
            "device": request.device,
            "dtypes": dict(request.dtypes),
            "sizes": dict(request.dims),
            "options": sorted(request.flags),
            "backend_argument": args.backend,
        }
        render.document(
            "explain",
            {"request": described, "chosen": explanation.chosen or None, "backends": rows},
        )
    else:
        render.wrap(_described(request))
        render.say()
        cells = [(r.backend, "chosen" if r.chosen else "-", r.reason) for r in explanation.rows]
        render.table(("backend", "", "reason"), cells)
    if not explanation.chosen:
        render.error(f"no backend would run this {request.op}")
        return 1
    return 0


def build_request(args: argparse.Namespace) -> OpRequest:
    """The call that the options describe; refuses options that the op does not have."""
    sizes = {name: getattr(args, name) for name in _every(SIZES)}
    given = {name: value for name, value in sizes.items() if value is not None}
    flags = {name for name in _every(FLAGS) if getattr(args, f"flag_{name}")}
    for used, known in ((given, SIZES[args.op]), (flags, FLAGS[args.op])):
        unknown = sorted(set(used) - set(known))
        if unknown:
            raise options.UsageError(
                f"explain: {args.op} has no {_option(unknown[0])}.\n"
                f"It has {', '.join(_option(name) for name in known)}.\n"
                "Leave the option out, or name another op."
            )
    if {"seq_idx", "cu_seqlens"} <= flags:
        raise options.UsageError(
            "explain: --seq-idx and --cu-seqlens are both given.\n"
            "One of them says where sequences begin, and a call with both is refused.\n"
            "Leave one of them out."
        )
    dtypes = {"x": args.dtype}
    if "complex" in flags:
        wide = "complex128" if args.dtype == "float64" else "complex64"
        dtypes |= dict.fromkeys(("A", "B", "C"), wide)
    return OpRequest(args.op, _device_type(args.device), dtypes, given, frozenset(flags))


def _device_type(name: str) -> str:
    """The type in a device's name; the device need not be there, but torch must know the type."""
    import torch

    try:
        return torch.device(name).type
    except RuntimeError as error:
        raise options.UsageError(
            f"explain: --device {name!r} is no device of this torch ({torch.__version__}).\n"
            "It must be a type such as cpu or cuda, which need not be in this machine.\n"
            "Leave --device out for the CPU."
        ) from error


def _described(request: OpRequest) -> str:
    facts: list[Any] = [", ".join(dict.fromkeys(request.dtypes.values()))]
    facts += [f"{name} {size}" for name, size in request.dims.items()]
    text = f"{request.op} on {request.device}: {', '.join(facts)}"
    return f"{text}; with {', '.join(sorted(request.flags))}" if request.flags else text


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _every(table: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names of all rows, each once, in order."""
    return tuple(dict.fromkeys(name for names in table.values() for name in names))
