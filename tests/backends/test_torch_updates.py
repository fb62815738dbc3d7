# SPDX-License-Identifier: Apache-2.0
"""The torch backend's decode ops: aliasing, padding slots, blocks of rows, and calls of torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from statescan import ops
from statescan.backends.torch import selective_state_update as state_module
from statescan.backends.torch.causal_conv1d_update import causal_conv1d_update
from statescan.backends.torch.selective_state_update import selective_state_update
from statescan.reference import causal_conv1d_update_ref, selective_state_update_ref
from statescan.testing import all_cases, assert_close, assert_passed, run_case


@pytest.fixture
def threads():
    """Set the number of threads; the old number comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Calls(TorchDispatchMode):
    """Counts calls of torch."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def state_inputs(batch=3, dim=5, dstate=4, dtype=torch.float32):
    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    inputs = {
        "ssm_state": draw(batch, dim, dstate),
        "x": draw(batch, dim),
        "dt": draw(batch, dim),
        "A": -draw(dim, dstate).abs(),
        "B": draw(batch, dstate),
        "C": draw(batch, dstate),
    }
    options = {"D": draw(dim), "z": draw(batch, dim), "dt_bias": draw(dim), "dt_softplus": True}
    return {**inputs, **options}


def conv_inputs(batch=3, dim=5, width=4, dtype=torch.float32):
    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    return {
        "x": draw(batch, dim),
        "conv_state": draw(batch, dim, width - 1),
        "weight": draw(dim, width),
        "bias": draw(dim),
        "activation": "silu",
    }


def copies(inputs):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


@pytest.mark.parametrize("case", all_cases("selective_state_update"), ids=str)
def test_rows_in_blocks_equal_all_at_once(case, monkeypatch, nan_empty):
    monkeypatch.setattr(state_module, "_CPU_BLOCK", 1)
    assert_passed(run_case(case, torch.float64, backend="torch"))


@pytest.mark.parametrize("alias", ["x", "z", "dt"])
def test_state_update_out_may_be_an_input(alias):
    inputs = state_inputs()
    fresh = copies(inputs)
    expected = ops.selective_state_update(**fresh, backend="torch")
    out = ops.selective_state_update(**inputs, out=inputs[alias], backend="torch")
    assert out is inputs[alias]
    assert torch.equal(out, expected)
    assert torch.equal(inputs["ssm_state"], fresh["ssm_state"])


def test_conv_update_out_may_be_x():
    inputs = conv_inputs()
    fresh = copies(inputs)
    expected = ops.causal_conv1d_update(**fresh, backend="torch")
    out = ops.causal_conv1d_update(**inputs, out=inputs["x"], backend="torch")
    assert torch.equal(out, expected)
    assert torch.equal(inputs["conv_state"], fresh["conv_state"])


@pytest.mark.parametrize("ring", [False, True])
def test_conv_update_x_may_lie_in_the_state(ring):
    """Everything is read before the state is written."""
    inputs = conv_inputs()
    inputs["x"] = inputs["conv_state"][..., 0]
    if ring:
        inputs["cache_seqlens"] = torch.tensor([0, 1, 5])
    fresh = copies(inputs)
    expected = causal_conv1d_update_ref(**fresh)
    assert_close(ops.causal_conv1d_update(**inputs, backend="torch"), expected, 1e-6)
    assert torch.equal(inputs["conv_state"], fresh["conv_state"])


@pytest.mark.parametrize("block", [1, 1 << 17])
def test_state_update_inputs_may_lie_in_the_state(block, monkeypatch):
    monkeypatch.setattr(state_module, "_CPU_BLOCK", block)
    inputs = state_inputs(batch=4, dim=4, dstate=4)
    inputs["B"], inputs["x"] = inputs["ssm_state"][1], inputs["ssm_state"][2]
    fresh = copies(inputs)
    expected = selective_state_update_ref(**fresh)
    assert_close(ops.selective_state_update(**inputs, backend="torch"), expected, 1e-6)
    assert_close(inputs["ssm_state"], fresh["ssm_state"], 1e-6)


@pytest.mark.parametrize("block", [1, 1 << 17])
def test_rows_may_exchange_their_slots(block, monkeypatch):
    """A destination may be another row's source: all states are read before one is written."""
    monkeypatch.setattr(state_module, "_CPU_BLOCK", block)
    read, write = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    inputs = state_inputs()
    inputs |= {"state_batch_indices": read, "dst_state_batch_indices": write}
    fresh = copies(inputs)
    expected = selective_state_update_ref(**fresh)
    assert_close(ops.selective_state_update(**inputs, backend="torch"), expected, 1e-6)
    assert_close(inputs["ssm_state"], fresh["ssm_state"], 1e-6)
    inputs = conv_inputs()
    inputs |= {"conv_state_indices": read, "dst_conv_state_indices": write}
    fresh = copies(inputs)
    expected = causal_conv1d_update_ref(**fresh)
    assert_close(ops.causal_conv1d_update(**inputs, backend="torch"), expected, 1e-6)
    assert torch.equal(inputs["conv_state"], fresh["conv_state"])


@pytest.mark.parametrize("indices", [[-1, 3, 9, 0], [-1, -5, 9, -1]])
def test_padding_rows_read_and_write_nothing(indices):
    """9 is pad_slot_id. Slots that no real row names, and padding inputs, hold NaN."""
    real = [slot for slot in indices if slot not in (-1, -5, 9)]
    rows = [row for row, slot in enumerate(indices) if slot in real]
    for op, inputs, pool, name in (
        (ops.selective_state_update, state_inputs(batch=4), "ssm_state", "state_batch_indices"),
        (ops.causal_conv1d_update, conv_inputs(batch=4), "conv_state", "conv_state_indices"),
    ):
        padding = [row for row in range(4) if row not in rows]
        inputs["x"][padding] = math.nan
        untouched = [slot for slot in range(4) if slot not in real]
        inputs[pool][untouched] = math.nan
        inputs[name] = torch.tensor(indices)
        out = op(**inputs, pad_slot_id=9, backend="torch")
        assert not out[padding].any()
        assert out[rows].isfinite().all()
        assert inputs[pool][untouched].isnan().all()
        assert inputs[pool][real].isfinite().all()


def test_padding_rows_leave_their_intermediate_states():
    inputs = state_inputs()
    kept = torch.full((3, 1, 5, 4), math.nan)
    inputs |= {"state_batch_indices": torch.tensor([2, -1, 0]), "intermediate_states": kept}
    ops.selective_state_update(**inputs, backend="torch")
    assert kept.isnan().flatten(1).all(1).tolist() == [False, True, False]


def test_blocks_of_rows_leave_no_trace_in_states(monkeypatch):
    inputs = state_inputs(batch=33, dim=300, dstate=16)
    fresh = copies(inputs)
    expected = ops.selective_state_update(**fresh, backend="torch")
    monkeypatch.setattr(state_module, "_CPU_BLOCK", 1 << 30)
    whole = ops.selective_state_update(**inputs, backend="torch")
    assert_close(whole, expected, 1e-6)
    assert torch.equal(inputs["ssm_state"], fresh["ssm_state"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_equal_bits_for_any_number_of_threads(threads, dtype):
    inputs = state_inputs(batch=7, dim=4999, dstate=5)
    if dtype.is_complex:
        for name in ("ssm_state", "A", "B", "C"):
            inputs[name] = torch.complex(inputs[name], inputs[name].flip(-1))
    else:
        inputs |= {name: inputs[name].to(dtype) for name in ("ssm_state", "x", "dt", "z")}
    conv = conv_inputs(batch=30, dim=4999)
    results = []
    for number in (1, 2, 3, 5):
        threads(number)
        state, taps = copies(inputs), copies(conv)
        results.append(
            [
                ops.selective_state_update(**state, backend="torch"),
                ops.causal_conv1d_update(**taps, backend="torch"),
                state["ssm_state"],
                taps["conv_state"],
            ]
        )
    for other in results[1:]:
        for one, many in zip(results[0], other, strict=True):
            assert torch.equal(one, many)


def test_one_decay_serves_a_tied_head():
    """With A, dt and dt_bias expanded over a head, the exponential is taken once a head."""

    class Exponentials(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.sizes = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.exp_.default:
                self.sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    batch, nheads, headdim, dstate = 2, 3, 4, 8
    head = torch.randn(nheads, 1)
    inputs = {
        "ssm_state": torch.randn(batch, nheads, headdim, dstate),
        "x": torch.randn(batch, nheads, headdim),
        "dt": torch.randn(batch, nheads, 1).expand(-1, -1, headdim),
        "A": head.abs().neg()[..., None].expand(-1, headdim, dstate),
        "B": torch.randn(batch, 1, dstate),
        "C": torch.randn(batch, 1, dstate),
        "dt_bias": head.expand(-1, headdim),
        "dt_softplus": True,
    }
    expected = selective_state_update_ref(**copies(inputs))
    out = torch.empty_like(inputs["x"])
    dt_bias = inputs.pop("dt_bias")
    inputs.pop("dt_softplus")
    with Exponentials() as exponentials:
        selective_state_update(
            *inputs.values(), None, None, dt_bias, None, None, None, None, out, True, -1
        )
    assert exponentials.sizes == [batch * nheads]
    assert_close(out, expected, 1e-6)


def test_ring_wider_than_the_call_and_narrower():
    """More tokens than the ring has columns: the last ones stand."""
    for ntokens in (2, 7):
        inputs = conv_inputs(dtype=torch.float64)
        inputs["x"] = torch.randn(3, 5, ntokens, dtype=torch.float64)
        inputs["cache_seqlens"] = torch.tensor([0, 2, 11])
        fresh = copies(inputs)
        expected = causal_conv1d_update_ref(**fresh)
        assert_close(ops.causal_conv1d_update(**inputs, backend="torch"), expected, 1e-12)
        assert torch.equal(inputs["conv_state"], fresh["conv_state"])


@pytest.mark.gpu
@pytest.mark.parametrize("indices", [[1, -1, -1, 4], [-1, -1, -1, -1], [0, 5, 3, 2]])
def test_padding_in_a_captured_graph(indices):
    """The host cannot look at indices during capture; they differ in every replay."""
    state, conv = state_inputs(batch=4, dim=64), conv_inputs(batch=4, dim=64)
    state["ssm_state"], conv["conv_state"] = torch.randn(6, 64, 4), torch.randn(6, 64, 3)
    expected = []
    for op, inputs, name in (
        (ops.selective_state_update, state, "state_batch_indices"),
        (ops.causal_conv1d_update, conv, "conv_state_indices"),
    ):
        fresh = copies(inputs)
        expected.append((op(**fresh, **{name: torch.tensor(indices)}, backend="torch"), fresh))
    slots = torch.tensor([2, -1, 5, 0], device="cuda")
    on_gpu = [
        {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        for inputs in (state, conv)
    ]

    def step():
        return (
            ops.selective_state_update(**on_gpu[0], state_batch_indices=slots, backend="torch"),
            ops.causal_conv1d_update(**on_gpu[1], conv_state_indices=slots, backend="torch"),
        )

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    on_gpu[0]["ssm_state"].copy_(state["ssm_state"])
    on_gpu[1]["conv_state"].copy_(conv["conv_state"])
    slots.copy_(torch.tensor(indices))
    graph.replay()
    pools = (on_gpu[0]["ssm_state"], on_gpu[1]["conv_state"])
    for out, pool, (result, fresh), name in zip(
        outs, pools, expected, ("ssm_state", "conv_state"), strict=True
    ):
        assert_close(out, result, 1e-5)
        assert_close(pool, fresh[name], 1e-5)


def test_a_decode_step_is_few_calls_of_torch():
    """Host time is these calls, a microsecond or two each; adding one must be meant."""
    state, conv = state_inputs(), conv_inputs()
    nothing = (None, None, None, None)
    options = [state.pop(name) for name in ("D", "z", "dt_bias")]
    state.pop("dt_softplus")
    with Calls() as calls:
        selective_state_update(*state.values(), *options, *nothing, state["x"], True, -1)
    assert calls.number <= 20
    conv.pop("activation")
    with Calls() as calls:
        causal_conv1d_update(*conv.values(), None, *nothing, conv["x"], True, -1)
    assert calls.number <= 12
