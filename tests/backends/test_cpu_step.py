# SPDX-License-Identifier: Apache-2.0
"""Decode steps that the cpu backend runs at once: a whole mixer's and a head's.

They equal the composition that they stand for, and that runs wherever somebody watches.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch
from helpers.plans import watched_plans
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import statescan
from statescan.backends import native
from statescan.errors import ArgumentError, GradientError, ShapeError
from statescan.models import MambaConfig, MambaLM
from statescan.nn import Mamba
from statescan.ops._fused_decode import fused_linear
from statescan.testing import error

STATUS = native.status()
pytestmark = pytest.mark.skipif(
    STATUS.library is None, reason=f"the native library is not usable: {STATUS.reason}"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUSED = ("mamba_step", "mamba_stack", "vector_linear")


@pytest.fixture
def fused():
    """Names of what ran at once, in order."""
    with watched_plans() as log:
        yield Fused(log)


class Fused:
    """Compares as the list of mixers, stacks of layers and heads among the plans that ran."""

    def __init__(self, log):
        self.log = log

    def names(self):
        return [name for name in self.log.ran if name in FUSED]

    def __eq__(self, other):
        return self.names() == other

    def __repr__(self):
        return repr(self.names())


def mixer(d_model=33, dtype=torch.float32, **options):
    return Mamba(d_model, **options).to(dtype)


def double_of(module, **options):
    """The same parameters in float64."""
    wide = Mamba(module.d_model, **options).double()
    wide.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    return wide


def inputs(module, batch, tokens, dtype=torch.float32):
    return torch.randn(tokens, batch, 1, module.d_model).to(dtype)


def walk(module, tokens, cache_dtype=None):
    """Outputs and both states after some steps."""
    cache = module.allocate_inference_cache(tokens.shape[1], dtype=cache_dtype)
    with torch.no_grad():
        outputs = [module(hidden, cache) for hidden in tokens]
    return {"out": torch.cat(outputs, 1), "conv": cache.conv_state, "ssm": cache.ssm_state}


def assert_as_good_as_the_composition(module, tokens, exact, cache_dtype=None):
    """At most half as far again from float64 as the composition by the torch backend is."""
    found = walk(module, tokens, cache_dtype)
    with statescan.use_backend("torch"):
        composed = walk(module, tokens, cache_dtype)
    for name, result in found.items():
        assert result.dtype == composed[name].dtype, name
        bound = 1.5 * error(composed[name], exact[name]) + 5e-7
        assert error(result, exact[name]) <= bound, name


SIZES = list(itertools.product((16, 33, 100), (1, 16, 20), (1, 4)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d_model", "d_state", "d_conv"), SIZES)
def test_a_step_is_as_exact_as_the_composition(d_model, d_state, d_conv, dtype, level, guarded):
    options = {"d_state": d_state, "d_conv": d_conv, "bias": d_state == 16}
    module = mixer(d_model, dtype, **options)
    tokens = inputs(module, 3, 3, dtype)
    exact = walk(double_of(module, **options), tokens.double())
    assert_as_good_as_the_composition(module, tokens, exact)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"conv_bias": False},
        {"expand": 1},
        {"dt_rank": 1},
        {"dt_rank": 40},
        {"d_conv": 9},
        {"d_state": 130},
    ],
    ids=str,
)
def test_every_option_of_a_mixer(options, level, guarded, fused):
    module = mixer(**options)
    tokens = inputs(module, 2, 3)
    assert_as_good_as_the_composition(
        module, tokens, walk(double_of(module, **options), tokens.double())
    )
    assert fused == ["mamba_step"] * 3


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_up_to_16_run_at_once(dtype, batch, level, guarded, fused):
    module = mixer(dtype=dtype)
    tokens = inputs(module, batch, 2, dtype)
    assert_as_good_as_the_composition(module, tokens, walk(double_of(module), tokens.double()))
    assert fused.names().count("mamba_step") == (2 if batch <= 16 else 0)


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_have_their_own_dtype(dtype, cache_dtype, level, guarded, fused):
    module = mixer(dtype=dtype)
    tokens = inputs(module, 2, 3, dtype)
    exact = walk(double_of(module), tokens.double())
    assert_as_good_as_the_composition(module, tokens, exact, cache_dtype)
    assert fused == ["mamba_step"] * 3


def test_a_longer_convolution_state(level, fused):
    module = mixer()
    tokens, expected = inputs(module, 2, 6), []
    states = torch.zeros(2, module.d_inner, 7), torch.zeros(2, module.d_inner, 16)
    cache = module.allocate_inference_cache(2)
    with torch.no_grad():
        for hidden in tokens:
            out, conv_state, ssm_state = module.step(hidden, *states)
            assert conv_state is states[0]
            assert ssm_state is states[1]
            expected.append(module(hidden, cache))
            torch.testing.assert_close(out, expected[-1], rtol=0, atol=0)
    assert torch.equal(states[0][..., -3:], cache.conv_state)
    assert torch.equal(states[1], cache.ssm_state)


def test_the_first_call_and_later_ones_have_equal_bits(level, fused):
    module = mixer()
    token = inputs(module, 2, 1)
    found = [walk(module, token) for _ in range(3)]
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_for_any_number_of_threads(dtype, threads, level, fused):
    module = mixer(200, dtype)
    tokens = inputs(module, 3, 3, dtype)
    threads(1)
    alone = walk(module, tokens)
    for number in (2, 3):
        threads(number)
        for name, value in walk(module, tokens).items():
            assert torch.equal(value, alone[name]), (name, number)
    assert fused == ["mamba_step"] * 9


def test_a_row_cannot_spoil_another(level, fused):
    module = mixer()
    tokens = inputs(module, 3, 2)
    clean = walk(module, tokens)
    tokens[:, 1] = torch.nan
    found = walk(module, tokens)
    for name, value in found.items():
        assert torch.equal(value[[0, 2]], clean[name][[0, 2]]), name
    assert found["out"][1].isnan().all()


def test_new_weights_are_seen(fused):
    """A plan holds where things lie in general, and not what they are."""
    module = mixer()
    token = inputs(module, 2, 1)
    before = walk(module, token)["out"]
    with torch.no_grad():
        module.out_proj.weight.mul_(2)
        module.D = nn.Parameter(module.D + 1)
    after = walk(module, token)["out"]
    with statescan.use_backend("reference"):
        expected = walk(module, token)["out"]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
    assert fused == ["mamba_step"] * 2


def test_changed_states_raise_their_versions(fused):
    module = mixer()
    cache = module.allocate_inference_cache(2)
    with torch.no_grad():
        module(inputs(module, 2, 1)[0], cache)
        versions = cache.conv_state._version, cache.ssm_state._version
        module(inputs(module, 2, 1)[0], cache)
    assert cache.conv_state._version > versions[0]
    assert cache.ssm_state._version > versions[1]
    assert fused == ["mamba_step"] * 2


def test_a_state_that_a_backward_needs_is_missed(fused):
    module = mixer()
    cache = module.allocate_inference_cache(2)
    weight = torch.ones_like(cache.ssm_state, requires_grad=True)
    loss = (weight * cache.ssm_state).sum()
    with torch.no_grad():
        module(inputs(module, 2, 1)[0], cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert fused == ["mamba_step"]


class Watching(TorchDispatchMode):
    """Collects the names of the ops that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    names = {event.key for event in profile.key_averages()}
    assert {"statescan::causal_conv1d_update", "statescan::selective_state_update"} <= names


@contextmanager
def watched():
    with Watching() as mode:
        yield
    assert any(name.startswith("statescan.selective_state_update") for name in mode.names)


WATCHERS = {
    "profiler": profiled,
    "dispatch_mode": watched,
    "torch": lambda: statescan.use_backend("torch"),
}


def one_step(module, token):
    conv_state = torch.zeros(2, module.d_inner, module.d_conv - 1)
    ssm_state = torch.zeros(2, module.d_inner, module.d_state)
    out = module.step(token, conv_state, ssm_state)[0]
    return {"out": out, "conv": conv_state, "ssm": ssm_state}


def assert_same_numbers(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", WATCHERS)
def test_whoever_watches_sees_the_ops_and_gets_the_same_numbers(name, fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    with torch.no_grad():
        expected = one_step(module, token)
        assert fused == ["mamba_step"]
        with WATCHERS[name]():
            found = one_step(module, token)
    assert fused == ["mamba_step"]
    assert_same_numbers(found, expected)


def test_with_grad_mode_on_the_ops_refuse_as_ever(fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    with torch.no_grad():
        expected = one_step(module, token)
    with pytest.raises(GradientError, match="an input requires grad"):
        one_step(module, token)
    with torch.enable_grad():
        found = one_step(module.requires_grad_(False), token)
    assert fused == ["mamba_step"]
    assert_same_numbers(found, expected)


def test_autocast_takes_the_long_road(fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    with torch.no_grad():
        expected = one_step(module, token)
        with torch.autocast("cpu", torch.bfloat16):
            found = one_step(module, token)
    assert fused == ["mamba_step"]
    assert found["out"].dtype == torch.bfloat16
    assert error(found["out"], expected["out"].double()) < 0.03


def test_inference_mode_has_a_plan_of_its_own(fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    with torch.no_grad():
        expected = one_step(module, token)
    with torch.inference_mode():
        found = one_step(module, token)
    with torch.no_grad():
        again = one_step(module, token)
    assert fused == ["mamba_step"] * 3
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(again[name], value), name


def test_torch_compile_traces_the_ops(fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    compiled = torch.compile(one_step, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = one_step(module, token)
        found = compiled(module, token)
    assert fused == ["mamba_step"]
    assert_same_numbers(found, expected)


class Doubled(nn.Linear):
    """A linear layer that is not what its weight says."""

    def forward(self, value):
        return 2 * super().forward(value)


PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj", "conv1d")


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_hook_on_a_projection_runs(name, fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    with torch.no_grad():
        expected = one_step(module, token)
        seen = []
        getattr(module, name).register_forward_hook(lambda *given: seen.append(name))
        found = one_step(module, token)
    assert seen == [name]
    assert fused == ["mamba_step"]
    assert_same_numbers(found, expected)


@pytest.mark.parametrize("name", ["in_proj", "x_proj", "out_proj"])
def test_a_wrapped_projection_is_called(name, fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    plain = getattr(module, name)
    wrapped = Doubled(plain.in_features, plain.out_features, bias=False)
    wrapped.weight = plain.weight
    setattr(module, name, wrapped)
    with torch.no_grad():
        found = one_step(module, token)
        assert fused == []
        twice = nn.Linear(plain.in_features, plain.out_features, bias=False)
        twice.weight = nn.Parameter(2 * plain.weight)
        setattr(module, name, twice)
        expected = one_step(module, token)
    assert fused == ["mamba_step"]
    assert_same_numbers(found, expected)


def test_without_the_fast_path_modules_are_called(fused):
    module, token = mixer(use_fast_path=False), torch.randn(2, 1, 33)
    with torch.no_grad():
        found = one_step(module, token)
        assert fused == []
        module.use_fast_path = True
        assert_same_numbers(found, one_step(module, token))


def test_weights_in_double_take_the_long_road(fused):
    module = mixer().double()
    walk(module, torch.randn(2, 2, 1, 33, dtype=torch.float64))
    assert fused == []


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 33), (257, 100), (50, 16), (64, 515)])
def test_a_head_is_the_linear_layer(rows, width, dtype, bias, level, guarded, fused):
    for batch in (1, 2, 3, 16):
        x, weight = torch.randn(batch, width).to(dtype), torch.randn(rows, width).to(dtype)
        added = torch.randn(rows).to(dtype) if bias else None
        with torch.no_grad():
            found = fused_linear(x, weight, added)
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        assert found.dtype == dtype
        rounding = 0 if dtype == torch.float32 else 0.51 * torch.finfo(dtype).eps
        assert error(found, exact) <= rounding + 4 * torch.finfo(torch.float32).eps
    assert fused == ["vector_linear"] * 4


def test_a_head_reads_any_strides_of_what_it_is_given(level, guarded):
    x, weight = torch.randn(66, 4)[::2].t()[1:], torch.randn(20, 50)[:, 7:40]
    bias = torch.randn(60)[::3]
    with torch.no_grad():
        found = fused_linear(x, weight, bias)
        torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(17, 9), torch.randn(5, 9)),
        (torch.randn(0, 9), torch.randn(5, 9)),
        (torch.randn(2, 9), torch.randn(0, 9)),
        (torch.randn(2, 9), torch.randn(9, 5).t()),
        (torch.randn(2, 9).double(), torch.randn(5, 9).double()),
    ],
    ids=["17_rows", "no_rows", "no_columns", "other_order", "double"],
)
def test_other_heads_are_left_to_torch(x, weight, fused):
    with torch.no_grad():
        assert fused_linear(x, weight, None) is None
    assert fused == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_decodes_as_by_the_composition(dtype, level, guarded, fused):
    config = MambaConfig(d_model=32, n_layer=2, vocab_size=45)
    model = MambaLM(config, dtype=dtype).eval()
    ids = torch.randint(0, 45, (2, 5))

    def logits():
        cache = model.allocate_inference_cache(2)
        with torch.no_grad():
            return torch.cat([model(ids[:, t : t + 1], cache=cache).logits for t in range(5)], 1)

    found = logits()
    assert fused == ["mamba_stack", "vector_linear"] * 5
    with statescan.use_backend("torch"):
        composed = logits()
    assert fused == ["mamba_stack", "vector_linear"] * 5
    assert error(found, composed.double()) <= 20 * torch.finfo(dtype).eps


def test_a_hooked_head_is_called(fused):
    model = MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=45)).eval()
    seen = []
    model.lm_head.register_forward_hook(lambda *given: seen.append(1))
    with torch.no_grad():
        model(torch.tensor([[3]]), cache=model.allocate_inference_cache(1))
    assert seen == [1]
    assert fused == ["mamba_stack"]


PARTS = {
    "layer": lambda model: model.backbone.layers[0],
    "norm": lambda model: model.backbone.layers[0].norm,
    "mixer": lambda model: model.backbone.layers[1].mixer,
    "projection": lambda model: model.backbone.layers[1].mixer.x_proj,
    "final_norm": lambda model: model.backbone.norm_f,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_part_of_the_stack_runs(name, fused):
    model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=45)).eval()
    ids = torch.tensor([[3], [4]])
    with torch.no_grad():
        expected = model(ids, cache=model.allocate_inference_cache(2)).logits
        seen = []
        PARTS[name](model).register_forward_hook(lambda *given: seen.append(name))
        found = model(ids, cache=model.allocate_inference_cache(2)).logits
    assert seen == [name]
    assert fused.names().count("mamba_stack") == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_layers_of_different_form_run_one_by_one(fused):
    model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=45)).eval()
    cache = model.allocate_inference_cache(2)
    wide = model.backbone.layers[1].mixer.allocate_inference_cache(2, dtype=torch.bfloat16)
    ids = torch.tensor([[3], [4]])
    with torch.no_grad():
        expected = model(ids, cache=model.allocate_inference_cache(2)).logits
        cache = type(cache)([cache[0], wide])
        found = model(ids, cache=cache).logits
    assert fused == ["mamba_stack", "vector_linear", "mamba_step", "mamba_step", "vector_linear"]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def states(conv=(2, 66, 3), ssm=(2, 66, 16)):
    return torch.zeros(conv), torch.zeros(ssm)


BAD_STATES = {
    "conv_rows": (states(conv=(3, 66, 3)), "argument 'conv_state' has 3 slots for batch 2"),
    "too_few_rows": (states((1, 66, 3), (1, 66, 16)), "has 1 slots for batch 2"),
    "ssm_rows": (states(ssm=(1, 66, 16)), "argument 'ssm_state' has 1 slots for batch 2"),
    "short_conv": (states(conv=(2, 66, 2)), "has state_len 2 for width 4"),
    "dstate": (states(ssm=(2, 66, 15)), "(2, 66, 15)|(66, 16)"),
    "dim": (states(ssm=(2, 65, 16)), "(2, 65, 16)|(2, 66)"),
    "rank": (states(ssm=(2, 66)), "argument 'ssm_state' has shape"),
    "shared_memory": (
        (torch.zeros(1, 66, 3).expand(2, 66, 3), torch.zeros(2, 66, 16)),
        "argument 'conv_state' is an expanded view",
    ),
}


@pytest.mark.parametrize("after_a_good_call", [False, True])
@pytest.mark.parametrize("name", BAD_STATES)
def test_states_that_do_not_fit_are_refused_by_the_ops(name, after_a_good_call, fused):
    module, token = mixer(), torch.randn(2, 1, 33)
    (conv_state, ssm_state), message = BAD_STATES[name]
    with torch.no_grad():
        if after_a_good_call:
            one_step(module, token)
        with pytest.raises((ShapeError, ArgumentError), match=message):
            module.step(token, conv_state, ssm_state)
    assert fused == ["mamba_step"] * after_a_good_call


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_of_other_rows_is_refused_before_the_stack(rows, fused):
    model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=45)).eval()
    cache = model.allocate_inference_cache(rows)
    with torch.no_grad(), pytest.raises(ShapeError, match=f"'cache' holds states of {rows} rows"):
        model(torch.tensor([[3], [4]]), cache=cache)
    assert fused == []
