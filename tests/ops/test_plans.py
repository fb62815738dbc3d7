# SPDX-License-Identifier: Apache-2.0
"""The short road of decode ops: taken by calls like one that was accepted, and by no other.

Numbers are compared with the long road; what kernels compute is checked in tests/backends.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.op_inputs import state_inputs, taps_inputs
from helpers.plans import watched_plans

import statescan
from statescan import ops
from statescan.backends import native
from statescan.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradientError,
    ShapeError,
    SlotIndexError,
)
from statescan.ops import _plans
from statescan.testing import assert_close, tolerance

STATUS = native.status()
pytestmark = pytest.mark.skipif(
    STATUS.library is None, reason=f"no backend here makes plans: {STATUS.reason}"
)

STATE, CONV = "selective_state_update", "causal_conv1d_update"
POOLS = {STATE: "ssm_state", CONV: "conv_state"}
OPS = pytest.mark.parametrize("op", [STATE, CONV])


@pytest.fixture(params=["guards", "keys"])
def log(request, monkeypatch):
    """What is made and run of the cpu backend's plans; there is none of an earlier test.

    Both ways of finding a plan: by Dynamo's guards, and by the key alone where a torch has none.
    """
    monkeypatch.delenv("STATESCAN_BACKEND", raising=False)
    if request.param == "keys":
        monkeypatch.setattr(_plans, "_Guards", None)
    with watched_plans() as found:
        yield found


def make(op, **options):
    return state_inputs(3, 20, 5, **options) if op == STATE else taps_inputs(3, 20, **options)


def copies(kwargs):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}


def same_strides(tensor):
    if tensor.layout != torch.strided:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def run(op, kwargs, **more):
    """The result and the state after it; ``kwargs`` keeps its own state."""
    fresh = kwargs | {POOLS[op]: same_strides(kwargs[POOLS[op]])}
    if fresh.get("out") is not None:
        fresh["out"] = same_strides(fresh["out"])
    with torch.no_grad():
        return getattr(ops, op)(**fresh, **more), fresh[POOLS[op]]


def assert_right(op, kwargs, found):
    """By the reference, whose arithmetic is another."""
    with statescan.use_backend("reference"):
        expected = run(op, kwargs | {"backend": "reference"})
    for result, other in zip(found, expected, strict=True):
        assert_close(result, other.double(), 3 * tolerance(op, result.dtype))


@OPS
def test_the_first_call_is_accepted_and_the_second_one_takes_its_plan(op, log):
    kwargs = make(op)
    first = run(op, kwargs)
    assert (log.made, log.ran) == ([op], [])
    assert_right(op, kwargs, first)
    second = run(op, kwargs)
    assert (log.made, log.ran) == ([op], [op])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@OPS
def test_a_plan_serves_other_tensors_of_the_same_form(op, log):
    """Nothing but the form is kept: neither what the tensors hold nor where they lie."""
    first = make(op, seed=1)
    run(op, first)
    before = copies(first)
    for seed in (2, 3):
        other = make(op, seed=seed)
        assert_right(op, other, run(op, other))
    assert log.ran == [op] * 2
    for name, value in before.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(first[name], value), name


@OPS
def test_a_plan_writes_into_out_and_returns_it(op, log):
    kwargs = make(op)
    expected = run(op, kwargs)[0]
    for _ in range(3):
        out = torch.full_like(kwargs["x"], torch.nan)
        with torch.no_grad():
            result = getattr(ops, op)(**copies(kwargs), out=out)
        assert result is out
        assert torch.equal(out, expected)
    assert log.ran == [op] * 2


@OPS
def test_results_of_a_plan_have_memory_of_their_own(op, log):
    kwargs = make(op)
    results = [run(op, kwargs)[0] for _ in range(4)]
    assert len({result.data_ptr() for result in results}) == 4
    assert log.ran == [op] * 3


@OPS
def test_a_plan_tells_autograd_what_it_writes(op, log):
    kwargs = make(op) | {"out": torch.empty_like(make(op)["x"])}
    with torch.no_grad():
        getattr(ops, op)(**kwargs)
        versions = kwargs[POOLS[op]]._version, kwargs["out"]._version
        getattr(ops, op)(**kwargs)
    assert log.ran == [op]
    assert kwargs[POOLS[op]]._version > versions[0]
    assert kwargs["out"]._version > versions[1]


def wrong(op):
    """(what is wrong, changed arguments, error, message) for each kind of mistake."""
    good = make(op)
    yield "shape", {"x": good["x"][:, :-1]}, ShapeError, "argument"
    yield "batch", {"x": good["x"][:2]}, ShapeError, "argument"
    yield "dtype", {"x": good["x"].long()}, DtypeError, "argument 'x'"
    first = "ssm_state" if op == STATE else "x"
    sparse = good[first].to_sparse()
    yield "sparse", {first: sparse}, ArgumentError, f"argument '{first}' is a sparse_coo tensor"
    yield "meta", {"x": good["x"].to("meta")}, DeviceError, "argument"
    yield "no_tensor", {"x": good["x"].tolist()}, Exception, "argument 'x'"
    yield "pad", {"pad_slot_id": True}, DtypeError, "argument 'pad_slot_id' is True"
    yield "unhashable", {"pad_slot_id": [1]}, DtypeError, "argument 'pad_slot_id'"
    yield "large", {"pad_slot_id": 2**63}, ArgumentError, "must fit into 64 bits"
    yield "backend", {"backend": "warp"}, ArgumentError, "backend 'warp'"
    yield "no_name", {"backend": 1}, ArgumentError, "1"
    rows = "state_batch_indices" if op == STATE else "conv_state_indices"
    yield "slot", {rows: torch.tensor([0, 1, 9])}, SlotIndexError, "9"
    if op == STATE:
        yield "flag", {"dt_softplus": 1}, DtypeError, "argument 'dt_softplus' is 1"
        yield "text", {"dt_softplus": "true"}, DtypeError, "argument 'dt_softplus' is 'true'"
    else:
        yield "activation", {"activation": "relu"}, ArgumentError, "relu"


WRONG = [pytest.param(op, *rest, id=f"{op}-{kind}") for op in POOLS for kind, *rest in wrong(op)]


@pytest.mark.parametrize(("op", "change", "kind", "message"), WRONG)
def test_a_refused_call_makes_no_plan(op, change, kind, message, log):
    with pytest.raises(kind, match=message):
        run(op, make(op) | change)
    assert (log.made, log.ran) == ([], [])


@pytest.mark.parametrize(("op", "change", "kind", "message"), WRONG)
def test_a_wrong_call_after_a_good_one_is_still_refused(op, change, kind, message, log):
    kwargs = make(op)
    for _ in range(2):
        run(op, kwargs)
    with pytest.raises(kind, match=message) as caught:
        run(op, kwargs | change)
    assert op in str(caught.value) or "backend" in str(caught.value)
    assert (log.made, log.ran) == ([op], [op])


def negated(tensor):
    """The same numbers as a view that has still to be negated when it is read."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def every_other(tensor):
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1).flatten(-2)[..., ::2]


def forms(op):
    """Calls that differ from ``make(op)`` in one thing that a plan depends on."""
    good, pool = make(op), POOLS[op]
    yield "x_in_bfloat16", {"x": good["x"].bfloat16()}
    yield "state_in_float16", {pool: good[pool].half()}
    yield "strided_x", {"x": every_other(good["x"])}
    yield "expanded_x", {"x": good["x"][:1].expand(3, 20)}
    yield "strided_state", {pool: every_other(good[pool])}
    yield "negated_x", {"x": negated(good["x"])}
    yield "fewer_rows", {name: v[:2] for name, v in good.items() if name in ROWS}
    yield "tokens", tokens(op)
    yield "other_pad_slot", {"pad_slot_id": 2}
    yield "strided_out", {"out": every_other(torch.zeros(3, 20))}
    yield "half_out", {"out": torch.zeros(3, 20, dtype=torch.float16)}
    if op == STATE:
        yield "no_D", {"D": None}
        yield "no_z", {"z": None}
        yield "no_softplus", {"dt_softplus": False, "dt": good["dt"].abs()}
        yield "groups", {"B": good["B"][:, None]}
        yield "slots", {"state_batch_indices": torch.tensor([2, 0, 1])}
    else:
        yield "no_bias", {"bias": None}
        yield "no_activation", {"activation": None}
        yield "strided_weight", {"weight": good["weight"].t().contiguous().t()}
        yield "ring", {"cache_seqlens": torch.tensor([0, 1, 2])}
        yield "slots", {"conv_state_indices": torch.tensor([2, 0, 1])}


ROWS = ("x", "dt", "B", "C", "z", "ssm_state", "conv_state")


def tokens(op):
    kwargs = make(op, ntokens=2)
    return {name: kwargs[name] for name in ROWS if name in kwargs}


FORMS = [pytest.param(op, change, id=f"{op}-{name}") for op in POOLS for name, change in forms(op)]


@pytest.mark.parametrize(("op", "change"), FORMS)
def test_a_call_of_another_form_does_not_take_the_plan(op, change, log):
    kwargs = make(op)
    run(op, kwargs)
    other = kwargs | change
    found = run(op, other)
    assert log.ran == []
    assert_right(op, other, found)
    # Nor does the first form take that of the second.
    again = run(op, kwargs)
    assert log.ran == [op]
    assert_right(op, kwargs, again)


@contextlib.contextmanager
def threads_changed():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def in_environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATESCAN_BACKEND", "torch")
        yield


@contextlib.contextmanager
def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


SURROUNDINGS = {
    "thread_count": threads_changed,
    "use_backend": lambda: statescan.use_backend("torch"),
    "use_cpu": lambda: statescan.use_backend("cpu"),
    "environment": in_environment,
    "profiler": profiled,
    "forward_ad": torch.autograd.forward_ad.dual_level,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@OPS
def test_other_surroundings_do_not_take_the_plan(op, name, log):
    kwargs = make(op)
    run(op, kwargs)
    with SURROUNDINGS[name]():
        found = run(op, kwargs)
    assert log.ran == []
    assert_right(op, kwargs, found)


@pytest.mark.parametrize("name", ["thread_count", "use_cpu", "inference_mode"])
@OPS
def test_some_surroundings_have_plans_of_their_own(op, name, log):
    kwargs = make(op)
    with SURROUNDINGS[name]():
        for _ in range(2):
            found = run(op, kwargs)
    assert log.ran == [op]
    assert_right(op, kwargs, found)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@OPS
def test_the_argument_backend_is_kept_apart(op, backend, log):
    kwargs = make(op)
    for _ in range(2):
        run(op, kwargs, backend="cpu")
    for _ in range(2):
        assert_right(op, kwargs, run(op, kwargs, backend=backend))
    assert (log.made, log.ran) == ([op], [op])


@OPS
def test_with_grad_mode_on_gradients_are_refused_as_ever(op, log):
    kwargs = make(op)
    for _ in range(2):
        run(op, kwargs)
    learned = kwargs | {"x": kwargs["x"].requires_grad_()}
    with pytest.raises(GradientError, match="an input requires grad"):
        getattr(ops, op)(**learned)
    assert log.ran == [op]
    # Without grad mode nothing asks for a gradient, and the plan is right again.
    run(op, learned)
    assert log.ran == [op] * 2


@OPS
def test_transforms_are_refused_as_ever(op, log):
    kwargs = make(op)
    for _ in range(2):
        run(op, kwargs)

    def call(x):
        with torch.no_grad():
            return getattr(ops, op)(**(kwargs | {"x": x}))

    with pytest.raises(GradientError):
        torch.func.vmap(call)(kwargs["x"][None].repeat(2, 1, 1))
    assert log.ran == [op]


REFUSED = "was made in torch.inference_mode, and this call is not"


@OPS
def test_inference_tensors_are_refused_before_anything_is_written(op, log):
    """Outside of inference mode nobody may change one, by a plan as little as by torch."""
    kwargs = make(op)
    for _ in range(2):
        run(op, kwargs)
    with torch.inference_mode():
        pool = kwargs[POOLS[op]].clone()
    before = pool.clone()
    with torch.no_grad(), pytest.raises(ArgumentError, match=REFUSED):
        getattr(ops, op)(**(kwargs | {POOLS[op]: pool}))
    assert torch.equal(pool, before)


class Named(torch.Tensor):
    """A subclass: what it does when an op is called is its own affair."""


@OPS
def test_subclasses_take_the_long_road(op, log):
    kwargs = make(op)
    run(op, kwargs)
    run(op, kwargs | {"x": kwargs["x"].as_subclass(Named)})
    assert log.ran == []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@OPS
def test_sparse_tensors_never_reach_a_kernel(op, log):
    """Those of one kind have strides, of 0 like an expanded view's; another's raise."""
    kwargs = make(op)
    kwargs["x"] = kwargs["x"][:1, :1].expand(3, 20)
    out = torch.zeros(3, 20)
    for _ in range(2):
        run(op, kwargs, out=out)
    assert log.ran == [op]
    for sparse in (kwargs["x"].to_sparse(), kwargs["x"].to_sparse_csr()):
        with torch.no_grad():
            assert _plans.find_plan(op, (sparse,), ()) == (None, None)
        with pytest.raises((ArgumentError, DtypeError, RuntimeError)):
            run(op, kwargs | {"x": sparse}, out=out)
    assert log.ran == [op]


@OPS
def test_parameters_are_as_good_as_tensors(op, log):
    kwargs = make(op)
    run(op, kwargs)
    name = "D" if op == STATE else "bias"
    run(op, kwargs | {name: torch.nn.Parameter(kwargs[name])})
    assert log.ran == [op]


@OPS
def test_a_tensor_that_became_another_is_noticed(op, log):
    """The same Python object, with other numbers behind it or in another form."""
    kwargs = make(op)
    for _ in range(2):
        run(op, kwargs)
    kwargs["x"].data = kwargs["x"] + 1.0
    assert_right(op, kwargs, run(op, kwargs))
    assert log.ran == [op] * 2
    kwargs["x"].data = every_other(kwargs["x"])
    assert_right(op, kwargs, run(op, kwargs))
    assert log.ran == [op] * 2


@OPS
def test_one_tensor_for_two_arguments_may_take_a_plan(op, log):
    kwargs = make(op)
    if op == STATE:
        kwargs["z"] = kwargs["x"]
    else:
        kwargs["bias"] = kwargs["weight"].select(1, 0)
    for _ in range(3):
        assert_right(op, kwargs, run(op, kwargs))
    assert log.ran == [op] * 2


@torch.no_grad()
@pytest.mark.parametrize("same", [True, False])
def test_a_call_with_one_tensor_twice_is_known_again(same, monkeypatch):
    """Dynamo's guards know no call in which two tensors are one; it took the long key each time."""
    tensors = [torch.randn(2, 6), torch.randn(2, 6), torch.randn(6, 4)]
    tensors.insert(1, tensors[0] if same else torch.randn(2, 6))
    key, _ = _plans.find_plan("op", tensors, ())
    _plans.keep_plan(key, lambda: lambda given: None)
    assert _plans.find_plan("op", tensors, ())[1] is not None
    others = [torch.randn_like(t) for t in tensors]
    monkeypatch.setattr(_plans, "_is_plain", lambda tensor: pytest.fail("asked for the long key"))
    if same:
        others[1] = others[0]
    assert _plans.find_plan("op", others, ())[0] == key


@OPS
def test_no_elements_need_no_plan(op, log):
    kwargs = state_inputs(0, 20, 5) if op == STATE else taps_inputs(0, 20)
    for _ in range(2):
        out, _ = run(op, kwargs)
        assert out.shape == (0, 20)
    assert (log.made, log.ran) == ([], [])


@OPS
def test_calls_that_the_backend_refuses_are_remembered_as_without_plan(op, log):
    kwargs = make(op, dtype=torch.float64)
    for _ in range(2):
        assert_right(op, kwargs, run(op, kwargs))
    assert (log.made, log.ran) == ([], [])
    assert set(_plans._plans.found.values()) == {None}


def test_at_most_so_many_plans_are_kept(log):
    for batch in range(1, _plans._MOST_PLANS + 30):
        run(CONV, taps_inputs(batch, 1, 2))
        assert len(_plans._plans.found) <= _plans._MOST_PLANS
    assert len(log.made) == _plans._MOST_PLANS + 29
    run(CONV, taps_inputs(_plans._MOST_PLANS + 29, 1, 2))
    assert log.ran == [CONV]


@OPS
def test_threads_do_not_share_plans(op, log):
    """A plan's scratch memory is its own: four threads at once get what each would alone."""
    settings = [make(op, seed=seed) for seed in range(4)]
    together = threading.Barrier(4, timeout=60)

    def decode(kwargs, wait):
        # A new thread has torch's own settings.
        with torch.no_grad():
            torch.set_num_threads(1)
            fresh = copies(kwargs)
            wait()
            return [getattr(ops, op)(**fresh) for _ in range(300)], fresh[POOLS[op]]

    alone = [decode(kwargs, lambda: None) for kwargs in settings]
    del log.made[:]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(decode, kwargs, together.wait) for kwargs in settings]
        found = [job.result() for job in jobs]
    assert log.made == [op] * 4
    for (outs, state), (expected, expected_state) in zip(found, alone, strict=True):
        assert torch.equal(torch.stack(outs), torch.stack(expected))
        assert torch.equal(state, expected_state)


def test_only_native_backends_have_plans_and_only_for_steps():
    planned = {
        "cpu": {STATE, CONV, "mamba_step", "mamba_stack", "vector_linear"},
        "cuda": {STATE, CONV, "mamba_step"},
    }
    names = {STATE, CONV, "mamba_step", "mamba_stack", "vector_linear"}
    names |= {"selective_scan", "causal_conv1d", "mamba_inner"}
    for backend in statescan.dispatch.all_backends():
        found = {name for name in names if backend.plan(name) is not None}
        assert found == planned.get(backend.name, set())


def test_options_that_equal_each_other_as_keys_are_told_apart():
    with torch.no_grad():
        keys = [
            _plans.find_plan(STATE, (), options)[0] for options in ((True,), (1,), (0,), (False,))
        ]
    assert len(set(keys)) == 4
    assert None not in keys
