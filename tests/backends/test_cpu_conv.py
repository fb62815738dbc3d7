# SPDX-License-Identifier: Apache-2.0
"""The cpu backend's convolution: right at every vector level, size and stride, with fixed bits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers.layouts import DISTINCT, LAYOUTS, lay_out

from statescan.backends import native
from statescan.backends.cpu import causal_conv1d as module
from statescan.backends.cpu.causal_conv1d import causal_conv1d_bwd, causal_conv1d_fwd
from statescan.reference import causal_conv1d_ref
from statescan.testing import all_cases, assert_passed, in_double, run_case, tolerance
from statescan.testing.compare import compare

STATUS = native.status()
pytestmark = pytest.mark.skipif(
    STATUS.library is None, reason=f"the native library is not usable: {STATUS.reason}"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 16


def levels():
    """The vector levels of this machine; use_isa answers with another one for those it lacks."""
    if STATUS.library is None:
        return [0]
    use_isa = STATUS.library.handle.statescan_use_isa
    found = [level for level in native.ISA_NAMES if use_isa(level) == level]
    use_isa(-1)
    return found


@pytest.fixture(params=levels(), ids=lambda level: native.ISA_NAMES[level])
def level(request):
    """Runs the test on each vector level; the machine's own comes back."""
    use_isa = native.require().handle.statescan_use_isa
    use_isa(request.param)
    yield request.param
    use_isa(-1)


@pytest.fixture
def threads():
    """Set the number of threads; the old number comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Call:
    """One call and its cotangents, drawn in the given dtype."""

    def __init__(self, batch, dim, seqlen, width, dtype=torch.float32, **options):
        self.dtype = dtype
        self.silu = options.pop("silu", True)
        self.reverse = options.pop("reverse", False)
        self.seq_idx = options.pop("seq_idx", None)
        self.cu_seqlens = options.pop("cu_seqlens", None)
        with_bias, with_states = options.pop("bias", True), options.pop("states", True)
        assert not options
        num_states = batch if self.cu_seqlens is None else self.cu_seqlens.numel() - 1
        state_shape = (num_states, dim, width - 1)
        self.x = torch.randn(batch, dim, seqlen).to(dtype)
        self.dout = torch.randn(batch, dim, seqlen).to(dtype)
        self.weight = torch.randn(dim, width).to(dtype)
        self.bias = torch.randn(dim).to(dtype) if with_bias else None
        self.states = torch.randn(state_shape).to(dtype) if with_states else None
        self.dfinal = torch.randn(state_shape).to(dtype) if with_states else None

    @property
    def inputs(self):
        return {"x": self.x, "weight": self.weight, "bias": self.bias, "states": self.states}

    def lay_out(self, layout):
        """Place every tensor anew; the gradients that arrive may have no memory of their own."""
        for name in ("x", "weight", "bias", "states", "dout", "dfinal"):
            setattr(self, name, lay_out(getattr(self, name), layout))
        return self

    def run(self):
        """Outputs and gradients of the cpu backend by name."""
        arguments = (*self.inputs.values(), self.seq_idx, self.cu_seqlens, self.silu, self.reverse)
        out, final_states = causal_conv1d_fwd(*arguments)
        gradients = causal_conv1d_bwd(self.dout, self.dfinal, *arguments)
        named = zip(self.inputs.items(), gradients, strict=True)
        found = {f"d{name}": gradient for (name, given), gradient in named if given is not None}
        return {"out": out, "final_states": final_states} | found

    def exact(self):
        """The same of the reference in float64."""
        values = in_double({**self.inputs, "dout": self.dout, "dfinal": self.dfinal})
        leaves = {
            name: values[name].detach().requires_grad_()
            for name, given in self.inputs.items()
            if given is not None
        }
        out, final_states = causal_conv1d_ref(
            *(leaves.get(name) for name in ("x", "weight", "bias")),
            activation="silu" if self.silu else None,
            initial_states=leaves.get("states"),
            seq_idx=self.seq_idx,
            cu_seqlens=self.cu_seqlens,
            reverse=self.reverse,
            return_final_states=True,
        )
        reached = [(out, values["dout"]), (final_states, values["dfinal"])]
        reached = [pair for pair in reached if pair[0].requires_grad and pair[1] is not None]
        gradients = [None] * len(leaves)
        if reached:
            outputs, cotangents = zip(*reached, strict=True)
            gradients = torch.autograd.grad(
                outputs, tuple(leaves.values()), cotangents, allow_unused=True
            )
        named = zip(leaves.items(), gradients, strict=True)
        return {"out": out, "final_states": final_states} | {
            f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in named
        }

    def check(self):
        """Judge every result as the cases of ``statescan.testing`` are judged."""
        exact = self.exact()
        comparisons = []
        for name, result in self.run().items():
            given = self.inputs.get(name.removeprefix("d")) if name.startswith("d") else self.x
            assert result.dtype == given.dtype, name
            allowed = tolerance(
                "causal_conv1d", self.dtype, result.dtype, gradient=name.startswith("d")
            )
            comparisons.append(compare(name, result, exact[name], allowed))
        assert_passed(comparisons)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", all_cases("causal_conv1d"), ids=str)
def test_cases(case, dtype, level, nan_empty):
    assert_passed(run_case(case, dtype, backend="cpu"))


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("width", [*range(1, 10), 40])
@pytest.mark.parametrize("seqlen", [0, 1, 2, 3, 63, 64, 65])
def test_widths_and_lengths(seqlen, width, layout, level, nan_empty):
    Call(2, 17, seqlen, width).lay_out(layout).check()


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 17, 130])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_channels(width, dim, dtype, layout, level, nan_empty):
    Call(1, dim, 1000, width, dtype).lay_out(layout).check()


@pytest.mark.parametrize("shape", [(0, 5, 9), (3, 0, 9), (3, 5, 0), (0, 0, 0)], ids=str)
def test_no_elements(shape, nan_empty):
    Call(*shape, 4).check()


def test_a_state_longer_than_many_tiles(level, nan_empty):
    Call(1, 9, 700, 200).check()
    Call(1, 9, 150, 200, reverse=True).check()


def test_parts_of_the_tokens_leave_no_trace(level, monkeypatch, nan_empty):
    """Tasks that have 64 tokens of a row each, with runs and padding across their ends."""
    monkeypatch.setattr(module, "_LEAST_TOKENS", 64)
    bounds = torch.tensor([0, 1, 62, 66, 66, 191, 194, 340])
    seq_idx = torch.tensor([0] * 63 + [1] * 3 + [-1] * 80 + [2] * 46 + [3] * 148)[None]
    for reverse in (False, True):
        for width in (1, 2, 4, 6, 70):
            Call(1, 9, 340, width, reverse=reverse).check()
            Call(1, 9, 340, width, reverse=reverse, cu_seqlens=bounds).check()
            Call(1, 9, 340, width, reverse=reverse, seq_idx=seq_idx).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, dtype, level, nan_empty):
    Call(2, 19, 75, 4, dtype).lay_out(layout).check()
    Call(2, 19, 75, 4, dtype, reverse=True).lay_out(layout).check()


@pytest.mark.parametrize("layout", DISTINCT)
def test_the_arriving_gradient_may_lie_otherwise_than_x(layout, level):
    call = Call(2, 19, 75, 4)
    expected = call.run()
    call.dout, call.dfinal = lay_out(call.dout, layout), lay_out(call.dfinal, layout)
    for name, result in call.run().items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_dtypes_may_be_mixed(silu, reverse, level):
    call = Call(2, 21, 70, 4, torch.bfloat16, silu=silu, reverse=reverse)
    call.weight, call.bias = torch.randn(21, 4), torch.randn(21).half()
    call.states, call.dfinal = torch.randn(2, 21, 3).bfloat16(), torch.randn(2, 21, 3)
    call.dout = torch.randn(2, 21, 70)
    call.check()


def packed_options(generator, batch, seqlen):
    """Random sequences, some of them empty, told by bounds or by ids with padding, or none."""
    kind = generator.choice(["bounds", "ids", "none"])
    if kind == "bounds" and batch == 1:
        inner = sorted(generator.choices(range(seqlen + 1), k=generator.randrange(9)))
        return {"cu_seqlens": torch.tensor([0, *inner, seqlen], dtype=torch.int32)}
    if kind == "ids":
        rows = []
        for _ in range(batch):
            row: list[int] = []
            while len(row) < seqlen:
                row += [generator.randrange(-2, 4)] * generator.choice([1, 2, 3, 5, 64, 90])
            rows.append(row[:seqlen])
        return {"seq_idx": torch.tensor(rows, dtype=torch.int32).view(batch, seqlen)}
    return {}


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed, level, nan_empty):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    batch, dim = generator.choice([1, 1, 2, 5]), generator.choice([1, 4, 8, 11, 16, 33, 70])
    seqlen = generator.choice([1, 5, 17, 64, 100, 129, 300])
    call = Call(
        *(batch, dim, seqlen, generator.choice([1, 2, 3, 4, 4, 5, 8, 11])),
        generator.choice(DTYPES),
        silu=generator.random() < 0.7,
        reverse=generator.random() < 0.5,
        bias=generator.random() < 0.7,
        states=generator.random() < 0.7,
        **packed_options(generator, batch, seqlen),
    )
    for name in ("x", "dout", "weight", "states", "dfinal"):
        setattr(call, name, lay_out(getattr(call, name), generator.choice(DISTINCT)))
    call.check()


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("shape", [(2, 333, 601), (1, 1, 7001), (50, 3, 50)], ids=str)
def test_equal_bits_for_any_number_of_threads(shape, layout, threads, level):
    call = Call(*shape, 4).lay_out(layout)
    threads(1)
    alone = call.run()
    for number in (2, 3):
        threads(number)
        for name, result in call.run().items():
            assert torch.equal(result, alone[name]), (name, number)


def test_equal_bits_for_any_number_of_threads_packed(threads, level):
    seq_idx = (torch.arange(1501) // 37)[None]
    seq_idx[:, 100:120] = -1
    call = Call(1, 200, 1501, 4, torch.bfloat16, seq_idx=seq_idx)
    threads(1)
    alone = call.run()
    threads(2)
    for name, result in call.run().items():
        assert torch.equal(result, alone[name]), name


@pytest.mark.parametrize("width", [4, 6])
def test_nan_in_one_sequence_stays_there(width, level):
    bounds = [0, 5, 6, 6, 90, 200]
    call = Call(1, 9, 200, width, cu_seqlens=torch.tensor(bounds))
    call.x[..., 6:90] = math.nan
    call.dout[..., 6:90] = math.nan
    call.states[3] = math.nan
    found = call.run()
    for name in ("out", "dx"):
        finite = found[name].isfinite().all(1)[0]
        assert finite[:6].all(), name
        assert finite[90:].all(), name
    for name in ("final_states", "dstates"):
        assert found[name].isfinite().flatten(1).all(1).tolist() == [True, True, True, False, True]


def test_nan_in_one_channel_or_row_stays_there(level):
    call = Call(3, 9, 80, 4)
    call.x[1, 3] = math.nan
    found = call.run()
    for name in ("out", "dx", "final_states", "dstates"):
        bad = found[name].isnan().flatten(2).any(2)
        bad[1, 3] = False
        assert not bad.any(), name
    assert found["dweight"].isnan().any(1).tolist() == [channel == 3 for channel in range(9)]


def test_the_state_of_an_empty_sequence_reaches_no_weight(level):
    call = Call(1, 3, 7, 4, cu_seqlens=torch.tensor([0, 0, 7]))
    call.states[0] = math.nan
    assert call.run()["dweight"].isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [4, 6])
def test_nothing_of_padding_is_read(width, reverse, layout, level):
    """Neither of x nor of the gradient that arrives at a padding token."""
    ids = [-1, 0, 0, -2, 0, 1, 1, *[-1] * 100, *[2] * 90, -1]
    call = Call(1, 9, len(ids), width, reverse=reverse, seq_idx=torch.tensor([ids]))
    call.lay_out(layout)
    clean = call.run()
    pad = call.seq_idx[:, None] < 0
    call.x, call.dout = call.x.masked_fill(pad, math.nan), call.dout.masked_fill(pad, math.inf)
    call.lay_out(layout)
    dirty = call.run()
    for name, expected in clean.items():
        assert torch.equal(expected, dirty[name]), name
    assert not dirty["out"].masked_select(pad).any()
    assert not dirty["dx"].masked_select(pad).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_final_states_are_copies_of_inputs(dtype, level):
    call = Call(2, 9, 70, 4, dtype)
    assert torch.equal(call.run()["final_states"], call.x[..., -3:])
    call = Call(2, 9, 2, 4, dtype, reverse=True)
    expected = torch.cat([call.states[..., -1:], call.x.flip(2)], 2)
    assert torch.equal(call.run()["final_states"], expected)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 8, 17])
def test_nothing_is_written_beside_the_results(dim, dtype, layout, level, monkeypatch):
    """Results lie between guards, which keep their value; inside, all is written."""
    parents = []

    def guarded(tensor):
        strides = tensor.stride()
        parent = torch.full((tensor.numel() + 2 * GUARD,), math.nan, dtype=tensor.dtype)
        parents.append(parent)
        return parent[GUARD:].as_strided(tensor.shape, strides)

    for name in ("causal_conv1d_fwd_outputs", "empty_gradients"):
        make = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, make=make: tuple(guarded(t) for t in make(*args))
        )
    ids = torch.tensor([[0] * 70 + [-1] * 5 + [1] * 8, [-1] * 83])
    for seq_idx in (None, ids):
        Call(2, dim, 83, 4, dtype, seq_idx=seq_idx).lay_out(layout).check()
    assert len(parents) == 12
    for parent in parents:
        assert parent[:GUARD].isnan().all()
        assert parent[-GUARD:].isnan().all()
        assert parent[GUARD:-GUARD].isfinite().all()
