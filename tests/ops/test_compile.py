# SPDX-License-Identifier: Apache-2.0
"""torch.compile of every op: whole graphs, dynamic shapes, equal bits, decode states in place.

Exported programs are in test_export.py; transforms inside compiled code in test_vmap.py.
"""

from __future__ import annotations

import pytest
import torch
from helpers.differential import leaves_of, tensors_of
from helpers.integration import (
    SEQUENCE_OPS,
    TORCH_VERSION,
    TORCH_WARNINGS,
    UPDATES,
    as_tuple,
    assert_equal,
    backend_calls,
    distinct_cases,
    make,
    public,
    run,
    run_sequence,
    weigh,
)
from helpers.op_inputs import conv_inputs, inner_inputs, scan_inputs, state_inputs, taps_inputs
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import statescan
from statescan.errors import StatescanError

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", dynamic=True):
    """The function as one graph; a plain function around it, since Dynamo compiles no packet."""
    return torch.compile(
        lambda **kwargs: function(**kwargs), backend=backend, fullgraph=True, dynamic=dynamic
    )


@pytest.mark.parametrize("case", distinct_cases(), ids=str)
def test_every_case_is_one_graph(case):
    """Results have the bits and strides of eager ones; gradients the values, since AOTAutograd
    may hand over the results' gradients in another layout, which changes the order of sums.
    """
    kwargs = make(case.op, case.name)
    expected = run(case.op, public(case.op), kwargs)
    found = run(case.op, compiled(public(case.op)), kwargs)
    gradients = [name for name in found if name.startswith("d") and name not in kwargs]
    for name in gradients:
        torch.testing.assert_close(found.pop(name), expected.pop(name), rtol=1e-4, atol=1e-5)
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("selective_scan", "all_options"),
        ("causal_conv1d", "channel_last"),
        ("mamba_inner", "norms_out_proj"),
        ("selective_state_update", "usual"),
        ("causal_conv1d_update", "bias_silu"),
    ],
)
def test_inductor(op, name):
    """Code of inductor around the op, forward and backward."""
    kwargs = make(op, name)

    def busy(**kw):
        x = "xz" if op == "mamba_inner" else "x"
        results = public(op)(**{**kw, x: kw[x] * 2 + 1})
        return tuple(result * 3 for result in as_tuple(results))

    def step(**kw):
        return busy(**kw)[0]

    function = step if op in UPDATES else busy
    expected = run(op, function, kwargs)
    found = run(op, compiled(function, "inductor"), kwargs)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)


# All sizes differ, since Dynamo takes equal ones for the same.
DISTINCT = {
    "selective_scan": scan_inputs(5, 6, 13, 3, ngroups=2, options="D z dt_bias"),
    "causal_conv1d": conv_inputs(5, 6, 13, 4, options="bias"),
    "mamba_inner": inner_inputs(
        5, 6, 13, 3, 4, 2, 7, options="conv_bias D dt_bias out_proj_weight"
    ),
    "selective_state_update": state_inputs(5, 6, 3, ngroups=2),
    "causal_conv1d_update": taps_inputs(5, 6, 4, state_len=7),
}


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_new_sizes_need_no_new_graph(op):
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(public(op), counter)
    kwargs = DISTINCT[op]
    activations = [name for name, tensor in tensors_of(kwargs).items() if tensor.shape[-1] == 13]
    graphs = []
    # A length up to the first saved state and one beyond it may differ, as sizes 0 and 1 do.
    for repeats in (1, 5, 2, 9, 7):
        longer = {
            n: torch.cat([v] * repeats, -1) if n in activations else v for n, v in kwargs.items()
        }
        assert_equal(run(op, function, longer), run(op, public(op), longer))
        graphs.append(counter.frame_count)
    assert graphs[1:] == [graphs[1]] * 4


@pytest.mark.parametrize("op", UPDATES)
def test_new_decode_batches_need_no_new_graph(op):
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(public(op), counter)
    kwargs = DISTINCT[op]
    rows = [name for name, tensor in tensors_of(kwargs).items() if tensor.shape[0] == 5]
    for repeats in (1, 2, 5):
        wider = {n: torch.cat([v] * repeats) if n in rows else v for n, v in kwargs.items()}
        assert_equal(run(op, function, wider), run(op, public(op), wider))
    assert counter.frame_count == 1


def test_only_the_final_state_is_used():
    def final(**kwargs):
        return public("selective_scan")(**kwargs)[1]

    kwargs = make("selective_scan", "all_options")
    assert_equal(run_sequence(compiled(final), kwargs), run_sequence(final, kwargs))


def test_training_saves_states_and_inference_does_not():
    kwargs = make("selective_scan", "several_chunks")
    function = compiled(public("selective_scan"))
    with backend_calls() as ran, torch.no_grad():
        function(**{**kwargs, **leaves_of(kwargs)})
    assert [call.args[-1] for call in ran] == [False]
    with backend_calls() as ran:
        run_sequence(function, kwargs)
    forward, backward = ran
    assert (forward.direction, forward.args[-1], backward.direction) == ("fwd", True, "bwd")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_compile(use_reentrant):
    kwargs = make("selective_scan", "all_options")

    def twice(**kw):
        return public("selective_scan")(**kw)

    def saved(**kw):
        return checkpoint(lambda x: twice(**{**kw, "x": x}), kw["x"], use_reentrant=use_reentrant)

    full = torch.compile(lambda **kw: saved(**kw), backend="aot_eager", fullgraph=not use_reentrant)
    assert_equal(run_sequence(full, kwargs), run_sequence(twice, kwargs))


@pytest.mark.skipif(
    TORCH_VERSION < (2, 5), reason=f"torch {torch.__version__} cannot compile while it recomputes"
)
def test_checkpoint_around_compile():
    kwargs = make("mamba_inner", "usual")
    function = compiled(public("mamba_inner"))

    def saved(**kw):
        return checkpoint(lambda xz: function(**{**kw, "xz": xz}), kw["xz"], use_reentrant=False)

    assert_equal(run_sequence(saved, kwargs), run_sequence(public("mamba_inner"), kwargs))


class Mixer(torch.nn.Module):
    """The smallest module whose parameters are used by mamba_inner."""

    def __init__(self):
        super().__init__()
        kwargs = make("mamba_inner", "usual")
        self.options = {n: v for n, v in kwargs.items() if not isinstance(v, torch.Tensor)}
        self.names = [n for n in tensors_of(kwargs) if n != "xz"]
        for name in self.names:
            setattr(self, name, torch.nn.Parameter(kwargs[name]))
        self.project = torch.nn.Linear(5, 12, dtype=torch.float32)

    def forward(self, hidden):
        xz = self.project(hidden).transpose(1, 2)
        weights = {name: getattr(self, name) for name in self.names}
        return hidden + statescan.mamba_inner(xz, **weights, **self.options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_many_training_steps_equal_eager(backend):
    """B58: compiled training does not drift away or turn into NaN."""
    losses = {}
    for name, wrap in (
        ("eager", lambda m: m),
        ("compiled", lambda m: torch.compile(m, backend=backend, fullgraph=True)),
    ):
        torch.manual_seed(0)
        model = Mixer()
        step = wrap(model)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        data = torch.randn(2, 9, 5)
        losses[name] = []
        for _ in range(50):
            optimiser.zero_grad()
            loss = (step(data) - data.roll(1, 1)).square().mean()
            loss.backward()
            optimiser.step()
            losses[name].append(loss.detach())
    found, expected = torch.stack(losses["compiled"]), torch.stack(losses["eager"])
    assert float(expected[-1]) < float(expected[0])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def decode_loop(conv_state, ssm_state, tokens, weight, A):
    """Steps of both updates in one graph, with reads of the states between and after them."""
    outputs = []
    for token in tokens.unbind(0):
        before = conv_state.sum()
        x = statescan.causal_conv1d_update(token, conv_state, weight, activation="silu")
        ones = torch.ones(x.shape[0], A.shape[1])
        y = statescan.selective_state_update(ssm_state, x, x, A, ones, ones, dt_softplus=True)
        outputs.append(y + before + conv_state.sum() + ssm_state.sum())
    return torch.stack(outputs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_decode_updates_the_states_in_place(backend):
    """The states keep their memory, and reads around an update see the right values."""
    conv_state, ssm_state = torch.randn(3, 4, 3), torch.randn(3, 4, 2)
    fixed = (torch.randn(2, 3, 4), torch.randn(4, 4), -torch.rand(4, 2))
    eager = (conv_state.clone(), ssm_state.clone())
    loop = torch.compile(decode_loop, backend=backend, fullgraph=True, dynamic=True)
    places = (conv_state.data_ptr(), ssm_state.data_ptr())
    with torch.no_grad():
        for _ in range(3):
            found = loop(conv_state, ssm_state, *fixed)
            torch.testing.assert_close(found, decode_loop(*eager, *fixed))
            torch.testing.assert_close((conv_state, ssm_state), eager)
            assert (conv_state.data_ptr(), ssm_state.data_ptr()) == places


def test_inductor_does_not_copy_the_state_pool():
    """The op that runs is given the caller's own pool, not a copy that is copied back."""
    kwargs = state_inputs(2, 4, 3, slots=64) | {"state_batch_indices": torch.tensor([5, 9])}
    step = compiled(public("selective_state_update"), "inductor")
    with torch.no_grad(), backend_calls() as ran:
        step(**kwargs)
    assert [call.args[0].data_ptr() for call in ran] == [kwargs["ssm_state"].data_ptr()]


@pytest.mark.parametrize("op", UPDATES)
def test_out_is_written_by_compiled_code(op):
    kwargs = make(op, "out")
    kwargs["out"].fill_(torch.nan)
    expected = run(op, public(op), kwargs)
    place = kwargs["out"].data_ptr()
    with torch.no_grad():
        result = compiled(public(op), "inductor")(**kwargs)
    assert kwargs["out"].data_ptr() == place
    assert_equal({"a": kwargs["out"], "b": result}, {"a": expected["out"], "b": expected["out"]})


def test_choice_of_backend_is_made_when_the_graph_runs(monkeypatch):
    """use_backend and the environment act on code that was compiled before (contracts.md)."""
    kwargs = make("causal_conv1d", "bias_silu")
    function = compiled(public("causal_conv1d"))
    function(**kwargs)
    with statescan.use_backend("reference"), backend_calls() as ran:
        function(**kwargs)
    assert [call.backend for call in ran] == ["reference"]
    monkeypatch.setenv("STATESCAN_BACKEND", "no_such_backend")
    with pytest.raises(ValueError, match="STATESCAN_BACKEND, is not known"):
        function(**kwargs)


def test_argument_backend_is_compiled_in():
    kwargs = make("causal_conv1d", "bias_silu")
    with backend_calls() as ran:
        run_sequence(compiled(public("causal_conv1d")), {**kwargs, "backend": "reference"})
    assert [call.backend for call in ran] == ["reference", "reference"]


@pytest.mark.skipif(
    TORCH_VERSION < (2, 5), reason=f"Dynamo of torch {torch.__version__} cannot trace a raise"
)
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("op", "change", "text"),
    [
        ("selective_scan", {"D": torch.ones(5)}, "argument 'D' has shape"),
        ("causal_conv1d", {"activation": "gelu"}, "argument 'activation' is 'gelu'"),
        ("causal_conv1d", {"weight": torch.ones(6, 4, dtype=torch.int64)}, "has dtype int64"),
        ("selective_state_update", {"A": torch.ones(6, 4, requires_grad=True)}, r"torch\.no_grad"),
    ],
)
def test_errors_of_traced_checks_reach_the_user(op, change, text, fullgraph):
    """The message is readable; without fullgraph even the class of the error is kept."""
    kwargs = {**make(op, "bare"), **change}
    function = torch.compile(
        lambda **kw: public(op)(**kw), backend="aot_eager", fullgraph=fullgraph, dynamic=True
    )
    with pytest.raises(Exception, match=text) as caught:
        function(**kwargs)
    if not fullgraph:
        assert isinstance(caught.value, StatescanError)


def test_errors_of_values_reach_the_user():
    """Values of index tensors are looked at when the graph runs, before anything is written."""
    kwargs = make("selective_state_update", "read_only")
    kwargs["state_batch_indices"] = torch.tensor([0, 1, 99])
    before = kwargs["ssm_state"].clone()
    with pytest.raises(IndexError, match="holds slot 99"), torch.no_grad():
        compiled(public("selective_state_update"), "inductor")(**kwargs)
    assert torch.equal(kwargs["ssm_state"], before)


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_compiled_autograd(op):
    """The backward of an eager forward, traced when it runs."""
    kwargs = make(op, "bare")
    expected = run_sequence(public(op), kwargs)
    leaves = leaves_of(kwargs)
    loss = weigh(public(op)(**{**kwargs, **leaves}))
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    with enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    for name, leaf in leaves.items():
        assert_equal({name: leaf.grad}, {name: expected[f"d{name}"]})


@pytest.mark.skipif(
    TORCH_VERSION < (2, 5), reason=f"torch {torch.__version__} mixes up its fake tensors there"
)
def test_compiled_autograd_of_a_compiled_forward():
    kwargs = make("mamba_inner", "usual")
    expected = run_sequence(public("mamba_inner"), kwargs)
    leaves = leaves_of(kwargs)

    def train(**kw):
        loss = weigh(public("mamba_inner")(**kw))
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(train, backend="aot_eager")(**{**kwargs, **leaves})
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, expected[f"d{name}"])


def test_packed_tokens_of_unknown_number():
    """A length that depends on data is traced without a guess."""
    kwargs = make("selective_scan", "cu_seqlens")
    tokens = ("x", "dt", "z", "B", "C")

    def keep_some(mask, **kw):
        chosen = mask.nonzero()[:, 0]
        torch._check(chosen.shape[0] >= 2)
        bounds = torch.stack([chosen.new_zeros(()), chosen.new_full((), 0) + mask.sum()])
        picked = {n: kw[n].index_select(-1, chosen) for n in tokens}
        rest = {n: v for n, v in kw.items() if n not in tokens and n != "initial_states"}
        return public("selective_scan")(**picked, **rest, cu_seqlens=bounds)

    kwargs.pop("cu_seqlens")
    mask = torch.arange(17) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        function = torch.compile(keep_some, backend="aot_eager", fullgraph=True, dynamic=True)
        for result, other in zip(function(mask, **kwargs), keep_some(mask, **kwargs), strict=True):
            torch.testing.assert_close(result, other)


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        ("selective_scan", "dt_softplus", "false"),
        ("selective_scan", "return_final_states", 1),
        ("causal_conv1d", "reverse", "no"),
        ("mamba_inner", "norm_eps", "small"),
        ("selective_state_update", "pad_slot_id", "none"),
    ],
)
@pytest.mark.skipif(
    TORCH_VERSION < (2, 5), reason=f"Dynamo of torch {torch.__version__} cannot trace a raise"
)
def test_options_of_a_wrong_type_are_named_by_compiled_code(op, name, value):
    kwargs = {**make(op, "bare"), name: value}
    with pytest.raises(Exception, match=f"argument '{name}' is "):
        compiled(public(op))(**kwargs)


@pytest.mark.parametrize("op", UPDATES)
def test_pad_slot_id_may_change_between_calls_of_compiled_code(op):
    """A padding mark that differs from call to call is an integer like any other to the checks."""
    kwargs = make(op, "pad_slot")
    function = compiled(public(op))
    for pad in (kwargs["pad_slot_id"], 6, -1):
        with torch.no_grad():
            found = run(op, function, {**kwargs, "pad_slot_id": pad})
            assert_equal(found, run(op, public(op), {**kwargs, "pad_slot_id": pad}))
