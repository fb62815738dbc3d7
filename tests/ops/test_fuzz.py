# SPDX-License-Identifier: Apache-2.0
"""Random sizes, options, layouts and dtypes of every op against the reference, for a few seconds.

The cases are the same on every run; raise STEPS for more of them.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.differential import check_sequence, check_update
from helpers.layouts import DISTINCT, LAYOUTS, lay_out
from helpers.op_inputs import (
    Draw,
    Kwargs,
    conv_inputs,
    inner_inputs,
    scan_inputs,
    state_inputs,
    taps_inputs,
)

pytestmark = pytest.mark.usefixtures("nan_empty")

STEPS = 40
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (0, 1, 2, 3, 7, 16, 33, 63, 64, 65, 130)
WRITTEN = ("ssm_state", "conv_state", "intermediate_states", "out")


def some(draw: Draw, *names: str) -> str:
    return " ".join(name for name in names if draw.integer(0, 1))


def pack(draw: Draw, kwargs: Kwargs, batch: int, seqlen: int) -> Kwargs:
    """Random seq_idx with padding and repeated ids, or nothing."""
    kwargs = kwargs | {"reverse": bool(draw.integer(0, 1))}
    if draw.integer(0, 1):
        longest = draw.choice((1, 2, 5, 40))
        rows = []
        for _ in range(batch):
            row: list[int] = []
            while len(row) < seqlen:
                row += [draw.integer(-2, 2)] * draw.integer(1, longest)
            rows.append(row[:seqlen])
        kwargs["seq_idx"] = torch.tensor(rows, dtype=torch.int64).view(batch, seqlen)
        pads = kwargs["seq_idx"] < 0
        for name in ("x", "dt", "z", "B", "C", "xz"):
            value = kwargs.get(name)
            if value is not None and value.dim() > 2:
                mask = pads.view(batch, *[1] * (value.dim() - 2), seqlen)
                kwargs[name] = torch.where(mask, math.nan, value)
    return kwargs


def bounds(draw: Draw, seqlen: int) -> torch.Tensor:
    inner = sorted(draw.integer(0, seqlen) for _ in range(draw.integer(0, 4)))
    return torch.tensor([0, *inner, seqlen], dtype=draw.choice((torch.int32, torch.int64)))


def scatter(draw: Draw, kwargs: Kwargs, layouts: tuple[str, ...] = LAYOUTS) -> Kwargs:
    """Each tensor in a layout and, now and then, a dtype of its own."""
    mixed = draw.integer(0, 3) == 0
    result = {}
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor):
            result[name] = value
            continue
        if mixed and value.is_floating_point() and value.dtype != torch.float64:
            value = value.to(draw.choice(DTYPES[:4]))
        if not value.is_floating_point() and not value.is_complex():
            result[name] = value
            continue
        result[name] = lay_out(value, draw.choice(DISTINCT if name in WRITTEN else layouts))
    return result


def options_of_a_scan(draw: Draw) -> Kwargs:
    batch, dim, dstate = (
        draw.integer(0, 3),
        draw.choice((0, 1, 2, 4, 6, 12, 70)),
        draw.choice((1, 2, 3, 7, 16, 40)),
    )
    seqlen = draw.choice(LENGTHS if dim < 20 else LENGTHS[:6])
    groups = draw.choice([None, *[n for n in (1, 2, 3, 6, 35) if dim % n == 0]])
    packed = draw.integer(0, 3) == 0
    cu_seqlens = bounds(draw, seqlen)
    states = len(cu_seqlens) - 1 if packed else None
    kwargs = scan_inputs(
        1 if packed else batch, dim, seqlen, dstate, ngroups=groups,
        constant=draw.choice(("", "", "B", "C", "BC")),
        is_complex=draw.integer(0, 3) == 0, num_states=states, dtype=draw.choice(DTYPES),
        seed=draw.integer(0, 10**6), options=some(draw, "D", "z", "dt_bias", "initial_states"),
    )  # fmt: skip
    if packed:
        return kwargs | {"cu_seqlens": cu_seqlens, "reverse": bool(draw.integer(0, 1))}
    return pack(draw, kwargs, batch, seqlen)


def options_of_a_convolution(draw: Draw) -> Kwargs:
    batch, dim, width = (
        draw.integer(0, 3),
        draw.choice((0, 1, 2, 5, 8, 9, 70)),
        draw.choice((1, 2, 3, 4, 4, 9)),
    )
    seqlen, packed = draw.choice(LENGTHS), draw.integer(0, 3) == 0
    cu_seqlens = bounds(draw, seqlen)
    kwargs = conv_inputs(
        1 if packed else batch, dim, seqlen, width,
        num_states=len(cu_seqlens) - 1 if packed else None, dtype=draw.choice(DTYPES),
        seed=draw.integer(0, 10**6), options=some(draw, "bias", "initial_states"),
        activation=draw.choice((None, "silu", "swish")),
    )  # fmt: skip
    if packed:
        return kwargs | {"cu_seqlens": cu_seqlens, "reverse": bool(draw.integer(0, 1))}
    return pack(draw, kwargs, batch, seqlen)


def options_of_an_inner_block(draw: Draw) -> Kwargs:
    batch, seqlen = draw.integer(0, 3), draw.choice(LENGTHS[:9])
    constant = draw.choice(("", "", "B", "C", "BC"))
    names = [
        "conv_bias",
        "D",
        "dt_bias",
        "out_proj_weight",
        "dt_norm_weight",
        "conv_initial_states",
        "initial_states",
    ]
    names += [
        f"{part.lower()}_{kind}"
        for part in "BC"
        if part not in constant
        for kind in ("proj_bias", "norm_weight")
    ]
    options = some(draw, *names)
    if "out_proj_weight" in options:
        options += f" {some(draw, 'out_proj_bias')}"
    kwargs = inner_inputs(
        batch, draw.choice((2, 5, 16)), seqlen, draw.choice((2, 3, 5)), draw.choice((1, 2, 4)),
        draw.integer(2, 3),
        draw.integer(1, 6), constant=constant, is_complex=draw.integer(0, 3) == 0,
        dtype=draw.choice((torch.float32, torch.float64)), seed=draw.integer(0, 10**6),
        options=options,
    )  # fmt: skip
    return pack(draw, kwargs | {"activation": draw.choice((None, "silu"))}, batch, seqlen)


def slots_of(draw: Draw, batch: int, slots: int, name: str) -> Kwargs:
    """Reads that may repeat, writes that may not, padding among both."""
    read = [draw.integer(-1, slots - 1) for _ in range(batch)]
    free = list(range(slots))
    write = [
        free.pop(draw.integer(0, len(free) - 1)) if draw.integer(0, 3) else -7 for _ in range(batch)
    ]
    found = {f"dst_{name}": torch.tensor(write, dtype=torch.int64)}
    return found | {
        name: torch.tensor(read, dtype=torch.int32),
        "pad_slot_id": draw.integer(-2, slots),
    }


def options_of_a_step(draw: Draw, op: str) -> Kwargs:
    batch, ntokens = draw.integer(0, 4), draw.choice((None, 0, 1, 2, 5))
    slots = draw.choice((None, batch + 3))
    kept = draw.choice((None, (1 if ntokens is None else ntokens) + draw.integer(0, 2)))
    shared = {"slots": slots, "ntokens": ntokens, "kept": kept, "dtype": draw.choice(DTYPES)}
    shared["seed"] = draw.integer(0, 10**6)
    if op == "causal_conv1d_update":
        width = draw.choice((1, 2, 3, 4, 9))
        state_len = width - 1 + draw.choice((0, 0, 1, 4))
        kwargs = taps_inputs(
            batch,
            draw.choice((0, 1, 5, 12)),
            width,
            state_len=state_len,
            options=some(draw, "bias"),
            **shared,
        )
        if state_len and draw.integer(0, 1):
            kwargs["cache_seqlens"] = torch.tensor(
                [draw.integer(0, 50) for _ in range(batch)], dtype=torch.int64
            )
        name = "conv_state_indices"
    else:
        heads = draw.choice((None, (4, 3), (2, 7)))
        groups = draw.choice((None, 1, 2))
        kwargs = state_inputs(
            batch, draw.choice((2, 4, 12)), draw.choice((1, 2, 5, 16)), ngroups=groups, heads=heads,
            is_complex=draw.integer(0, 3) == 0, options=some(draw, "D", "z", "dt_bias"), **shared,
        )  # fmt: skip
        name = "state_batch_indices"
    if slots is not None:
        kwargs |= slots_of(draw, batch, slots, name)
    if kept is not None and draw.integer(0, 1):
        kwargs["num_accepted_tokens"] = torch.tensor(
            [draw.integer(0, kept) for _ in range(batch)], dtype=torch.int64
        )
    if draw.integer(0, 1):
        kwargs["out"] = torch.full_like(kwargs["x"], math.nan)
    return kwargs


SEQUENCES = {
    "selective_scan": options_of_a_scan,
    "causal_conv1d": options_of_a_convolution,
    "mamba_inner": options_of_an_inner_block,
}


@pytest.mark.parametrize("op", SEQUENCES)
@pytest.mark.parametrize("seed", range(STEPS))
def test_sequences(backend, op, seed):
    draw = Draw(seed)
    kwargs = SEQUENCES[op](draw)
    # Equal tokens would spread the NaN of padding over real ones.
    layouts = DISTINCT if "seq_idx" in kwargs else LAYOUTS
    check_sequence(op, scatter(draw, kwargs, layouts), backend, ill_conditioned=True)


@pytest.mark.parametrize("op", ["selective_state_update", "causal_conv1d_update"])
@pytest.mark.parametrize("seed", range(STEPS))
def test_steps(backend, op, seed):
    draw = Draw(seed)
    check_update(op, scatter(draw, options_of_a_step(draw, op)), backend)
