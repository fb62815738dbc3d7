# SPDX-License-Identifier: Apache-2.0
"""The torch backend of selective_scan: blocks, checkpoints, packing, memory and equal bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from statescan.backends.outputs import scan_chunk_size
from statescan.backends.torch import _selective_scan_blocks as blocks
from statescan.backends.torch._sharing import UNSHARED, Sharing
from statescan.backends.torch._step_size import softplus
from statescan.backends.torch.selective_scan import selective_scan_bwd, selective_scan_fwd
from statescan.backends.torch.sequences import plan_sequences
from statescan.reference import selective_scan_ref
from statescan.testing.cases import all_cases
from statescan.testing.compare import assert_close, assert_passed
from statescan.testing.runner import run_case

CASES = all_cases("selective_scan")
RESULTS = ("out", "final_states", "dx", "ddt", "dA", "dB", "dC", "dD", "dz", "ddt_bias", "dinitial")


def draw(
    batch,
    dim,
    seqlen,
    dstate,
    *,
    ngroups=1,
    constant=False,
    dtype=torch.float32,
    channel_last=False,
):
    """Positional inputs of the backend's functions up to cu_seqlens, unpacked."""
    complex_dtype = dtype.is_complex
    real = dtype.to_real() if complex_dtype else dtype

    def tokens():
        if channel_last:
            return torch.randn(batch, seqlen, dim, dtype=real).transpose(1, 2)
        return torch.randn(batch, dim, seqlen, dtype=real)

    def weights():
        if constant:
            return torch.randn(dim, dstate, dtype=dtype)
        return torch.randn(batch, ngroups, dstate, seqlen, dtype=dtype)

    parameters = real if real == torch.float64 else torch.float32
    A = -3 * torch.rand(dim, dstate, dtype=parameters)
    if complex_dtype:
        A = torch.complex(A, torch.randn(dim, dstate, dtype=parameters))
    return [
        *(tokens(), tokens() - 1, A, weights(), weights(), torch.randn(dim, dtype=parameters)),
        *(tokens(), torch.randn(dim, dtype=parameters)),
        *(torch.randn(batch, dim, dstate, dtype=A.dtype), None, None),
    ]


def run(inputs, *, reverse=False, seed=7):
    """out, final_states and all gradients, for random gradients of the first two."""
    out, final_states, chunk_states = selective_scan_fwd(*inputs, True, reverse, True)
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dfinal = torch.randn(final_states.shape, generator=generator, dtype=final_states.dtype)
    gradients = selective_scan_bwd(dout, dfinal, *inputs, chunk_states, True, reverse)
    return [out, final_states, *gradients]


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of a few elements, so that small inputs meet every kind of border."""
    monkeypatch.setattr(blocks, "_CPU_TOKENS", 64 * 3)
    monkeypatch.setattr(blocks, "_CPU_STEP", 12)
    monkeypatch.setattr(blocks, "_CPU_CHUNK", 100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_match_the_reference(case, dtype, nan_empty):
    assert_passed(run_case(case, dtype, backend="torch"), str(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_match_the_reference_in_tiny_blocks(case, nan_empty, tiny_blocks):
    assert_passed(run_case(case, torch.float64, backend="torch"), str(case))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 2, "dim": 6, "seqlen": 131, "dstate": 3},
        {"batch": 1, "dim": 3, "seqlen": 300, "dstate": 20},
        {"batch": 2, "dim": 70, "seqlen": 67, "dstate": 5, "ngroups": 2},
        {"batch": 3, "dim": 12, "seqlen": 70, "dstate": 2, "ngroups": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [16, 64, 1 << 15])
def test_several_checkpoints(sizes, step, reverse, monkeypatch, nan_empty):
    monkeypatch.setattr(blocks, "_CPU_STEP", step)
    monkeypatch.setattr(blocks, "_CPU_CHUNK", 16 * step)
    inputs = draw(**sizes, dtype=torch.float64)
    results = run(inputs, reverse=reverse)
    for name, result, exact in zip(RESULTS, results, by_autograd(inputs, reverse), strict=True):
        assert_close(result, exact, 1e-13, name)


def by_autograd(inputs, reverse):
    """What ``run`` returns, from the reference in float64."""
    leaves = [t.detach().requires_grad_() if t is not None else None for t in inputs[:9]]
    x, dt, A, B, C, D, z, dt_bias, initial_states = leaves
    out, final_states = selective_scan_ref(
        *(x, dt, A, B, C),
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_states=initial_states,
        reverse=reverse,
        return_final_states=True,
    )
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dfinal = torch.randn(final_states.shape, generator=generator, dtype=final_states.dtype)
    gradients = torch.autograd.grad([out, final_states], leaves, [dout, dfinal])
    return [out.detach(), final_states.detach(), *gradients]


def test_chunk_states_are_the_states_before_each_checkpoint():
    inputs = draw(2, 5, 150, 3, dtype=torch.float64)
    chunk_states = selective_scan_fwd(*inputs, True, False, True)[2]
    size = scan_chunk_size(3)
    assert chunk_states.shape == (2, 3, 5, 3)
    torch.testing.assert_close(chunk_states[:, 0], inputs[8] * 0)
    for number in (1, 2):
        length = number * size
        part = [t[..., :length] if t is not None and t.shape[-1] == 150 else t for t in inputs]
        before = selective_scan_fwd(*part, True, False, False)[1]
        torch.testing.assert_close(chunk_states[:, number], before, rtol=1e-12, atol=1e-12)


def test_chunk_states_are_not_made_when_not_wanted():
    assert selective_scan_fwd(*draw(1, 4, 9, 2), True, False, False)[2].numel() == 0


THREAD_CASES = {
    "wide": {"batch": 1, "dim": 1536, "seqlen": 40, "dstate": 16},
    "odd": {"batch": 2, "dim": 101, "seqlen": 200, "dstate": 3},
    "groups": {"batch": 3, "dim": 96, "seqlen": 100, "dstate": 16, "ngroups": 3},
    "a_group_each": {"batch": 1, "dim": 33, "seqlen": 300, "dstate": 8, "ngroups": 33},
    "constant": {"batch": 1, "dim": 333, "seqlen": 100, "dstate": 7, "constant": True},
    "one_state": {"batch": 1, "dim": 32768, "seqlen": 2, "dstate": 1},
    "complex": {"batch": 2, "dim": 64, "seqlen": 70, "dstate": 8, "dtype": torch.complex64},
    "double": {"batch": 1, "dim": 301, "seqlen": 90, "dstate": 5, "dtype": torch.float64},
    "channel_last": {
        "batch": 1,
        "dim": 700,
        "seqlen": 65,
        "dstate": 4,
        "dtype": torch.bfloat16,
        "channel_last": True,
    },
}


@pytest.mark.parametrize("name", THREAD_CASES)
def test_bits_do_not_depend_on_threads(name, monkeypatch):
    inputs = draw(**THREAD_CASES[name])
    before = torch.get_num_threads()
    found = []
    try:
        for threads, free in ((1, True), (2, True), (3, True), (2, False), (1, True)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(Sharing, "_prompt", lambda self, trials, free=free: free)
            found.append(run(inputs))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for label, first, second in zip(RESULTS, found[0], other, strict=True):
            assert torch.equal(first, second), label


class Shared(TorchDispatchMode):
    """Collects the operations on more than torch leaves to the calling thread."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        reads = [t.numel() for t in args if isinstance(t, torch.Tensor)]
        writes = [result.numel()] if isinstance(result, torch.Tensor) else [0]
        summing = "sum" in str(func)
        most = max([*reads, *writes] if summing else writes)
        if most > (UNSHARED if summing else UNSHARED + 1) and not func.is_view:
            self.names.add(str(func))
        return result


@pytest.mark.parametrize(
    "sizes", [(1, 1536, 130, 16), (8, 256, 70, 16), (1, 512, 70, 64), (1, 2048, 9, 16)]
)
def test_nothing_waits_for_threads_that_are_not_free(sizes, monkeypatch):
    """Else each operation would take a time slice of the system beside a busy process."""
    monkeypatch.setattr(Sharing, "_prompt", lambda self, trials: False)
    inputs = draw(*sizes)
    dout = torch.ones_like(inputs[0])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with Shared() as shared:
            chunk_states = selective_scan_fwd(*inputs, True, False, True)[2]
            selective_scan_bwd(dout, None, *inputs, chunk_states, True, False)
    finally:
        torch.set_num_threads(before)
    allocations = {"aten.new_empty.default", "aten.empty.memory_format", "aten.zeros.default"}
    assert shared.names <= allocations


def test_a_refusal_lasts_for_the_call(monkeypatch):
    answers = iter([True, False, True])
    monkeypatch.setattr(Sharing, "_refused_until", 0.0)
    monkeypatch.setattr(Sharing, "_prompt", lambda self, trials: next(answers))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        sharing = Sharing(torch.device("cpu"), UNSHARED + 1)
        assert sharing.on
        for _ in range(3):
            sharing.ask()
        assert not sharing.on
    finally:
        torch.set_num_threads(before)
    assert next(answers)


class Largest(TorchDispatchMode):
    """Remembers the largest memory that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("ngroups", [1, 48])
def test_no_tensor_of_all_states(ngroups):
    inputs = draw(1, 48, 2048, 16, ngroups=ngroups)
    with Largest() as largest:
        run(inputs)
    weights, question = inputs[3].numel() * 4, 4 * UNSHARED * 4  # of Sharing, on a quiet machine
    assert largest.nbytes <= max(48 * 65 * 16 * 4, 48 * 2048 * 4, weights, question)


def test_block_memory_does_not_grow_with_seqlen():
    cuts = [blocks.cut(torch.empty(2, 3000, seqlen), 16, 64, 1) for seqlen in (1 << 12, 1 << 20)]
    assert cuts[0].steps == cuts[1].steps
    assert cuts[0].channels == cuts[1].channels


@pytest.mark.parametrize("dim", [1, 7, 100, 1536, 2048, 5000, 40000])
@pytest.mark.parametrize("batch", [0, 1, 3, 8, 1000])
@pytest.mark.parametrize("dstate", [1, 16, 256, 70000])
def test_blocks_cover_everything_once(batch, dim, dstate):
    cut = blocks.cut(torch.empty(batch, dim, 1), dstate, scan_chunk_size(dstate), 6)
    for parts, total in ((cut.rows, batch), (cut.channels, dim)):
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(total))
    assert all(part.start % 6 == 0 for part in cut.channels)
    assert scan_chunk_size(dstate) % cut.steps == 0


def test_inputs_keep_their_bits():
    for seqlen in (1, 5):
        inputs = draw(2, 5, seqlen, 3)
        before = [None if t is None else t.clone() for t in inputs]
        run(inputs)
        for old, new in zip(before, inputs, strict=True):
            assert old is None or torch.equal(old, new)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_sequence_cannot_spoil_another(reverse, tiny_blocks):
    inputs = draw(2, 5, 24, 3)
    seq_idx = torch.tensor([[-1] * 3 + [4] * 7 + [2] * 9 + [-1] * 5, [1] * 10 + [-2] + [1] * 13])
    inputs[9] = seq_idx
    clean = run(inputs, reverse=reverse)
    real = (seq_idx >= 0)[:, None]
    spoilt = [t if t is None else t.clone() for t in inputs]
    for index in (0, 1, 3, 4, 6):
        # Padding everywhere, and the first sequence of row 0.
        per_token = spoilt[index]
        per_token.masked_fill_(~real if per_token.dim() == 3 else ~real[:, None], math.nan)
        per_token[0, ..., 5] = math.nan
    results = run(spoilt, reverse=reverse)
    for name, result, expected in zip(RESULTS, results, clean, strict=True):
        if name in ("dA", "dD", "ddt_bias"):
            continue
        if name in ("final_states", "dinitial"):
            torch.testing.assert_close(result[1], expected[1], rtol=0, atol=0)
            continue
        assert (
            result.masked_select(
                ~real.expand_as(result) if result.dim() == 3 else ~real[:, None].expand_as(result)
            )
            .eq(0)
            .all()
        ), name
        torch.testing.assert_close(result[1], expected[1], rtol=0, atol=0)
        torch.testing.assert_close(result[0, ..., 10:], expected[0, ..., 10:], rtol=0, atol=0)
    assert torch.equal(results[1][0], clean[1][0])


def test_padding_with_nan_leaves_parameter_gradients_alone(tiny_blocks):
    inputs = draw(1, 5, 12, 3)
    inputs[9] = torch.tensor([[-1, 0, 0, 0, -1, -1, 0, 0, 3, 3, -1, -1]])
    clean = run(inputs)
    for index in (0, 1, 3, 4, 6):
        inputs[index] = inputs[index].masked_fill((inputs[9] < 0), math.nan)
    for name, result, expected in zip(RESULTS, run(inputs), clean, strict=True):
        assert torch.equal(result, expected), name


def test_an_infinite_state_does_not_leak_into_padding(tiny_blocks):
    inputs = draw(1, 2, 6, 2)
    inputs[9] = torch.tensor([[0, 0, 0, -1, -1, -1]])
    inputs[0][0, :, 2] = math.inf
    results = run(inputs)
    assert torch.equal(results[0][..., 3:], torch.zeros(1, 2, 3))
    for index in (2, 3, 5, 6, 8):
        assert torch.equal(results[index][..., 3:], torch.zeros_like(results[index][..., 3:]))


@pytest.mark.parametrize(
    ("batch", "dim", "seqlen", "dstate"),
    [(0, 4, 5, 3), (2, 0, 5, 3), (2, 4, 0, 3), (2, 4, 5, 0), (0, 0, 0, 0)],
)
@pytest.mark.parametrize("constant", [False, True])
def test_empty_sizes(batch, dim, seqlen, dstate, constant, nan_empty):
    inputs = draw(batch, dim, seqlen, dstate, constant=constant, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    results = run(inputs)
    torch.randn(results[0].shape, generator=generator)
    dfinal = torch.randn(results[1].shape, generator=generator, dtype=torch.float64)
    expected = [torch.zeros_like(result) for result in results]
    if seqlen == 0:
        expected[1], expected[-1] = inputs[8], dfinal
    if dstate == 0:
        leaves = [t.detach().requires_grad_() for t in (inputs[0], inputs[5], inputs[6])]
        x, D, z = leaves
        expected[0] = D[:, None] * x * torch.nn.functional.silu(z)
        dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).double()
        gradients = torch.autograd.grad(expected[0], leaves, dout)
        for index, gradient in zip((2, 7, 8), gradients, strict=True):
            expected[index] = gradient
    for name, result, exact in zip(RESULTS, results, expected, strict=True):
        torch.testing.assert_close(result, exact, msg=name)


def test_absent_inputs_have_empty_gradients():
    x, dt, A, B, C = draw(1, 4, 6, 2)[:5]
    inputs = (x, dt, A, B, C, None, None, None, None, None, None)
    out, _, chunk_states = selective_scan_fwd(*inputs, False, False, True)
    gradients = selective_scan_bwd(out, None, *inputs, chunk_states, False, False)
    assert [g.numel() for g in gradients[5:]] == [0, 0, 0, 0]


def test_softplus_is_exact_in_both_tails():
    values = torch.tensor([-100.0, -40, -5, 0, 5, 19.9, 20, 20.1, 100], dtype=torch.float64)
    exact = torch.log1p(values.exp()).where(values <= 20, values)
    torch.testing.assert_close(softplus(values), exact, rtol=1e-14, atol=0)
    single = softplus(values.float())
    # exp(-100) is below the normal float32 numbers.
    torch.testing.assert_close(single[1:].double(), exact[1:], rtol=1e-6, atol=0)
    assert torch.equal(single[-2:], values.float()[-2:])


def test_softplus_passes_nan_and_infinity():
    found = softplus(torch.tensor([math.nan, math.inf, -math.inf]))
    assert math.isnan(found[0])
    assert found[1:].tolist() == [math.inf, 0.0]


SEQ_IDX = torch.tensor([[-1, 5, 5, 5, -1, 5, 3, 3], [2, 2, 0, 0, 0, -1, -3, -1], [-1] * 8])


def visited(plan, seqlen):
    """For each row the tokens in the order of processing, taken three at a time."""
    batch = 1 if plan.source is None else plan.source.shape[0]
    tokens = torch.arange(seqlen).expand(batch, 2, seqlen)
    rows = slice(0, batch)
    parts = [plan.take(tokens, rows, i, min(i + 3, seqlen)) for i in range(0, seqlen, 3)]
    return torch.cat(parts, dim=-1)[:, 0].tolist()


def test_plan_of_ids():
    plan = plan_sequences(3, 8, SEQ_IDX)
    row = [slice(i, i + 1) for i in range(3)]
    found = {(r.rows.start, r.start, r.end): (r.initial, r.final) for r in plan.runs}
    assert found == {
        (0, 0, 1): (None, None),
        (0, 1, 4): (row[0], None),
        (0, 4, 5): (None, None),
        (0, 5, 6): (None, None),
        (0, 6, 8): (None, row[0]),
        (1, 0, 2): (row[1], None),
        (1, 2, 5): (None, row[1]),
        (1, 5, 6): (None, None),
        (1, 6, 7): (None, None),
        (1, 7, 8): (None, None),
        (2, 0, 8): (None, None),
    }
    assert plan.untouched == [row[2]]
    assert torch.equal(plan.padding, SEQ_IDX < 0)


def test_reverse_flips_inside_each_run():
    plan = plan_sequences(3, 8, SEQ_IDX, reverse=True)
    assert visited(plan, 8) == [
        [0, 3, 2, 1, 4, 5, 7, 6],
        [1, 0, 4, 3, 2, 5, 6, 7],
        [7, 6, 5, 4, 3, 2, 1, 0],
    ]


def test_plan_of_bounds():
    bounds = torch.tensor([0, 0, 3, 3, 8, 8], dtype=torch.int32)
    plan = plan_sequences(1, 8, cu_seqlens=bounds, reverse=True)
    assert [(r.start, r.end, r.initial) for r in plan.runs] == [
        (0, 3, slice(1, 2)),
        (3, 8, slice(3, 4)),
    ]
    assert plan.untouched == [slice(0, 1), slice(2, 3), slice(4, 5)]
    assert visited(plan, 8) == [[2, 1, 0, 7, 6, 5, 4, 3]]


def test_bounds_outside_the_tokens_are_clamped():
    """Such values come through only on accelerators, where nobody looks at them first."""
    plan = plan_sequences(1, 6, cu_seqlens=torch.tensor([-4, 2, 1, 99]), reverse=True)
    assert [(r.start, r.end, r.final) for r in plan.runs] == [
        (0, 2, slice(0, 1)),
        (2, 6, slice(2, 3)),
    ]
    assert plan.untouched == [slice(1, 2)]
    assert visited(plan, 6) == [[1, 0, 5, 4, 3, 2]]
    short = plan_sequences(1, 6, cu_seqlens=torch.tensor([1, 4]), reverse=True)
    assert sorted((r.start, r.end) for r in short.runs) == [(0, 1), (1, 4), (4, 6)]
    assert visited(short, 6) == [[0, 3, 2, 1, 5, 4]]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_put_writes_where_take_reads(reverse, packed):
    plan = plan_sequences(3, 8, SEQ_IDX if packed else None, reverse=reverse)
    tensor, target = torch.randn(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)
    for rows in (slice(0, 2), slice(2, 3)):
        for start, stop in ((0, 3), (3, 8)):
            piece = plan.take(tensor[rows], rows, start, stop)
            plan.put(target[rows], rows, start, stop, piece)
    assert torch.equal(target, tensor)


def test_many_short_sequences_match_the_reference(tiny_blocks):
    inputs = draw(1, 3, 40, 2, dtype=torch.float64)
    bounds = torch.tensor([0, 1, 1, 2, 5, 5, 5, 6, 9, 20, 21, 22, 40, 40])
    inputs[8] = torch.randn(13, 3, 2, dtype=torch.float64)
    inputs[10] = bounds
    out, final_states, _ = selective_scan_fwd(*inputs, True, True, False)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    expected = selective_scan_ref(
        **dict(zip(names, inputs, strict=False)),
        cu_seqlens=bounds,
        dt_softplus=True,
        reverse=True,
        return_final_states=True,
    )
    assert_close(out, expected[0], 1e-13, "out")
    assert_close(final_states, expected[1], 1e-13, "final_states")
