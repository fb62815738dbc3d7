# SPDX-License-Identifier: Apache-2.0
"""The torch backend's convolution: blocks leave no trace, bits are fixed, memory is bounded."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from statescan import ops
from statescan.backends.torch import _conv_blocks
from statescan.backends.torch._conv_plan import make_plan
from statescan.backends.torch._pointwise import keep_mask, select
from statescan.backends.torch.causal_conv1d import causal_conv1d_bwd, causal_conv1d_fwd
from statescan.reference import causal_conv1d_ref
from statescan.testing import all_cases, assert_close, assert_passed, run_case

THREADS = (2, 3, 5)


@pytest.fixture
def threads():
    """Set the number of threads; the old number comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 3, 16])
def tiny_blocks(request, monkeypatch):
    """Blocks of a few elements, stretches of a few tokens: cuts fall everywhere."""
    monkeypatch.setattr(_conv_blocks, "_CPU_BLOCK", 4 * request.param)
    monkeypatch.setattr(_conv_blocks, "_TIME_CHANNEL_FIRST", request.param)
    monkeypatch.setattr(_conv_blocks, "_TIME_CHANNEL_LAST", request.param)
    monkeypatch.setattr(_conv_blocks, "_MOST_TOKENS", request.param)
    monkeypatch.setattr(_conv_blocks, "_LEAST_WIDTHS", 0)


def draw(*shape, dtype=torch.float32, layout="channel_first"):
    tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
    if layout == "channel_last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor


def both(x, weight, bias=None, states=None, *, dout=None, dfinal=None, seq_idx=None, cu=None):
    """out, final_states and the four gradients, with SiLU."""
    arguments = (x, weight, bias, states, seq_idx, cu, True, False)
    out, final_states = causal_conv1d_fwd(*arguments)
    dout = torch.ones_like(out) if dout is None else dout
    return out, final_states, *causal_conv1d_bwd(dout, dfinal, *arguments)


@pytest.mark.parametrize("case", all_cases("causal_conv1d"), ids=str)
def test_cuts_leave_no_trace(case, tiny_blocks, nan_empty):
    assert_passed(run_case(case, torch.float64, backend="torch"))


@pytest.mark.parametrize("layout", ["channel_first", "channel_last"])
@pytest.mark.parametrize("shape", [(2, 333, 601), (1, 1, 70001), (500, 3, 50)], ids=str)
def test_equal_bits_for_any_number_of_threads(threads, shape, layout):
    batch, dim, _ = shape
    x, weight, bias = draw(*shape, layout=layout), draw(dim, 4), draw(dim)
    states, dfinal = draw(batch, dim, 3), draw(batch, dim, 3)
    threads(1)
    alone = both(x, weight, bias, states, dfinal=dfinal)
    for number in THREADS:
        threads(number)
        for one, many in zip(alone, both(x, weight, bias, states, dfinal=dfinal), strict=True):
            assert torch.equal(one, many)


def test_equal_bits_for_any_number_of_threads_packed(threads):
    seq_idx = (torch.arange(1501) // 37)[None]
    seq_idx[:, 100:120] = -1
    x, weight = draw(1, 200, 1501, dtype=torch.bfloat16), draw(200, 4)
    threads(1)
    alone = both(x, weight, seq_idx=seq_idx)
    for number in THREADS:
        threads(number)
        for one, many in zip(alone, both(x, weight, seq_idx=seq_idx), strict=True):
            assert torch.equal(one, many)


@pytest.mark.parametrize("layout", ["channel_first", "channel_last"])
def test_temporaries_are_a_block_however_large_x_is(layout):
    """Of everything that is computed only out and dx are larger than two blocks."""

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.sizes = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not result._is_view():
                self.sizes.append(result.untyped_storage().nbytes())
            return result

    x, weight = draw(4, 64, 8192, dtype=torch.bfloat16, layout=layout), draw(64, 4)
    with Largest() as largest:
        both(x, weight)
    block = 4 * _conv_blocks._CPU_BLOCK
    whole = [size for size in largest.sizes if size > 2 * block]
    assert set(whole) == {2 * x.numel()}


def test_nan_in_one_sequence_stays_there():
    cu = torch.tensor([0, 5, 6, 6, 12])
    x, weight, states = draw(1, 3, 12), draw(3, 4), draw(4, 3, 3)
    x[..., 5] = math.nan
    states[2] = math.nan
    out, final_states, dx, _, _, dstates = both(
        *(x, weight, None, states), cu=cu, dfinal=draw(4, 3, 3)
    )
    assert out.isnan().any(1)[0].tolist() == [t == 5 for t in range(12)]
    assert dx[..., :5].isfinite().all()
    assert dx[..., 6:].isfinite().all()
    assert final_states.isnan().flatten(1).any(1).tolist() == [False, True, True, False]
    assert dstates.isnan().flatten(1).any(1).tolist() == [False, True, False, False]


def test_the_state_of_an_empty_sequence_reaches_no_weight():
    cu = torch.tensor([0, 0, 7])
    x, weight, states = draw(1, 3, 7), draw(3, 4), draw(2, 3, 3)
    states[0] = math.nan
    dweight = both(x, weight, None, states, cu=cu)[3]
    assert dweight.isfinite().all()


def test_nothing_of_padding_is_read():
    """Neither of x nor of the gradient that arrives at a padding token."""
    seq_idx = torch.tensor([[-1, 0, 0, -2, 0, 1, 1, -1]])
    weight, bias = draw(3, 4), draw(3)
    x, dout = draw(1, 3, 8), draw(1, 3, 8)
    clean = both(x, weight, bias, dout=dout, seq_idx=seq_idx)
    pad = seq_idx[:, None] < 0
    x, dout = x.masked_fill(pad, math.nan), dout.masked_fill(pad, math.inf)
    dirty = both(x, weight, bias, dout=dout, seq_idx=seq_idx)
    for expected, result in zip(clean, dirty, strict=True):
        assert torch.equal(expected, result)
    assert not dirty[0].masked_select(pad).any()
    assert not dirty[2].masked_select(pad).any()


@pytest.mark.parametrize("form", ["expanded", "split", "transposed"])
def test_the_arriving_gradient_may_have_any_strides(form):
    """Sums give stride 0, torch.split gives rows with gaps: fla issues 871 and 1138."""
    x, weight, bias = draw(2, 6, 9), draw(6, 4), draw(6)
    dout = {
        "expanded": torch.ones(1).expand(2, 6, 9),
        "split": draw(2, 18, 9).split(6, 1)[1],
        "transposed": draw(9, 6, 2).transpose(0, 2),
    }[form]
    for expected, result in zip(
        both(x, weight, bias, dout=dout.contiguous()), both(x, weight, bias, dout=dout), strict=True
    ):
        assert torch.equal(expected, result)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_packing_equals_each_sequence_alone(seed, reverse):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (9,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    width = 1 + seed % 5
    x, weight = draw(1, 3, int(cu[-1]), dtype=torch.float64), draw(3, width, dtype=torch.float64)
    states = draw(9, 3, width - 1, dtype=torch.float64)
    out, final_states = causal_conv1d_fwd(x, weight, None, states, None, cu, True, reverse)
    for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        alone, final = causal_conv1d_ref(
            *(x[..., start:end], weight),
            activation="silu",
            initial_states=states[i : i + 1],
            reverse=reverse,
            return_final_states=True,
        )
        assert_close(out[..., start:end], alone, 1e-12)
        assert torch.equal(final_states[i : i + 1], final)


def test_weights_of_many_taps():
    x, weight = draw(2, 3, 50, dtype=torch.float64), draw(3, 33, dtype=torch.float64)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = ops.causal_conv1d(x, weight, backend="torch")
    exact = causal_conv1d_ref(x, weight)
    assert_close(out, exact, 1e-12)
    for result, truth in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(exact.square().sum(), leaves),
        strict=True,
    ):
        assert_close(result, truth, 1e-12)


def test_positions_follow_the_order_of_processing():
    x = torch.empty(2, 1, 6)
    seq_idx = torch.tensor([[3, 3, 3, -1, 3, 3], [0, 1, 1, 1, 1, -1]])
    forward = make_plan(x, 4, seq_idx, None, reverse=False).positions
    backward = make_plan(x, 4, seq_idx, None, reverse=True).positions
    assert forward.tolist() == [[0, 1, 2, -1, 0, 1], [0, 0, 1, 2, 3, -1]]
    assert backward.tolist() == [[2, 1, 0, -1, 1, 0], [0, 3, 2, 1, 0, -1]]


def test_whole_rows_need_no_positions():
    x = torch.empty(1, 1, 6)
    assert make_plan(x, 4, None, torch.tensor([0, 0, 6]), reverse=False).positions is None
    assert make_plan(x, 4, torch.full((1, 6), 7), None, reverse=True).positions is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_select_takes_or_leaves_every_bit(dtype):
    values = torch.tensor([math.nan, -math.inf, -0.0, 1.5], dtype=dtype)
    kept = select(values, keep_mask(torch.ones(4, dtype=torch.bool), dtype))
    left = select(values, keep_mask(torch.zeros(4, dtype=torch.bool), dtype))
    assert torch.equal(kept.view(torch.uint8), values.view(torch.uint8))
    assert not left.view(torch.uint8).any()
