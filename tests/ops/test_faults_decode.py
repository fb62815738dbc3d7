# SPDX-License-Identifier: Apache-2.0
"""Inputs on which other libraries' decode steps and mixers were reported wrong, as whole kinds.

An entry's number in a docstring is that of the list of faults the tests were written from.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.differential import assert_same, call, check_update
from helpers.layouts import lay_out
from helpers.op_inputs import Draw, scan_inputs, state_inputs, taps_inputs
from helpers.sparse import sparse, spread
from torch import nn

from statescan.errors import DeviceError, GradientError, SlotIndexError, StatescanError
from statescan.nn import Mamba
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("nan_empty")

STATE, TAPS = "selective_state_update", "causal_conv1d_update"
HEADS = (4, 3)
BOTH = [(STATE, state_inputs, "ssm_state"), (TAPS, taps_inputs, "conv_state")]
INDICES = {STATE: "state_batch_indices", TAPS: "conv_state_indices"}
both = pytest.mark.parametrize(("op", "make", "pool"), BOTH, ids=[STATE, TAPS])


def indices(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_slots_beyond_32_bits_of_elements(backend, tmp_path):
    """B09, S20, S21: the last slot of a pool of more than 2^31 elements; slot 0 stays untouched."""
    heads, dstate = (64, 64), 64
    slots = 2**31 // (64 * 64 * 64) + 100
    pool = sparse(tmp_path, slots * 64 * 64 * dstate, torch.float32).view(slots, *heads, dstate)
    kwargs = state_inputs(1, dstate=dstate, heads=heads)
    small = kwargs["ssm_state"].clone()
    pool[slots - 1] = small[0]
    expected = call(STATE, kwargs | {"ssm_state": small}, backend)
    for write in (None, slots - 7):
        pool[slots - 1] = kwargs["ssm_state"][0]
        big = kwargs | {"ssm_state": pool, INDICES[STATE]: indices(slots - 1)}
        big[f"dst_{INDICES[STATE]}"] = None if write is None else indices(write)
        assert_same(call(STATE, big, backend), expected)
        assert_same(pool[slots - 1 if write is None else write], small[0])
    for other in (0, 1, 2**31 // (64 * 64 * 64), slots - 2):
        assert not pool[other].any()


@both
@pytest.mark.parametrize("far", [2**31 + 64, 2**32, 2**32 + 8])
def test_slots_further_apart_than_32_bits_count(backend, tmp_path, op, make, pool, far):
    """B09, S21: strides of the pool and of the states that are kept for rollback."""
    for slots in (None, indices(2, -1, 0)):
        kwargs = make(3, kept=2, ntokens=2)
        for name in (pool, "intermediate_states", "x"):
            inner = kwargs[name][0].contiguous().stride()
            kwargs[name] = spread(tmp_path, kwargs[name], (far, *inner))
        kwargs[INDICES[op]] = slots
        check_update(op, kwargs, backend)
        kwargs["num_accepted_tokens"] = indices(0, 1, 2)
        check_update(op, kwargs, backend)


@both
def test_more_rows_or_channels_than_a_grid_has_blocks(backend, op, make, pool):
    """B07: also as rows of a pool in another order."""
    for batch, dim in ((2, 70000), (70000, 2)):
        kwargs = make(batch, dim)
        kwargs[INDICES[op]] = torch.arange(batch - 1, -1, -1)
        out, state = kwargs["x"], kwargs[pool].clone()
        result = call(op, kwargs, backend)
        flipped = kwargs | {INDICES[op]: None, pool: state.flip(0)}
        assert_close(result, call(op, flipped, backend), tolerance(op, torch.float32))
        assert_close(kwargs[pool].flip(0), flipped[pool], tolerance(op, torch.float32))
        assert result.shape == out.shape


@both
@pytest.mark.parametrize("rows", [(-1, 3, 0, -1), (2, -1, -7, 4), (-1, -1, -1, -1)])
def test_negative_slots_are_padding(backend, op, make, pool, rows):
    """B35: -1 is no slot from the end; output 0 and every other slot untouched."""
    for out in (None, torch.full((4, 4), 9.0)):
        kwargs = make(4, slots=5) | {INDICES[op]: indices(*rows), "out": out}
        before = kwargs[pool].clone()
        results = check_update(op, kwargs, backend)
        assert not results["out"][[r < 0 for r in rows]].any()
        untouched = [slot for slot in range(5) if slot not in rows]
        assert_same(kwargs[pool][untouched], before[untouched])


@both
@pytest.mark.parametrize("extra", [1, 5])
def test_batches_padded_for_graphs(backend, op, make, pool, extra):
    """B74: a batch filled up with padding rows does to the real ones what the batch alone does."""
    kwargs = make(3, slots=9, ntokens=2, kept=2) | {INDICES[op]: indices(7, 0, 4)}
    small = kwargs | {n: kwargs[n].clone() for n in (pool, "intermediate_states")}
    alone = call(op, small, backend)
    padded = dict(kwargs)
    for name, value in kwargs.items():
        per_row = name in ("x", "dt", "z", "B", "C", "intermediate_states")
        if per_row:
            padded[name] = torch.cat(
                [value, torch.full_like(value[:1], torch.nan).expand(extra, *value.shape[1:])]
            )
    for pad, dst in itertools.product((-1, 8), (None, 0)):
        state = kwargs[pool].clone()
        run = padded | {
            pool: state,
            "pad_slot_id": pad,
            "intermediate_states": padded["intermediate_states"].clone(),
        }
        run[INDICES[op]] = indices(7, 0, 4, *[pad] * extra)
        if dst is not None:
            run[f"dst_{INDICES[op]}"] = indices(7, 0, 4, *[dst] * extra)
        result = call(op, run, backend)
        bound = tolerance(op, torch.float32)
        assert_close(result[:3], alone, bound)
        assert not result[3:].any()
        assert_close(state[[7, 0, 4]], small[pool][[7, 0, 4]], bound)
        assert_same(state[[1, 2, 3, 5, 6, 8]], kwargs[pool][[1, 2, 3, 5, 6, 8]])
        assert_close(run["intermediate_states"][:3], small["intermediate_states"], bound)


@both
def test_one_slot_for_two_rows_raises(backend, op, make, pool):
    """B37, S4: nothing is written then; reading one slot twice is fine."""
    for name, slots in ((INDICES[op], (1, 3, 1)), (f"dst_{INDICES[op]}", (4, 2, 4))):
        kwargs = make(3, slots=5) | {INDICES[op]: indices(0, 1, 2), "out": torch.full((3, 4), 9.0)}
        kwargs[name] = indices(*slots)
        before = kwargs[pool].clone()
        with pytest.raises(SlotIndexError, match=f"{name}.*twice"):
            call(op, kwargs, backend)
        assert_same(kwargs[pool], before)
        assert bool((kwargs["out"] == 9.0).all())
    kwargs = make(3, slots=5) | {INDICES[op]: indices(1, 1, 1)}
    check_update(op, kwargs | {f"dst_{INDICES[op]}": indices(1, 4, 0)}, backend)


@both
def test_pools_of_the_wrong_size_raise(backend, op, make, pool):
    """S4: an index at or past the size of the pool, fewer or more slots than rows without one."""
    kwargs = make(3, slots=5)
    for wrong in ((0, 1, 5), (2**31 - 1, 0, 1)):
        with pytest.raises(SlotIndexError, match="5 slots"):
            call(op, kwargs | {INDICES[op]: indices(*wrong)}, backend)
    with pytest.raises(ValueError, match="5 slots for batch 3"):
        call(op, kwargs, backend)


@pytest.mark.parametrize(
    "form", [{}, {"heads": HEADS}, {"heads": HEADS, "ngroups": 2}, {"ntokens": 2}]
)
def test_every_optional_argument_left_out(backend, form):
    """B51, L2: all 16 combinations of D, z, dt_bias and indices; also of tied arguments."""
    names = ("D", "z", "dt_bias", "indices")
    for given, tied in itertools.product(itertools.product([False, True], repeat=4), (False, True)):
        chosen = [n for n, used in zip(names, given, strict=True) if used]
        kwargs = state_inputs(
            options=" ".join(n for n in chosen if n != "indices"), slots=3, **form
        )
        if "indices" in chosen:
            kwargs["state_batch_indices"] = indices(2, 0, 1)
        if tied:
            for name in ("A", "dt", "dt_bias", "D"):
                if name in kwargs:
                    kwargs[name] = lay_out(kwargs[name], "one_number")
        check_update(STATE, kwargs, backend)


@both
def test_shape_errors_raise_and_print_nothing(backend, op, make, pool, capsys):
    """B52."""
    kwargs = make(3)
    for name in [n for n, v in kwargs.items() if isinstance(v, torch.Tensor)]:
        # A narrower weight fits a longer state; everything else has one size.
        narrower = kwargs[name][:-1] if name == "weight" else kwargs[name][..., :-1]
        for wrong in (narrower, kwargs[name].unsqueeze(0).unsqueeze(0)):
            with pytest.raises(StatescanError):
                call(op, kwargs | {name: wrong}, backend)
    assert capsys.readouterr() == ("", "")


@both
def test_devices_must_agree(backend, op, make, pool):
    """B55, B69: each argument on another device is named."""
    kwargs = make(3, slots=5, kept=1) | {INDICES[op]: indices(0, 1, 2), "out": torch.empty(3, 4)}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in (pool, "x"):
            with pytest.raises(DeviceError, match=name):
                call(op, kwargs | {name: value.to("meta")}, backend)


TAILS = (-103.0, -87.0, -40.0, -30.0, -20.0, -17.0, -1.0, 0.0, 19.9, 20.0, 20.1, 88.0, 1e4)


@pytest.mark.parametrize("heads", [None, (1, len(TAILS))])
def test_softplus_as_in_the_scan(backend, heads):
    """B44, S11: the same in prefill and decode, down to the smallest steps."""
    raw = torch.tensor([TAILS])
    raw = raw if heads is None else raw[:, None]
    kwargs = {"x": torch.ones_like(raw), "dt": raw, "dt_softplus": True}
    kwargs["A"] = torch.zeros(*raw.shape[1:], 1)
    kwargs["B"] = kwargs["C"] = torch.ones(1, 1)
    state = torch.zeros(1, *raw.shape[1:], 1)
    out = call(STATE, kwargs | {"ssm_state": state}, backend)
    exact = nn.functional.softplus(raw.double(), threshold=700)
    normal = exact.clamp(min=torch.finfo(torch.float32).tiny)
    assert float(((out - exact).abs() / normal).max()) < 1e-3
    assert float(((state[..., 0] - exact).abs() / normal).max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_to_nothing(backend, dtype):
    """B40, S26: large exponents, and states kept in float32 beside half-precision activations."""
    for factor in (1.0, 20.0, 1e4, 1e30):
        kwargs = state_inputs(dtype=dtype)
        kwargs["A"] = kwargs["A"] * factor
        check_update(STATE, kwargs, backend)
        assert kwargs["ssm_state"].dtype == torch.float32
        assert kwargs["ssm_state"].isfinite().all()


@both
def test_steps_have_no_gradient_and_say_so(backend, op, make, pool):
    """B63, S25: any input that requires grad raises; under no_grad it is fine."""
    kwargs = make(3, kept=1)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            asking = kwargs | {name: value.clone().requires_grad_()}
            with pytest.raises(GradientError, match="no_grad"):
                call(op, asking, backend)
            with torch.no_grad():
                call(op, asking, backend)


@both
def test_repeated_steps_give_equal_bits(backend, op, make, pool):
    """B61, B62: the same loop of steps twice, with any number of threads."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            kwargs = make(40, 1300)
            kwargs |= {"bias" if op == TAPS else "D": None}
            outs = [call(op, kwargs, backend) for _ in range(5)]
            found.append((torch.stack(outs), kwargs[pool]))
    finally:
        torch.set_num_threads(before)
    for out, state in found[1:]:
        assert_same(out, found[0][0])
        assert_same(state, found[0][1])


@pytest.mark.parametrize("width", [8, 9, 33])
def test_wide_headed_rows(backend, width):
    """B48: any headdim, dstate and number of heads."""
    for heads in ((1, 512), (3, width), (24, 1)):
        for dstate in (1, width, 257):
            check_update(STATE, state_inputs(2, dstate=dstate, heads=heads), backend)


def tiny(**changes):
    torch.manual_seed(0)
    return Mamba(**{"d_model": 12, "d_state": 4, **changes})


@pytest.mark.parametrize("seqlen", [1, 2, 29, 30, 31, 64])
@pytest.mark.parametrize("changes", [{}, {"bias": True, "d_conv": 2}, {"d_state": 1, "expand": 3}])
@torch.no_grad()
def test_steps_of_a_mixer_are_its_forward(seqlen, changes):
    """B62: all at once, in pieces of 7, token by token; twice the same bits."""
    mixer = tiny(**changes)
    hidden = Draw(1).normal(2, seqlen, 12)
    whole = mixer(hidden)
    for size in (7, 1):
        runs = []
        for _ in range(2):
            cache = mixer.allocate_inference_cache(2, seqlen)
            runs.append(torch.cat([mixer(piece, cache) for piece in hidden.split(size, 1)], 1))
        assert_same(runs[0], runs[1])
        assert_close(runs[0], whole, tolerance("mamba_inner", torch.float32))


@torch.no_grad()
def test_many_steps_of_a_mixer_are_its_forward():
    """B62: rounding does not add up over a thousand tokens."""
    mixer = tiny(d_model=4)
    hidden = Draw(1).normal(1, 1024, 4)
    cache = mixer.allocate_inference_cache(1)
    steps = torch.cat([mixer(token, cache) for token in hidden.split(1, 1)], 1)
    assert_close(steps, mixer(hidden), tolerance("mamba_inner", torch.float32))


@pytest.mark.parametrize(
    "changes", [{}, {"bias": True}, {"conv_bias": False}, {"use_fast_path": False}]
)
def test_every_parameter_of_a_mixer_learns(changes):
    """L1, B66: no parameter is left without a gradient, the output bias included."""
    mixer = tiny(**changes)
    mixer(Draw(1).normal(2, 9, 12)).square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
        assert parameter.grad.any() and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("use_fast_path", [True, False])
def test_left_padding_of_a_mixer(use_fast_path):
    """B65: sequences of 3 and 9 tokens padded to 16 are as alone, whatever pads hold."""
    mixer = tiny(use_fast_path=use_fast_path, bias=True)
    lengths = (3, 9)
    hidden = Draw(1).normal(2, 16, 12)
    seq_idx = torch.zeros(2, 16, dtype=torch.int32)
    for row, length in enumerate(lengths):
        seq_idx[row, : 16 - length] = -1
    for value in (0.0, 1e30, torch.nan):
        padded = torch.where((seq_idx < 0)[..., None], value, hidden).requires_grad_()
        out = mixer(padded, seq_idx=seq_idx)
        for row, length in enumerate(lengths):
            alone = mixer(hidden[row : row + 1, 16 - length :])
            bound = tolerance("mamba_inner", torch.float32)
            assert_close(out[row : row + 1, 16 - length :], alone, bound)
        real = (out * (seq_idx >= 0)[..., None].float()).nan_to_num().sum()
        (gradient,) = torch.autograd.grad(real, padded)
        assert gradient[seq_idx >= 0].isfinite().all()


def test_wrapped_projections_are_called():
    """B66: an adapter around any projection changes the output and learns."""

    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.inner(x) * (1 + self.scale)

    hidden = Draw(1).normal(2, 9, 12)
    plain = tiny()(hidden)
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        mixer = tiny()
        setattr(mixer, name, Adapter(getattr(mixer, name)))
        out = mixer(hidden)
        assert not torch.allclose(out, plain, rtol=1e-3), name
        out.sum().backward()
        scale = getattr(mixer, name).scale
        assert scale.grad is not None and scale.grad.item() != 0, name


def test_stacked_mixers_stay_finite_in_half_precision():
    """B21, B39: depth, bfloat16 autocast and training steps on noise."""
    torch.manual_seed(0)
    mixers = nn.ModuleList(tiny() for _ in range(6))
    optimiser = torch.optim.AdamW(mixers.parameters(), lr=1e-3)
    for step in range(8):
        hidden = Draw(step).normal(2, 40, 12)
        with torch.autocast("cpu", torch.bfloat16):
            for mixer in mixers:
                hidden = hidden + mixer(hidden)
        loss = (hidden.float() - Draw(step + 100).normal(2, 40, 12)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert loss.isfinite()
        for name, parameter in mixers.named_parameters():
            assert parameter.grad.isfinite().all(), name
        optimiser.step()


def test_states_and_decay_of_a_half_precision_mixer():
    """B21, S26: A, the bias of dt and the recurrent state are float32, also under autocast."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mixer = tiny(dtype=dtype)
        assert mixer.A_log.dtype == mixer.dt_proj.bias.dtype == torch.float32
        cache = mixer.allocate_inference_cache(2, 9)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for seqlen in (9, 1):
                mixer(Draw(seqlen, dtype).normal(2, seqlen, 12), cache)
        assert cache.ssm_state.dtype == torch.float32
        assert cache.ssm_state.any()
        rounded = cache.ssm_state.to(torch.bfloat16).float()
        assert not torch.equal(cache.ssm_state, rounded)


def test_a_scan_that_continues_in_steps(backend):
    """B62, B65: the final state of packed and padded prefill is where decoding starts."""
    kwargs = scan_inputs(2, 4, 9)
    kwargs["seq_idx"] = torch.tensor(
        [[-1, -1, -1, 0, 0, 0, 0, 0, 0], [3, 3, 1, 1, 1, 1, 1, -1, -1]]
    )
    _, states = call("selective_scan", kwargs, backend)
    step = {n: kwargs[n][..., -1] for n in ("x", "dt", "z", "B", "C")}
    step |= {n: kwargs[n] for n in ("A", "D", "dt_bias", "dt_softplus")}
    out = call(STATE, step | {"ssm_state": states.clone()}, backend)
    for row, tokens in enumerate((slice(3, 9), slice(2, 7))):
        longer = {
            n: torch.cat(
                [kwargs[n][row : row + 1, ..., tokens], kwargs[n][row : row + 1, ..., -1:]], -1
            )
            for n in ("x", "dt", "z", "B", "C")
        }
        alone = kwargs | longer | {"seq_idx": None}
        alone["initial_states"] = kwargs["initial_states"][:1] if row == 0 else None
        expected = call("selective_scan", alone, backend)[0][..., -1]
        assert_close(out[row : row + 1], expected, tolerance("selective_scan", torch.float32))
