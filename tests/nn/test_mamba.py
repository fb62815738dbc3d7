# SPDX-License-Identifier: Apache-2.0
import copy
import io
import math
import pickle

import pytest
import torch
from helpers.tiny_models import tiny_mixer
from torch import Tensor, nn

from statescan.errors import ArgumentError, DtypeError, GradientError, ShapeError
from statescan.nn import InferenceCache, Mamba
from statescan.testing.compare import assert_close
from statescan.testing.tolerances import tolerance

FLOAT32 = tolerance("mamba_inner", torch.float32)
NARROW = (torch.bfloat16, torch.float16)
KEPT = ("A_log", "D", "dt_proj.bias")


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_chunks(mixer: Mamba, x: Tensor, sizes: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    cache = mixer.allocate_inference_cache(x.shape[0])
    pieces = [mixer(part, cache) for part in x.split(sizes, dim=1)]
    return torch.cat(pieces, dim=1), tuple(cache)


def test_parameters_have_the_originals_names_and_shapes() -> None:
    mixer = Mamba(20, d_state=5, d_conv=3, expand=3, bias=True)
    assert {name: tuple(p.shape) for name, p in mixer.named_parameters()} == {
        "A_log": (60, 5),
        "D": (60,),
        "in_proj.weight": (120, 20),
        "in_proj.bias": (120,),
        "conv1d.weight": (60, 1, 3),
        "conv1d.bias": (60,),
        "x_proj.weight": (12, 60),
        "dt_proj.weight": (60, 2),
        "dt_proj.bias": (60,),
        "out_proj.weight": (20, 60),
        "out_proj.bias": (20,),
    }
    assert sorted(mixer.state_dict()) == sorted(name for name, _ in mixer.named_parameters())


@pytest.mark.parametrize("dt_init", ["random", "constant"])
def test_a_seed_gives_the_originals_initial_values(dt_init: str) -> None:
    """The draws written out in order: projections, the time steps between them, out_proj last."""
    d_model, d_inner, d_state, dt_rank = 24, 48, 4, 2
    torch.manual_seed(7)
    mixer = Mamba(d_model, d_state, dt_init=dt_init, dt_scale=0.5, dt_min=0.01, dt_max=0.2)
    torch.manual_seed(7)
    expected = {
        "in_proj.weight": nn.Linear(d_model, 2 * d_inner, bias=False).weight,
    }
    conv = nn.Conv1d(d_inner, d_inner, 4, groups=d_inner, padding=3)
    expected |= {"conv1d.weight": conv.weight, "conv1d.bias": conv.bias}
    expected["x_proj.weight"] = nn.Linear(d_inner, dt_rank + 2 * d_state, bias=False).weight
    nn.Linear(dt_rank, d_inner)
    bound = 0.5 * dt_rank**-0.5
    weight = torch.full((d_inner, dt_rank), bound)
    if dt_init == "random":
        weight.uniform_(-bound, bound)
    expected["dt_proj.weight"] = weight
    low, high = math.log(0.01), math.log(0.2)
    dt = torch.exp(torch.rand(d_inner) * (high - low) + low).clamp(min=1e-4)
    expected["dt_proj.bias"] = dt + torch.log(-torch.expm1(-dt))
    expected["A_log"] = torch.log(torch.arange(1.0, 5.0)).expand(d_inner, d_state)
    expected["D"] = torch.ones(d_inner)
    expected["out_proj.weight"] = nn.Linear(d_inner, d_model, bias=False).weight
    for name, value in mixer.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert torch.allclose(nn.functional.softplus(mixer.dt_proj.bias), dt, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("seqlen", [1, 29, 30, 31, 64])
def test_forward_steps_and_chunks_agree_and_repeat_with_equal_bits(seqlen: int) -> None:
    mixer, x = tiny_mixer(), draw(2, seqlen, 16)
    whole = mixer(x)
    chunks = [min(7, seqlen - start) for start in range(0, seqlen, 7)]
    for sizes in ([seqlen], [1] * seqlen, chunks):
        out, states = in_chunks(mixer, x, sizes)
        again, states_again = in_chunks(mixer, x, sizes)
        assert_close(out, whole, FLOAT32, f"chunks of {sizes[0]}")
        assert torch.equal(out, again)
        assert all(torch.equal(a, b) for a, b in zip(states, states_again, strict=True))


@torch.no_grad()
def test_step_takes_a_longer_conv_state_and_returns_both_states() -> None:
    mixer, x = tiny_mixer(), draw(2, 6, 16)
    conv_state, ssm_state = torch.zeros(2, 32, 5), torch.zeros(2, 32, 4)
    outs = []
    for token in x.split(1, dim=1):
        out, conv_out, ssm_out = mixer.step(token, conv_state, ssm_state)
        assert conv_out is conv_state
        assert ssm_out is ssm_state
        outs.append(out)
    assert_close(torch.cat(outs, dim=1), mixer(x), FLOAT32)
    cache = mixer.allocate_inference_cache(2)
    mixer(x, cache)
    assert_close(conv_state[..., -3:], cache.conv_state, FLOAT32)


@torch.no_grad()
def test_a_chunk_fills_the_end_of_a_longer_conv_state() -> None:
    mixer, x = tiny_mixer(), draw(2, 6, 16)
    usual = mixer.allocate_inference_cache(2)
    longer = mixer.allocate_inference_cache(2)._replace(conv_state=torch.ones(2, 32, 5))
    longer.conv_state[..., 2:] = 0
    first = mixer(x[:, :4], longer)
    assert torch.equal(first, mixer(x[:, :4], usual))
    assert torch.equal(longer.conv_state[..., 2:], usual.conv_state)
    assert torch.equal(mixer(x[:, 4:], longer), mixer(x[:, 4:], usual))


@torch.no_grad()
@pytest.mark.parametrize("d_conv", [1, 2, 5])
def test_any_width_of_the_convolution(d_conv: int) -> None:
    mixer, x = tiny_mixer(d_conv=d_conv), draw(2, 9, 16)
    assert_close(in_chunks(mixer, x, [1, 4, 1, 3])[0], mixer(x), FLOAT32)


@torch.no_grad()
def test_no_tokens_change_no_state() -> None:
    mixer = tiny_mixer()
    cache = mixer.allocate_inference_cache(2)
    mixer(draw(2, 3, 16), cache)
    before = cache.clone()
    assert mixer(draw(2, 0, 16), cache).shape == (2, 0, 16)
    assert all(torch.equal(a, b) for a, b in zip(cache, before, strict=True))
    assert mixer(draw(0, 3, 16)).shape == (0, 3, 16)


@torch.no_grad()
@pytest.mark.parametrize("call_modules", [False, True])
def test_left_padding_changes_nothing_even_if_it_holds_nan(call_modules: bool) -> None:
    mixer = tiny_mixer(bias=True)
    nn.init.normal_(mixer.out_proj.bias)
    if call_modules:
        mixer.conv1d.register_forward_hook(lambda *_: None)
    lengths, width = (3, 9, 16), 16
    rows = [draw(1, length, 16, seed=length) for length in lengths]
    padded = torch.full((3, width, 16), math.nan)
    seq_idx = torch.full((3, width), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        padded[i, width - row.shape[1] :] = row[0]
        seq_idx[i, width - row.shape[1] :] = i
    cache = mixer.allocate_inference_cache(3)
    if call_modules:
        padded = padded.nan_to_num(0.0)
    out = mixer(padded, cache, seq_idx=seq_idx)
    for i, row in enumerate(rows):
        alone = mixer.allocate_inference_cache(1)
        assert_close(out[i : i + 1, width - row.shape[1] :], mixer(row, alone), FLOAT32)
        assert_close(cache.ssm_state[i : i + 1], alone.ssm_state, FLOAT32)
        assert_close(cache.conv_state[i : i + 1], alone.conv_state, FLOAT32)
        assert not out[i, : width - row.shape[1]].any()


@pytest.mark.parametrize("wrapped", ["nothing", "conv1d", "x_proj"])
def test_packed_sequences_run_as_if_alone(wrapped: str) -> None:
    mixer = tiny_mixer()
    if wrapped != "nothing":
        mixer.get_submodule(wrapped).register_forward_hook(lambda *_: None)
    lengths = [4, 1, 0, 6]
    parts = [draw(1, length, 16, seed=length + 5) for length in lengths]
    packed = torch.cat(parts, dim=1).requires_grad_()
    cu_seqlens = torch.tensor([0, 4, 5, 5, 11], dtype=torch.int32)
    cache = mixer.allocate_inference_cache(4)
    out = mixer(packed, cache, cu_seqlens=cu_seqlens)
    ids = torch.tensor([[0] * 4 + [1] + [3] * 6])
    assert_close(mixer(packed, seq_idx=ids), out, FLOAT32)
    out.square().sum().backward()
    assert packed.grad is not None
    for i, (part, found) in enumerate(zip(parts, out.split(lengths, dim=1), strict=True)):
        part.requires_grad_()
        alone = mixer.allocate_inference_cache(1)
        expected = mixer(part, alone)
        assert_close(found, expected, FLOAT32)
        assert_close(cache.conv_state[i : i + 1], alone.conv_state, FLOAT32)
        assert_close(cache.ssm_state[i : i + 1], alone.ssm_state, FLOAT32)
        expected.square().sum().backward()
    grads = torch.cat([part.grad for part in parts if part.grad is not None], dim=1)
    assert_close(packed.grad, grads, tolerance("mamba_inner", torch.float32, gradient=True))


def test_a_cache_continues_in_training_and_carries_values_only() -> None:
    mixer, x = tiny_mixer(), draw(2, 10, 16)
    cache = mixer.allocate_inference_cache(2)
    first, second = mixer(x[:, :6], cache), mixer(x[:, 6:], cache)
    assert_close(torch.cat((first, second), dim=1), mixer(x), FLOAT32)
    assert not cache.ssm_state.requires_grad
    assert not cache.conv_state.requires_grad
    (first.sum() + second.sum()).backward()
    assert mixer.A_log.grad is not None
    assert mixer.A_log.grad.abs().sum() > 0


def test_fused_and_called_modules_agree_in_values_and_gradients() -> None:
    grads, outs = [], []
    for use_fast_path in (True, False):
        mixer = tiny_mixer(bias=True, use_fast_path=use_fast_path)
        out = mixer(draw(2, 13, 16))
        out.square().sum().backward()
        outs.append(out)
        grads.append({name: p.grad for name, p in mixer.named_parameters()})
    assert_close(outs[1], outs[0], FLOAT32)
    for name, expected in grads[0].items():
        found = grads[1][name]
        assert expected is not None, name
        assert found is not None, name
        assert_close(found, expected, tolerance("mamba_inner", torch.float32, gradient=True), name)


class LowRank(nn.Module):
    """What parameter-efficient training puts around a Linear."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.up = nn.Parameter(torch.full((base.out_features, 2), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T


PROJECTIONS = ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")


@pytest.mark.parametrize("name", ["in_proj", "x_proj", "dt_proj", "out_proj"])
def test_a_wrapped_projection_changes_the_output_and_learns(name: str) -> None:
    mixer, x = tiny_mixer(), draw(2, 5, 16)
    plain = mixer(x)
    setattr(mixer, name, LowRank(mixer.get_submodule(name)))
    out = mixer(x)
    assert not torch.allclose(out, plain)
    out.square().sum().backward()
    for parameter_name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name
    with torch.no_grad():
        assert_close(in_chunks(mixer, x, [2, 1, 1, 1])[0], out, FLOAT32)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_on_a_projection_run(name: str, kind: str) -> None:
    mixer, calls = tiny_mixer(), []
    hooked = mixer.get_submodule(name)
    getattr(hooked, f"register_{kind}")(lambda *_: calls.append(name))
    mixer(draw(1, 3, 16).requires_grad_()).sum().backward()
    assert calls == [name]


@pytest.mark.parametrize("name", PROJECTIONS)
@torch.no_grad()
def test_a_replaced_forward_is_called_in_forward_and_step(name: str) -> None:
    mixer, calls = tiny_mixer(), []
    module = mixer.get_submodule(name)
    inner = module.forward

    def forward(*args: Tensor) -> Tensor:
        calls.append(name)
        return inner(*args)

    module.forward = forward
    x = draw(2, 2, 16)
    cache = mixer.allocate_inference_cache(2)
    out = torch.cat([mixer(x[:, :1], cache), mixer(x[:, 1:], cache)], dim=1)
    assert calls == [name, name]
    assert_close(out, tiny_mixer()(x), FLOAT32)


@pytest.mark.parametrize("name", ["x_proj", "conv1d"])
def test_a_parametrised_weight_is_used(name: str) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    mixer, reference, x = tiny_mixer(), tiny_mixer(), draw(1, 4, 16)
    nn.utils.parametrize.register_parametrization(mixer.get_submodule(name), "weight", Double())
    with torch.no_grad():
        reference.get_submodule(name).weight.mul_(2)
        assert_close(mixer(x), reference(x), FLOAT32)


@pytest.mark.parametrize("dtype", NARROW)
def test_state_space_parameters_stay_float32(dtype: torch.dtype) -> None:
    built = tiny_mixer(dtype=dtype)
    moved = tiny_mixer()
    exact = {name: moved.get_parameter(name).detach().clone() for name in KEPT}
    moved = moved.to(dtype)
    for mixer in (built, moved, tiny_mixer().type(dtype)):
        for name, parameter in mixer.named_parameters():
            assert parameter.dtype == (torch.float32 if name in KEPT else dtype), name
            assert getattr(parameter, "_no_weight_decay", False) == (name in KEPT), name
    for name in KEPT:
        assert torch.equal(moved.get_parameter(name), exact[name]), f"{name} was rounded"


def test_gradients_follow_the_dtype_of_their_parameters() -> None:
    mixer = tiny_mixer()
    mixer(draw(1, 3, 16)).sum().backward()
    for name, parameter in mixer.bfloat16().named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype, name


def test_double_is_double_throughout() -> None:
    for mixer in (tiny_mixer().double(), tiny_mixer(dtype=torch.float64)):
        assert {p.dtype for p in mixer.parameters()} == {torch.float64}
        assert mixer.allocate_inference_cache(1).ssm_state.dtype == torch.float64
    assert {p.dtype for p in tiny_mixer().double().float().parameters()} == {torch.float32}


def test_loading_a_half_precision_state_dict_keeps_the_rule() -> None:
    narrow = {name: value.bfloat16() for name, value in tiny_mixer(seed=3).state_dict().items()}
    for assign in (False, True):
        mixer = tiny_mixer(dtype=torch.bfloat16)
        mixer.load_state_dict(narrow, assign=assign)
        for name in KEPT:
            parameter = mixer.get_parameter(name)
            assert parameter.dtype == torch.float32, name
            assert torch.equal(parameter, narrow[name].float()), name
            assert parameter._no_weight_decay, name
    assert narrow["A_log"].dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("dtype", NARROW)
def test_half_precision_runs_with_float32_states(dtype: torch.dtype) -> None:
    mixer, x = tiny_mixer(), draw(2, 12, 16)
    exact = mixer(x)
    mixer, x = mixer.to(dtype), x.to(dtype)
    for call_modules in (False, True):
        mixer.use_fast_path = not call_modules
        out, (conv_state, ssm_state) = in_chunks(mixer, x, [5, 1, 6])
        assert out.dtype == conv_state.dtype == dtype
        assert ssm_state.dtype == torch.float32
        assert_close(out, exact, 5 * tolerance("mamba_inner", dtype))


@torch.no_grad()
def test_autocast_takes_float32_input() -> None:
    mixer, x = tiny_mixer(), draw(2, 7, 16)
    exact = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mixer(x)
        chunked, _ = in_chunks(mixer, x, [3, 1, 3])
    narrow = tolerance("mamba_inner", torch.bfloat16)
    assert_close(out, exact, 5 * narrow)
    assert_close(chunked, exact, 5 * narrow)


def test_copies_equal_the_original_and_keep_the_marks() -> None:
    mixer, x = tiny_mixer(), draw(1, 5, 16)
    stream = io.BytesIO()
    torch.save(mixer, stream)
    stream.seek(0)
    copies = (
        copy.deepcopy(mixer),
        pickle.loads(pickle.dumps(mixer)),
        torch.load(stream, weights_only=False),
    )
    for twin in copies:
        assert torch.equal(twin(x), mixer(x))
        assert all(twin.get_parameter(name)._no_weight_decay for name in KEPT)
        twin.A_log.data.add_(1)
        assert not torch.equal(twin(x), mixer(x))


@torch.no_grad()
def test_a_mixer_finds_its_layer_in_a_cache_of_all() -> None:
    mixer, x = tiny_mixer(layer_idx=1), draw(2, 4, 16)
    cache = InferenceCache([tiny_mixer().allocate_inference_cache(2) for _ in range(2)])
    assert_close(torch.cat([mixer(x[:, :3], cache), mixer(x[:, 3:], cache)], 1), mixer(x), FLOAT32)
    assert not cache[0].ssm_state.any()
    assert cache[1].ssm_state.any()


@torch.no_grad()
def test_cache_dtypes_and_sizes() -> None:
    cache = tiny_mixer(dtype=torch.bfloat16, d_conv=3).allocate_inference_cache(5, max_seqlen=100)
    assert (tuple(cache.conv_state.shape), cache.conv_state.dtype) == ((5, 32, 2), torch.bfloat16)
    assert (tuple(cache.ssm_state.shape), cache.ssm_state.dtype) == ((5, 32, 4), torch.float32)
    chosen = tiny_mixer().allocate_inference_cache(1, dtype=torch.float16)
    assert {state.dtype for state in chosen} == {torch.float16}


def test_step_refuses_to_cut_gradients_silently() -> None:
    mixer = tiny_mixer()
    with pytest.raises(GradientError, match="no_grad"):
        mixer.step(draw(2, 1, 16), *mixer.allocate_inference_cache(2))


def test_a_single_token_with_cache_is_differentiable() -> None:
    mixer = tiny_mixer()
    mixer(draw(2, 1, 16), mixer.allocate_inference_cache(2)).sum().backward()
    assert all(p.grad is not None for p in mixer.parameters())


# Dynamo itself instantiates autograd functions, which torch warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_a_graph_break() -> None:
    mixer, x = tiny_mixer(), draw(2, 6, 16)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=True)
    assert_close(compiled(x), mixer(x), FLOAT32)
    with torch.no_grad():
        one, two = mixer.allocate_inference_cache(2), mixer.allocate_inference_cache(2)
        for part in x.split([3, 1, 2], dim=1):
            assert_close(compiled(part, one), mixer(part, two), FLOAT32)


BAD_CALLS = [
    (ShapeError, r"hidden_states.*\n.*d_model=16", lambda m: m(draw(2, 16))),
    (ShapeError, r"hidden_states.*\n.*d_model=16", lambda m: m(draw(2, 3, 15))),
    (DtypeError, r"bfloat16.*\n.*float32", lambda m: m(draw(2, 3, 16).bfloat16())),
    (ShapeError, r"batch, 1, d_model=16", lambda m: m.step(draw(2, 2, 16), *CACHE(m, 2))),
    (ShapeError, r"states of 3 rows.*\n.*needs 2", lambda m: m(draw(2, 3, 16), CACHE(m, 3))),
    (ArgumentError, "layer_idx", lambda m: m(draw(2, 3, 16), InferenceCache([CACHE(m, 2)]))),
    (
        ArgumentError, "states of 1 layers, and layer_idx is 5",
        lambda m: tiny_mixer(layer_idx=5)(draw(2, 3, 16), InferenceCache([CACHE(m, 2)])),
    ),
    (DtypeError, "'hidden_states' is a list", lambda m: m([1.0])),
    (DtypeError, "'hidden_states' is a list", lambda m: m.step([1.0], *CACHE(m, 2))),
    (
        DtypeError, r"step.*float64.*\n.*float32",
        lambda m: m.step(draw(2, 1, 16).double(), *CACHE(m, 2)),
    ),
    (DtypeError, "'cache' is a tuple", lambda m: m(draw(2, 3, 16), tuple(CACHE(m, 2)))),
    (DtypeError, "'cache' is a int", lambda m: m(draw(2, 3, 16), 2)),
    (
        DtypeError, "'cu_seqlens' is a list",
        lambda m: m(draw(1, 3, 16), CACHE(m, 1), cu_seqlens=[0, 3]),
    ),
    (ArgumentError, "batch_size=-1", lambda m: CACHE(m, -1)),
    (ArgumentError, "batch_size=2.0", lambda m: CACHE(m, 2.0)),
    (ArgumentError, "made in torch.inference_mode", lambda m: m(draw(2, 3, 16), FROZEN(m))),
    (ArgumentError, "made in torch.inference", lambda m: no_grad(m, draw(2, 1, 16), FROZEN(m))),
    (GradientError, "ssm_state of 'cache' requires grad", lambda m: m(draw(2, 3, 16), LEARNED(m))),
]  # fmt: skip


@torch.no_grad()
def no_grad(mixer: Mamba, *args):
    return mixer(*args)


def FROZEN(mixer: Mamba):  # noqa: N802
    with torch.inference_mode():
        return CACHE(mixer, 2)


def LEARNED(mixer: Mamba):  # noqa: N802
    cache = CACHE(mixer, 2)
    cache.ssm_state.requires_grad_()
    return cache


def CACHE(mixer: Mamba, rows: int):  # noqa: N802
    return mixer.allocate_inference_cache(rows)


@pytest.mark.parametrize(("kind", "message", "call"), BAD_CALLS)
def test_bad_input_is_refused_before_anything_is_written(kind, message, call) -> None:
    mixer = tiny_mixer()
    with pytest.raises(kind, match=message) as caught:
        call(mixer)
    assert str(caught.value).count("\n") < 6


@pytest.mark.parametrize(
    "arguments",
    [{"d_state": 0}, {"d_conv": 0}, {"dt_rank": 0}, {"expand": 0}, {"d_state": 1.5},
     {"dt_init": "zero"}, {"dt_min": 0.0}, {"dt_min": 1.0, "dt_max": 0.1}, {"d_model": "16"},
     {"d_model": None}, {"d_model": 16.0}, {"expand": math.nan}, {"expand": math.inf},
     {"expand": "2"}, {"expand": -1.0}],
)  # fmt: skip
def test_bad_sizes_are_refused(arguments) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ArgumentError, match=f"{name}={value!r}"):
        tiny_mixer(**arguments)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool])
def test_dtypes_that_cannot_hold_weights_are_refused(dtype) -> None:
    with pytest.raises(DtypeError, match=f"dtype={str(dtype).removeprefix('torch.')}"):
        tiny_mixer(dtype=dtype)


PACKINGS = [
    (ShapeError, "'seq_idx' has shape", {"seq_idx": torch.zeros(2, 4, dtype=torch.int32)}),
    (DtypeError, "'seq_idx' has dtype float32", {"seq_idx": torch.zeros(2, 5)}),
    (DtypeError, "'seq_idx' is a list", {"seq_idx": [[0] * 5] * 2}),
    (ArgumentError, "batch 2", {"cu_seqlens": torch.tensor([0, 5])}),
    (DtypeError, "'cu_seqlens' is a list", {"cu_seqlens": [0, 5]}),
    (DtypeError, "'cu_seqlens' has dtype float32", {"cu_seqlens": torch.tensor([0.0, 5.0])}),
    (ArgumentError, r"is \[0, 4, 2, 5\]", {"cu_seqlens": torch.tensor([0, 4, 2, 5])}),
    (ArgumentError, r"is \[0, 9\]", {"cu_seqlens": torch.tensor([0, 9])}),
    (
        ArgumentError, "are both given",
        {"seq_idx": torch.zeros(1, 5, dtype=torch.int32), "cu_seqlens": torch.tensor([0, 5])},
    ),
]  # fmt: skip


@pytest.mark.parametrize("road", ["fused", "called", "hooked"])
@pytest.mark.parametrize(("kind", "message", "packing"), PACKINGS)
def test_wrong_packing_is_named_on_every_road(kind, message, packing, road) -> None:
    """Also where the convolution is a module that is called for each sequence."""
    mixer = tiny_mixer(use_fast_path=road == "fused")
    if road == "hooked":
        mixer.conv1d.register_forward_hook(lambda *args: None)
    alone = "cu_seqlens" in packing and "batch 2" not in message
    batch = 1 if alone else 2
    with pytest.raises(kind, match=message) as caught:
        mixer(draw(batch, 5, 16), **packing)
    assert str(caught.value).count("\n") < 6
