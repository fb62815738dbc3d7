# SPDX-License-Identifier: Apache-2.0
"""Every instance of the convolution kernels, run by ``helpers/simt.h``, over rows long enough.

The roads have loops in which nothing is asked; lengths are such that these run, begin and end at
every place of a vector. Each test says which instance must run, and together they say all.
"""

from __future__ import annotations

import pytest
import torch
from helpers import simt
from helpers.differential import check_sequence
from helpers.op_inputs import conv_inputs

from statescan.backends.cuda import tables

pytestmark = [
    pytest.mark.skipif(simt.COMPILER is None, reason="needs g++ or clang++"),
    pytest.mark.usefixtures("guarded"),
]

OP = "causal_conv1d"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATES = ("bias", "bias initial_states")


def check(simulated, kwargs, instance, backward=("sums",)):
    before = len(simulated.calls)
    check_sequence(OP, kwargs, "cuda", ill_conditioned=True)
    found = {call[:2] for call in simulated.calls[before:]}
    wanted = {(f"{OP}_fwd", instance)} | {(f"{OP}_bwd", name) for name in (instance, *backward)}
    assert {call for call in found if call[0] != "sequence_marks"} == wanted


def channel_last(kwargs):
    return kwargs | {"x": kwargs["x"].transpose(1, 2).contiguous().transpose(1, 2)}


def shifted(tensor, by):
    """The same numbers, the first of them ``by`` numbers behind an aligned address."""
    room = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    return room[by:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 2, 7])
@pytest.mark.parametrize("seqlen", [256, 520, 1031])
def test_rows(dtype, width, seqlen, simulated):
    """One pass of a warp, one and a bit, and odd rows, each of which begins elsewhere."""
    taps = 4 if width == 4 else 8
    kwargs = conv_inputs(2, 3, seqlen, width, dtype=DTYPES[dtype])
    for reverse in (False, True):
        check(simulated, kwargs | {"reverse": reverse}, f"rows_{dtype}_taps{taps}")


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("rest", [0, 1, 2, 3, 5, 7])
def test_rows_that_begin_and_end_anywhere(options, reverse, activation, rest, simulated):
    kwargs = conv_inputs(1, 2, 512 + rest, options=options, activation=activation)
    kwargs |= {"x": shifted(kwargs["x"], 8 - rest), "reverse": reverse}
    check(simulated, kwargs, "rows_float32_taps4")


@pytest.mark.parametrize("seqlen", [300, 530])
@pytest.mark.parametrize("layout", ["rows", "walk"])
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_rows(layout, seqlen, reverse, simulated):
    kwargs = conv_inputs(2, 2, seqlen, num_states=None, dtype=torch.bfloat16)
    ends = torch.tensor([5, 260, 261, seqlen])
    ids = torch.searchsorted(ends, torch.arange(seqlen), right=True).to(torch.int32)
    kwargs |= {"seq_idx": ids.expand(2, -1).contiguous(), "reverse": reverse}
    kwargs = channel_last(kwargs) if layout == "walk" else kwargs
    check(simulated, kwargs, f"{layout}_bfloat16_taps4")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 3, 8])
@pytest.mark.parametrize("seqlen", [31, 100, 290])
def test_walk(dtype, width, seqlen, simulated):
    """Stretches that end amid a batch of steps, several stretches, and less than one."""
    taps = 4 if width == 4 else 8
    kwargs = channel_last(conv_inputs(2, 4, seqlen, width, dtype=DTYPES[dtype]))
    for reverse in (False, True):
        check(simulated, kwargs | {"reverse": reverse}, f"walk_{dtype}_taps{taps}")


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("seqlen", [33, 40, 65, 66, 67, 71])
def test_walks_that_end_anywhere(options, reverse, activation, seqlen, simulated):
    kwargs = channel_last(conv_inputs(1, 2, seqlen, options=options, activation=activation))
    check(simulated, kwargs | {"reverse": reverse}, "walk_float32_taps4")


@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_no_layout(dtype, width, simulated):
    kwargs = conv_inputs(2, 6, 140, width, dtype=DTYPES[dtype])
    wide = torch.zeros(2, 6, 280, dtype=DTYPES[dtype])[..., ::2].copy_(kwargs["x"])
    check(simulated, kwargs | {"x": wide}, "walk_any")


def test_more_taps_than_registers(simulated):
    check(simulated, conv_inputs(2, 3, 70, 11), "any")


def test_all_instances_are_said_above():
    """Processes that share the tests see only some of the launches, so names are compared."""
    said = {
        f"{road}_{dtype}_taps{n}" for road in ("rows", "walk") for dtype in DTYPES for n in (4, 8)
    }
    said |= {"walk_any", "any"}
    assert said == set(tables.kernel(f"{OP}_fwd").by_suffix)
    assert said | {"sums"} == set(tables.kernel(f"{OP}_bwd").by_suffix)
