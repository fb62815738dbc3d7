# SPDX-License-Identifier: Apache-2.0
"""What a user reads after a mistake: exact texts, and every argument of every op given wrong.

A message says what was given, what is needed and what to do next, in at most six lines.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers.differential import tensors_of
from helpers.integration import TORCH_WARNINGS, public
from helpers.op_inputs import conv_inputs, inner_inputs, scan_inputs, state_inputs, taps_inputs

from statescan import errors
from statescan.dispatch import all_backends
from statescan.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    SlotIndexError,
    StatescanError,
)

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)

SEQ_IDX = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1], [0, 1, 1, 1, 2, 2, 2, 2, 2]])
ROWS = torch.tensor([2, 0, 4])

INNER = (
    "conv_bias D dt_bias b_proj_bias c_proj_bias out_proj_weight out_proj_bias b_norm_weight "
    "c_norm_weight dt_norm_weight conv_initial_states initial_states"
)


def rich():
    """Calls that together give every tensor argument: (op, arguments)."""
    scan = scan_inputs(ngroups=2)
    yield "selective_scan", scan | {"seq_idx": SEQ_IDX}
    yield (
        "selective_scan",
        scan_inputs(1, constant="BC", num_states=2) | {"cu_seqlens": torch.tensor([0, 4, 9])},
    )
    yield "causal_conv1d", conv_inputs() | {"seq_idx": SEQ_IDX}
    yield "causal_conv1d", conv_inputs(1, num_states=2) | {"cu_seqlens": torch.tensor([0, 4, 9])}
    yield "mamba_inner", inner_inputs(seqlen=9, options=INNER) | {"seq_idx": SEQ_IDX}
    yield (
        "mamba_inner",
        inner_inputs(1, seqlen=9, num_states=2, constant="BC")
        | {"cu_seqlens": torch.tensor([0, 4, 9])},
    )
    state = state_inputs(slots=6, ntokens=2, ngroups=2, kept=2)
    yield "selective_state_update", state | {
        "state_batch_indices": ROWS, "dst_state_batch_indices": ROWS + 1,
        "num_accepted_tokens": torch.tensor([0, 1, 2]), "out": torch.zeros(3, 4, 2),
    }  # fmt: skip
    headed = state_inputs(heads=(4, 2), ntokens=2, ngroups=2)
    yield "selective_state_update", headed
    taps = taps_inputs(slots=6, ntokens=2, kept=2)
    yield "causal_conv1d_update", taps | {
        "conv_state_indices": ROWS, "dst_conv_state_indices": ROWS + 1,
        "cache_seqlens": torch.tensor([0, 3, 9]),
        "num_accepted_tokens": torch.tensor([0, 1, 2]), "out": torch.zeros(3, 4, 2),
    }  # fmt: skip


CALLS = list(rich())
ARGUMENTS = [
    pytest.param(op, kwargs, name, id=f"{op}-{name}-{number}")
    for number, (op, kwargs) in enumerate(CALLS)
    for name in tensors_of(kwargs)
]


def may_be_none(op, name):
    return "None" in str(inspect.signature(public(op)).parameters[name].annotation)


def refused(op, kwargs, kind):
    """The message of a call that must raise, before it has written anything."""
    before = {
        name: tensor.clone()
        for name, tensor in tensors_of(kwargs).items()
        if tensor.device.type == "cpu"
    }
    with pytest.raises(kind) as caught:
        public(op)(**kwargs)
    for name, tensor in before.items():
        assert torch.equal(tensor, kwargs[name]), f"{name} was written"
    lines = str(caught.value).splitlines()
    assert isinstance(caught.value, StatescanError)
    assert 3 <= len(lines) <= 6
    assert all(len(line) <= 130 for line in lines)
    assert lines[0].startswith(f"{op}: ")
    return str(caught.value)


def test_every_tensor_argument_is_given_wrong_below():
    given = {(op, name) for op, kwargs in CALLS for name in tensors_of(kwargs)}
    for op in {op for op, _ in CALLS}:
        for name, parameter in inspect.signature(public(op)).parameters.items():
            if "Tensor" in str(parameter.annotation):
                assert (op, name) in given, f"{op}: {name}"


def test_the_calls_are_right_before_they_are_made_wrong():
    for op, kwargs in CALLS:
        copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
        result = public(op)(**copies)
        out = result[0] if isinstance(result, tuple) else result
        assert out.isfinite().all() and out.any(), op
        for name, value in tensors_of(kwargs).items():
            written = name in ("ssm_state", "conv_state", "intermediate_states", "out")
            assert torch.equal(copies[name], value) is not written, f"{op}: {name}"


@pytest.mark.parametrize(("op", "kwargs", "name"), ARGUMENTS)
@pytest.mark.parametrize("value", [[1.0, 2.0], 3, "text"], ids=["list", "int", "str"])
def test_no_tensor(op, kwargs, name, value):
    text = refused(op, {**kwargs, name: value}, DtypeError)
    assert f"argument '{name}' is a {type(value).__name__}." in text
    assert "It must be a torch.Tensor." in text
    assert f"torch.as_tensor({name})" in text


@pytest.mark.parametrize(
    ("op", "kwargs", "name"), [p for p in ARGUMENTS if not may_be_none(p.values[0], p.values[2])]
)
def test_required_tensor_left_out(op, kwargs, name):
    text = refused(op, {**kwargs, name: None}, DtypeError)
    assert f"argument '{name}' is a NoneType.\nIt must be a torch.Tensor." in text


@pytest.mark.parametrize(("op", "kwargs", "name"), ARGUMENTS)
@pytest.mark.parametrize("change", ["two axes more", "an axis less", "scalar"])
def test_wrong_rank(op, kwargs, name, change):
    tensor = kwargs[name]
    wrong = {"two axes more": tensor[None, None], "an axis less": tensor.select(-1, 0),
             "scalar": tensor.reshape(-1)[0]}[change]  # fmt: skip
    if name in ("B", "C") and change == "an axis less":
        # One axis less is right where there are groups.
        wrong = wrong.select(-1, 0)
    text = refused(op, {**kwargs, name: wrong}, ShapeError)
    if name not in ("x", "ssm_state"):
        # The ranks of those two choose the form of a call, so another argument may look wrong.
        assert f"argument '{name}' has shape {tuple(wrong.shape)}.\nIt must be (" in text


FREE = (
    ("ssm_state", 0), ("conv_state", 0), ("intermediate_states", 1),
)  # fmt: skip
"""Axes that may have any size from some on: slots, and tokens that can be kept."""


@pytest.mark.parametrize(("op", "kwargs", "name"), ARGUMENTS)
def test_every_axis_has_a_wrong_size(op, kwargs, name):
    """One number too many on each axis: this argument is named, or one it disagrees with."""
    tensor = kwargs[name]
    for axis in range(tensor.dim()):
        row = tensor.select(axis, 0).unsqueeze(axis)
        wrong = torch.cat([tensor, row], axis)
        if (name, axis) in FREE or (
            name == "out_proj_weight" and kwargs.get("out_proj_bias") is None
        ):
            continue
        text = refused(op, {**kwargs, name: wrong}, (ShapeError, ArgumentError))
        assert "argument '" in text or "arguments '" in text


@pytest.mark.parametrize(("op", "kwargs", "name"), ARGUMENTS)
def test_wrong_dtype(op, kwargs, name):
    tensor = kwargs[name]
    floating = tensor.is_floating_point()
    wrongs = (
        [torch.int64, torch.bool, torch.complex64]
        if floating
        else [torch.float32, torch.int16, torch.bool]
    )
    for dtype in wrongs:
        if dtype.is_complex and name in ("A", "ssm_state"):
            continue
        text = refused(op, {**kwargs, name: tensor.to(dtype)}, DtypeError)
        assert f"argument '{name}' has dtype {str(dtype).removeprefix('torch.')}." in text
        assert "It must be " in text
        assert f"{name}.to(" in text


@pytest.mark.parametrize("name", ["A", "ssm_state"])
def test_complex_leader_alone(name):
    """A complex A (or state pool) needs complex partners: the first real one is named."""
    for op, kwargs in CALLS:
        if name in kwargs:
            tensors = {**kwargs, name: kwargs[name].to(torch.complex64)}
            text = refused(op, tensors, (DtypeError, ShapeError))
            assert "complex" in text or op == "mamba_inner"


@pytest.mark.parametrize(("op", "kwargs", "name"), ARGUMENTS)
def test_wrong_device(op, kwargs, name):
    text = refused(op, {**kwargs, name: kwargs[name].to("meta")}, DeviceError)
    assert "on meta" in text
    assert "on cpu" in text
    assert "All tensors of a call must be on one device." in text
    assert ".to('" in text


EXACT = [
    (
        "selective_scan", {"D": torch.ones(5)}, ShapeError,
        "selective_scan: argument 'D' has shape (5,).\n"
        "It must be (dim=4); the sizes come from 'x'.\n"
        "Check the order of its axes and that 'D' belongs to this call.",
    ),
    (
        "selective_scan", {"z": torch.ones(2, 4)}, ShapeError,
        "selective_scan: argument 'z' has shape (2, 4).\n"
        "It must be (batch=2, dim=4, seqlen=9); the sizes come from 'x'.\n"
        "'z' lacks an axis: add it with unsqueeze.",
    ),
    (
        "selective_scan", {"B": torch.ones(2, 3, 3, 9)}, ShapeError,
        "selective_scan: argument 'B' has 3 groups for dim 4.\n"
        "ngroups must divide dim.\n"
        "Give 'B' as (batch, ngroups, dstate, seqlen) with such an ngroups.",
    ),
    (
        "selective_scan", {"cu_seqlens": torch.tensor([0, 9])}, ArgumentError,
        "selective_scan: arguments 'seq_idx' and 'cu_seqlens' are both given.\n"
        "One of them says where sequences begin.\n"
        "Pass cu_seqlens with batch 1, or seq_idx with any batch.",
    ),
    (
        "selective_scan", {"seq_idx": None, "cu_seqlens": torch.tensor([0, 9])}, ArgumentError,
        "selective_scan: argument 'cu_seqlens' is given with batch 2.\n"
        "Packed sequences lie one behind the other in a single row: batch must be 1.\n"
        "Reshape x with x.transpose(0, 1).reshape(1, dim, batch * seqlen), and the other\n"
        "per-token tensors likewise.",
    ),
    (
        "selective_scan", {"dt": torch.ones(2, 4, 9, dtype=torch.int32)}, DtypeError,
        "selective_scan: argument 'dt' has dtype int32.\n"
        "It must be float32, bfloat16, float16 or float64.\n"
        "Convert it first, for example with dt.to(...).",
    ),
    (
        "selective_scan", {"C": torch.ones(2, 2, 3, 9, dtype=torch.complex64)}, DtypeError,
        "selective_scan: argument 'C' has dtype complex64.\n"
        "It must be a real floating-point dtype, since A is not complex.\n"
        "Convert it first, for example with C.to(...).",
    ),
    (
        "selective_scan", {"dt": torch.ones(2, 4, 9, device="meta")}, DeviceError,
        "selective_scan: argument 'dt' is on meta and the others are on cpu.\n"
        "All tensors of a call must be on one device.\n"
        "Move it with dt.to('cpu').",
    ),
    (
        "causal_conv1d", {"weight": torch.ones(5, 1, 4)}, ShapeError,
        "causal_conv1d: argument 'weight' has shape (5, 1, 4).\n"
        "It must be (dim=5, width); the sizes come from 'x'.\n"
        "A torch.nn.Conv1d weight is (dim, 1, width): pass weight.squeeze(1).",
    ),
    (
        "causal_conv1d", {"weight": torch.ones(5, 0)}, ShapeError,
        "causal_conv1d: argument 'weight' has width 0.\n"
        "Its width must be at least 1.\n"
        "Give a 'weight' that is not empty along width.",
    ),
    (
        "causal_conv1d", {"activation": "gelu"}, ArgumentError,
        "causal_conv1d: argument 'activation' is 'gelu'.\n"
        "It must be None, 'silu' or 'swish' (the same function).\n"
        "Pass None and apply any other activation to the result.",
    ),
    (
        "mamba_inner", {"out_proj_weight": None}, ArgumentError,
        "mamba_inner: argument 'out_proj_bias' is given without 'out_proj_weight'.\n"
        "The bias belongs to the output projection.\n"
        "Give both, or neither.",
    ),
    (
        "mamba_inner", {"x_proj_weight": torch.ones(9, 4)}, ShapeError,
        "mamba_inner: argument 'x_proj_weight' has 9 rows.\n"
        "It must have 8: dt_rank 2 and 2 parts of 3 for B and C that are not given.\n"
        "Check dt_proj_weight (dim, dt_rank), A (dim, dstate), and whether B or C is constant.",
    ),
    (
        "mamba_inner", {"B": torch.ones(4, 3), "x_proj_weight": torch.ones(5, 4)}, ArgumentError,
        "mamba_inner: arguments 'b_proj_bias' and 'B' are both given.\n"
        "'b_proj_bias' acts on a projected B only.\n"
        "Leave one of them out.",
    ),
    (
        "selective_state_update", {"state_batch_indices": torch.tensor([2, 0, 6])}, SlotIndexError,
        "selective_state_update: argument 'state_batch_indices' holds slot 6.\n"
        "The state pool has 6 slots, 0 to 5.\n"
        "Use a slot inside the pool, or a negative one for a padding row.",
    ),
    (
        "selective_state_update", {"dst_state_batch_indices": ROWS - ROWS + 2},
        SlotIndexError,
        "selective_state_update: argument 'dst_state_batch_indices' names slot 2 twice.\n"
        "Each row must write a slot of its own: the result would depend on the order.\n"
        "Give every row its own destination slot, or run the rows in separate calls.",
    ),
    (
        "selective_state_update", {"num_accepted_tokens": torch.tensor([0, 3, 1])}, ArgumentError,
        "selective_state_update: argument 'num_accepted_tokens' holds 3.\n"
        "intermediate_states holds 2 tokens, so it must be from 0 to 2.\n"
        "Give the number of tokens of the previous call that were accepted.",
    ),
    (
        "selective_state_update", {"intermediate_states": None}, ArgumentError,
        "selective_state_update: argument 'num_accepted_tokens' is given "
        "without 'intermediate_states'.\n"
        "It picks the starting state from what the previous call wrote there.\n"
        "Pass the same intermediate_states tensor in every speculative call.",
    ),
    (
        "selective_state_update", {"state_batch_indices": None}, ShapeError,
        "selective_state_update: argument 'ssm_state' has 6 slots for batch 3.\n"
        "Without 'state_batch_indices' row b uses slot b, so their numbers must be equal.\n"
        "Pass 'state_batch_indices', (batch,), to choose slots from a larger pool.",
    ),
    (
        "causal_conv1d_update", {"cache_seqlens": torch.tensor([0, 3, -1])}, ArgumentError,
        "causal_conv1d_update: argument 'cache_seqlens' holds -1.\n"
        "It counts the tokens that a row has seen, so it must be at least 0.\n"
        "Give a padding row a negative slot index instead.",
    ),
    (
        "causal_conv1d_update", {"conv_state": torch.ones(6, 4, 2)}, ShapeError,
        "causal_conv1d_update: argument 'intermediate_states' has shape (3, 2, 4, 3).\n"
        "It must be (batch=3, kept_tokens, dim=4, state_len=2); "
        "the sizes come from 'conv_state', 'x'.\n"
        "Check the order of its axes and that 'intermediate_states' belongs to this call.",
    ),
    (
        "causal_conv1d_update",
        dict(
            conv_state=torch.ones(6, 4, 2), intermediate_states=None, num_accepted_tokens=None
        ),
        ShapeError,
        "causal_conv1d_update: argument 'conv_state' has state_len 2 for width 4.\n"
        "It must keep at least width - 1 = 3 tokens.\n"
        "Allocate it as (slots, dim, 3) or longer.",
    ),
    (
        "causal_conv1d_update", {"intermediate_states": torch.ones(3, 1, 4, 3)}, ShapeError,
        "causal_conv1d_update: argument 'intermediate_states' keeps 1 tokens and x carries 2.\n"
        "It must keep at least as many.\n"
        "Allocate it as (batch, 2, dim, state_len).",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "change", "kind", "text"),
    EXACT,
    ids=[f"{op}-{'-'.join(change)}-{number}" for number, (op, change, *_) in enumerate(EXACT)],
)
def test_exact_text(op, change, kind, text):
    kwargs = next(kwargs for name, kwargs in CALLS if name == op)
    assert refused(op, {**kwargs, **change}, kind) == text


WEIGHTS = [
    ("causal_conv1d", "weight"), ("causal_conv1d_update", "weight"), ("mamba_inner", "conv_weight"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), WEIGHTS)
def test_width_zero(op, name):
    kwargs = call_of(op)
    text = refused(op, {**kwargs, name: kwargs[name][:, :0], **states_of(op, 0)}, ShapeError)
    assert text.startswith(f"{op}: argument '{name}' has width 0.\nIts width must be at least 1.")


def states_of(op, state_len):
    """States that fit, so that nothing but the width is wrong."""
    if op != "mamba_inner":
        return {"initial_states": None} if op == "causal_conv1d" else {}
    return {"conv_initial_states": torch.zeros(2, 4, state_len)}


@pytest.mark.parametrize(("op", "name"), WEIGHTS)
def test_weight_of_a_conv_module(op, name):
    kwargs = call_of(op)
    text = refused(op, {**kwargs, name: kwargs[name].unsqueeze(1)}, ShapeError)
    hint = f"A torch.nn.Conv1d weight is (dim, 1, width): pass {name}.squeeze(1)."
    assert text.endswith(hint)


@pytest.mark.parametrize("op", ["selective_scan", "causal_conv1d", "mamba_inner"])
@pytest.mark.parametrize(
    ("bounds", "shown"),
    [
        ([1, 9], "[1, 9]"), ([0, 8], "[0, 8]"), ([0, 10], "[0, 10]"),
        ([0, 5, 4, 9], "[0, 5, 4, 9]"),
        ([0], "[0]"), ([0, *range(2, 10), 8], "[0, 2, ..., 8]"),
    ],
)  # fmt: skip
def test_bounds_of_packed_sequences(op, bounds, shown):
    x = "xz" if op == "mamba_inner" else "x"
    makers = {
        "selective_scan": scan_inputs,
        "causal_conv1d": conv_inputs,
        "mamba_inner": inner_inputs,
    }
    options = {"selective_scan": "D", "causal_conv1d": "bias", "mamba_inner": "conv_bias"}[op]
    kwargs = makers[op](1, seqlen=9, options=options)
    kwargs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    for grad in (False, True):
        kwargs[x].requires_grad_(grad)
        assert refused(op, kwargs, ArgumentError) == (
            f"{op}: argument 'cu_seqlens' is {shown}.\n"
            "It must start at 0, never fall, and end at seqlen 9.\n"
            "Build it as the cumulative sum of the sequence lengths with a 0 in front."
        )


def test_no_bounds_at_all():
    kwargs = conv_inputs(1, options="bias") | {"cu_seqlens": torch.tensor([], dtype=torch.int64)}
    assert refused("causal_conv1d", kwargs, ShapeError) == (
        "causal_conv1d: argument 'cu_seqlens' is empty.\n"
        "It must hold the bounds of the sequences, num_seqs + 1 of them.\n"
        "For no sequences at all pass the single bound 0."
    )


def test_long_lists_of_bounds_are_cut():
    kwargs = conv_inputs(1, options="bias") | {"cu_seqlens": torch.arange(1000)}
    assert "'cu_seqlens' is [0, 1, ..., 999]." in refused("causal_conv1d", kwargs, ArgumentError)


@pytest.mark.parametrize("name", ["state_batch_indices", "dst_state_batch_indices"])
def test_slots_that_are_padding_may_be_anything(name):
    """-1, other negative numbers and pad_slot_id are no mistakes, however often they come."""
    kwargs = state_inputs(4, slots=3) | {"pad_slot_id": 77}
    kwargs |= {"state_batch_indices": torch.tensor([0, 1, 2, 77])}
    before = kwargs["ssm_state"].clone()
    out = public("selective_state_update")(**{**kwargs, name: torch.tensor([-1, -9, 77, 77])})
    assert not out.any()
    assert torch.equal(kwargs["ssm_state"], before)


FLAGS = [
    ("selective_scan", "dt_softplus"), ("selective_scan", "reverse"),
    ("selective_scan", "return_final_states"), ("selective_state_update", "dt_softplus"),
    ("causal_conv1d", "reverse"), ("causal_conv1d", "return_final_states"),
    ("mamba_inner", "dt_softplus"), ("mamba_inner", "reverse"),
    ("mamba_inner", "return_final_states"),
]  # fmt: skip


def call_of(op):
    return next(kwargs for name, kwargs in CALLS if name == op)


def test_every_flag_is_given_wrong_below():
    for op in {op for op, _ in CALLS}:
        for name, parameter in inspect.signature(public(op)).parameters.items():
            assert ((op, name) in FLAGS) == (parameter.annotation == "bool"), f"{op}: {name}"


@pytest.mark.parametrize(("op", "name"), FLAGS)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("false", "'false' (str)"), (1, "1 (int)"), (None, "None (NoneType)"),
        (torch.tensor(True), "of type Tensor"),
        ([False] * 9, "[False, False, False, False, False, F... (list)"),
    ],
    ids=["str", "int", "None", "tensor", "list"],
)  # fmt: skip
def test_flag_that_is_no_bool(op, name, value, shown):
    """A text such as "false" would otherwise count as true."""
    assert refused(op, {**call_of(op), name: value}, DtypeError) == (
        f"{op}: argument '{name}' is {shown}.\n"
        "It must be True or False.\n"
        f"Pass {name}=True or {name}=False, or leave it out."
    )


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("1e-6", DtypeError, "is '1e-6' (str).\nIt must be a Python number."),
        (None, DtypeError, "is None (NoneType).\nIt must be a Python number."),
        (True, DtypeError, "is True (bool).\nIt must be a Python number."),
        (torch.tensor(1e-6), DtypeError, "is of type Tensor.\nIt must be a Python number."),
        (-1e-6, ArgumentError, "is -1e-06.\nIt must be at least 0."),
        (float("nan"), ArgumentError, "is nan.\nIt must be at least 0."),
    ],
    ids=["str", "None", "bool", "tensor", "negative", "nan"],
)
def test_norm_eps_that_is_no_number(value, kind, text):
    kwargs = {**call_of("mamba_inner"), "norm_eps": value}
    assert f"argument 'norm_eps' {text}" in refused("mamba_inner", kwargs, kind)


@pytest.mark.parametrize("op", ["selective_state_update", "causal_conv1d_update"])
@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("-1", DtypeError, "is '-1' (str).\nIt must be a Python integer."),
        (-1.0, DtypeError, "is -1.0 (float).\nIt must be a Python integer."),
        (None, DtypeError, "is None (NoneType).\nIt must be a Python integer."),
        (torch.tensor(-1), DtypeError, "is of type Tensor.\nIt must be a Python integer."),
        (2**63, ArgumentError, f"is {2**63}.\nIt must fit into 64 bits."),
        (-(2**63) - 1, ArgumentError, f"is {-(2**63) - 1}.\nIt must fit into 64 bits."),
    ],
    ids=["str", "float", "None", "tensor", "too large", "too small"],
)
def test_pad_slot_id_that_is_no_integer(op, value, kind, text):
    kwargs = {**call_of(op), "pad_slot_id": value}
    assert f"argument 'pad_slot_id' {text}" in refused(op, kwargs, kind)


@pytest.mark.parametrize("backend", ["cudnn", "Torch", ""])
def test_unknown_backend(backend):
    known = ", ".join(there.name for there in all_backends())
    for op, kwargs in CALLS:
        before = {name: tensor.clone() for name, tensor in tensors_of(kwargs).items()}
        with pytest.raises(ArgumentError) as caught:
            public(op)(**kwargs, backend=backend)
        assert str(caught.value) == (
            f"backend {backend!r}, asked for by the argument backend=, is not known.\n"
            f"It must be 'auto' or one of: {known}.\n"
            "`statescan backends` lists them and says which can run here."
        )
        assert all(torch.equal(kwargs[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "None (NoneType)"), (5, "5 (int)"), (b"torch", "b'torch' (bytes)")]
)
@pytest.mark.parametrize("op", sorted({op for op, _ in CALLS}))
def test_backend_that_is_no_name(op, value, shown):
    """Bytes too, which torch would take for a text."""
    assert refused(op, {**call_of(op), "backend": value}, ArgumentError) == (
        f"{op}: argument 'backend' is {shown}.\n"
        "It must be a name such as 'auto' or 'torch'.\n"
        "`statescan backends` lists the names."
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("op", sorted({op for op, _ in CALLS}))
def test_sparse_and_nested_tensors(op):
    name = next(iter(inspect.signature(public(op)).parameters))
    dense = call_of(op)[name]
    nested = torch.nested.nested_tensor(list(dense))
    for tensor, kind in ((dense.to_sparse(), "sparse_coo"), (nested, "nested")):
        with pytest.raises(ArgumentError) as caught:
            public(op)(**{**call_of(op), name: tensor})
        assert str(caught.value).startswith(f"{op}: argument '{name}' is a {kind} tensor.\nIt must")


@pytest.mark.parametrize("op", ["selective_state_update", "causal_conv1d_update"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_tensors_of_inference_mode_are_not_written_outside_of_it(op, number):
    """torch would raise as well, but only after the state has changed and the result has not."""
    state = "ssm_state" if op == "selective_state_update" else "conv_state"
    name = (state, "intermediate_states", "out")[number]
    kwargs = call_of(op)
    with torch.inference_mode():
        frozen = kwargs[name].clone()
    with torch.no_grad():
        text = refused(op, {**kwargs, name: frozen}, ArgumentError)
        assert f"argument '{name}' was made in torch.inference_mode, and this call is not." in text
    copies = {n: t.clone() for n, t in tensors_of(kwargs).items()}
    with torch.inference_mode():
        out = public(op)(**{**copies, name: frozen})
    assert out.isfinite().all()


def test_every_error_class_is_caught_by_the_builtin_that_fits():
    """Code that catches ValueError, TypeError, IndexError or RuntimeError goes on working."""
    builtin = {
        "ArgumentError": ValueError, "ShapeError": ValueError, "DeviceError": ValueError,
        "DtypeError": TypeError,
        "SlotIndexError": IndexError, "BackendUnavailableError": RuntimeError,
        "GradientError": RuntimeError,
    }  # fmt: skip
    for name, kind in builtin.items():
        assert issubclass(getattr(errors, name), kind)
        assert issubclass(getattr(errors, name), StatescanError)
