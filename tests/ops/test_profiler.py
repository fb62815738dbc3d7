# SPDX-License-Identifier: Apache-2.0
"""What measuring tools see: names in the profiler and in grad_fn, operation counts.

Times are never asserted.
"""

from __future__ import annotations

import pytest
import torch
from helpers.differential import leaves_of
from helpers.integration import SEQUENCE_OPS, UPDATES, as_tuple, child, make, public, weigh
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

CASES = {
    "selective_scan": "usual",
    "causal_conv1d": "bias_silu",
    "mamba_inner": "usual",
    "selective_state_update": "usual",
    "causal_conv1d_update": "bias_silu",
}


def train(op):
    kwargs = make(op, CASES[op])
    weigh(public(op)(**{**kwargs, **leaves_of(kwargs)})).backward()


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_names_in_the_profiler(op):
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        train(op)
    names = {event.key for event in trace.key_averages()}
    wanted = {f"statescan::{op}_fwd", f"statescan::{op}_bwd", f"{op}", f"{op}Backward"}
    assert wanted <= names, sorted(name for name in names if op in name)


@pytest.mark.parametrize("op", UPDATES)
def test_names_of_updates_in_the_profiler(op):
    with profile(activities=[ProfilerActivity.CPU]) as trace, torch.no_grad():
        public(op)(**make(op, "bare"))
    assert f"statescan::{op}" in {event.key for event in trace.key_averages()}


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_name_of_the_graph_node(op):
    kwargs = make(op, CASES[op])
    result = as_tuple(public(op)(**{**kwargs, **leaves_of(kwargs)}))[0]
    assert result.grad_fn.name() == f"{op}Backward"


def count(op, name=None, backward=False):
    with FlopCounterMode(display=False) as counter:
        if backward:
            train(op)
        else:
            with torch.no_grad():
                public(op)(**make(op, name or CASES[op]))
    counts = counter.get_flop_counts()["Global"]
    return {str(key).removeprefix("statescan."): value for key, value in counts.items()}


# batch 2, dim 4, seqlen 17, dstate 4: 136 tokens; D and z.
SCAN = 7 * 136 * 4 + 136 * (1 + 2 + 1)
# batch 2, dim 6, seqlen 17, width 4: 204 tokens.
CONV = 2 * 204 * 4
# batch 2, dim 6, seqlen 11, dt_rank 3, dstate 4, width 4, d_model 5: 132 tokens in 22 columns.
INNER_PROJECTIONS = 22 * (11 * 6 + 6 * 3 + 5 * 6)
INNER_CONV = 2 * 132 * 4


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        ("selective_scan", SCAN, 20 * 136 * 4 + 2 * 136 * 4),
        ("causal_conv1d", CONV, 3 * CONV),
        (
            "mamba_inner",
            INNER_CONV + 2 * INNER_PROJECTIONS + 7 * 132 * 4 + 132 * 4,
            3 * INNER_CONV + 4 * INNER_PROJECTIONS + 20 * 132 * 4 + 2 * 132 * 4,
        ),
    ],
)
def test_operation_counts(op, forward, backward):
    assert count(op) == {f"{op}_fwd": forward}
    counts = count(op, backward=True)
    assert {key: counts[key] for key in (f"{op}_fwd", f"{op}_bwd")} == {
        f"{op}_fwd": forward,
        f"{op}_bwd": backward,
    }


def test_operation_counts_follow_the_options():
    tokens = 2 * 4 * 17
    assert count("selective_scan", "bare") == {"selective_scan_fwd": 7 * tokens * 4 + tokens}
    assert count("causal_conv1d", "width_1") == {"causal_conv1d_fwd": 2 * 204}


def test_operation_counts_of_updates():
    # batch 3, dim 6, dstate 4 and width 4.
    assert count("selective_state_update") == {"selective_state_update": 7 * 18 * 4 + 18 * 4}
    assert count("causal_conv1d_update") == {"causal_conv1d_update": 2 * 18 * 4}
    headed = count("selective_state_update", "headed_several")
    tokens = 3 * 3 * 4 * 3
    assert headed == {"selective_state_update": 7 * tokens * 4 + tokens * 4}


@pytest.mark.parametrize("first", ["statescan.ops", "torch.utils.flop_counter"])
def test_formulas_are_there_whatever_is_imported_first(first):
    """The counter loads Triton, so statescan does not import it; its formulas wait for it."""
    code = f"""
import importlib, sys, torch
importlib.import_module({first!r})
if {first!r} == "statescan.ops":
    assert "torch.utils.flop_counter" not in sys.modules
import statescan
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    statescan.causal_conv1d(torch.ones(1, 2, 3), torch.ones(2, 2))
print(counter.get_total_flops())
"""
    assert child(code) == "24\n"
