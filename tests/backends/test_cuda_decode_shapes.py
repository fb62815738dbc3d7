# SPDX-License-Identifier: Apache-2.0
"""Every instance of the decode kernels, run by ``helpers/simt.h``, at the edges of what it takes.

Each test says which instance must run; together they say all of the tables.
"""

from __future__ import annotations

import pytest
import torch
from helpers import simt
from helpers.differential import check_update
from helpers.op_inputs import state_inputs, taps_inputs

from statescan.backends.cuda import selective_state_update as launcher
from statescan.backends.cuda import tables

pytestmark = [
    pytest.mark.skipif(simt.COMPILER is None, reason="needs g++ or clang++"),
    pytest.mark.usefixtures("guarded"),
]

STATE, TAPS = "selective_state_update", "causal_conv1d_update"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAIRS = tables.selective_state_update.PAIRS
STATE_LENS = (3, 4, 6)
ALL_PAIRS = [(state, activation) for state in DTYPES for activation in DTYPES]
ANY_VECTORS = {3: 1, 130: 8}
"""By dstate, the vectors of a lane in instances for any call."""


def check(simulated, kwargs, instance, op=STATE):
    before = len(simulated.calls)
    check_update(op, kwargs, "cuda")
    (found,) = simulated.calls[before:]
    assert found[:2] == (op, instance)
    return found[2]


def typed(kwargs, state):
    """States in a dtype of their own; D and dt_bias in float32, as models have them."""
    full = {name: kwargs[name].float() for name in ("D", "dt_bias")}
    return kwargs | full | {"ssm_state": kwargs["ssm_state"].to(DTYPES[state])}


def one_a_head(kwargs):
    """dt, A, D and dt_bias expanded from one number a head, as Mamba-2 calls."""
    names = [name for name in ("dt", "D", "dt_bias") if name in kwargs]
    shared = {name: kwargs[name][..., :1].expand(kwargs[name].shape) for name in names}
    return kwargs | shared | {"A": kwargs["A"][:, :1, :1].expand(kwargs["A"].shape)}


@pytest.mark.parametrize(("state", "activation"), PAIRS)
@pytest.mark.parametrize(
    ("dim", "dstate", "ngroups"), [(4, 4, None), (37, 16, None), (24, 12, 3), (9, 128, None)]
)
def test_channels_road(state, activation, dim, dstate, ngroups, simulated):
    """Fewer channels than a warp has, more, several heads, and lanes without states."""
    kwargs = state_inputs(3, dim, dstate, ngroups=ngroups, dtype=DTYPES[activation])
    check(simulated, typed(kwargs, state), f"{state}_{activation}_channels")


@pytest.mark.parametrize(("state", "activation"), PAIRS)
@pytest.mark.parametrize(("heads", "dstate"), [((2, 5), 64), ((1, 37), 128), ((3, 2), 512)])
def test_heads_road(state, activation, heads, dstate, simulated):
    kwargs = state_inputs(3, dstate=dstate, heads=heads, ngroups=1, dtype=DTYPES[activation])
    check(simulated, one_a_head(typed(kwargs, state)), f"{state}_{activation}_heads")


@pytest.mark.parametrize("road", ["channels", "heads"])
@pytest.mark.parametrize("options", ["", "D", "z dt_bias"])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_a_block_walks_over(road, options, rows, simulated, monkeypatch):
    """Of seven rows a warp has several; what it keeps between them must be each row's own."""
    monkeypatch.setattr(launcher, "_MOST_ROWS", rows)
    heads, dstate = (None, 16) if road == "channels" else ((2, 3), 64)
    kwargs = state_inputs(7, 6, dstate, heads=heads, ngroups=1 if heads else None, options=options)
    kwargs = kwargs if heads is None else one_a_head(kwargs)
    grid = check(simulated, kwargs, f"float32_float32_{road}")
    assert grid[1] == rows


@pytest.mark.parametrize("road", ["channels", "heads"])
def test_slots_and_padding(road, simulated):
    heads, dstate = (None, 16) if road == "channels" else ((2, 3), 64)
    kwargs = state_inputs(4, 6, dstate, heads=heads, ngroups=1 if heads else None, slots=6)
    kwargs = kwargs if heads is None else one_a_head(kwargs)
    kwargs |= {"state_batch_indices": torch.tensor([5, -1, 0, 2], dtype=torch.int32)}
    check(simulated, kwargs, f"float32_float32_{road}")


@pytest.mark.parametrize("spoiled", ["dt", "D", "dt_bias", "A"])
def test_heads_whose_channels_differ_take_the_road_of_channels(spoiled, simulated):
    kwargs = state_inputs(2, dstate=64, heads=(2, 3), ngroups=1)
    kwargs = one_a_head(kwargs) | {spoiled: kwargs[spoiled]}
    check(simulated, kwargs, "float32_float32_channels")


@pytest.mark.parametrize(("state", "activation"), ALL_PAIRS)
@pytest.mark.parametrize("dstate", ANY_VECTORS)
def test_any_call(state, activation, dstate, simulated):
    """States that fill no vectors; then formats are known at run time only."""
    kwargs = state_inputs(2, 3, dstate, dtype=DTYPES[activation])
    check(simulated, typed(kwargs, state), f"{state}_any{ANY_VECTORS[dstate]}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_len", STATE_LENS)
@pytest.mark.parametrize(("batch", "dim"), [(1, 4), (5, 8), (3, 7)])
def test_taps(dtype, state_len, batch, dim, simulated):
    kwargs = taps_inputs(batch, dim, 4, state_len=state_len, dtype=DTYPES[dtype])
    dense = state_len in (3, 4) and dim % 4 == 0
    check(simulated, kwargs, f"{dtype}_columns{state_len}" if dense else "any", TAPS)


def test_all_instances_are_said_above():
    """Processes that share the tests see only some of the launches, so names are compared."""
    roads = {f"{state}_{x}_{road}" for state, x in PAIRS for road in ("channels", "heads")}
    roads |= {f"{state}_any{vectors}" for state in DTYPES for vectors in ANY_VECTORS.values()}
    assert roads == set(tables.kernel(STATE).by_suffix)
    dense = {f"{dtype}_columns{count}" for dtype in DTYPES for count in STATE_LENS[:2]}
    assert dense | {"any"} == set(tables.kernel(TAPS).by_suffix)
