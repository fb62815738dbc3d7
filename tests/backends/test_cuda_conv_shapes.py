# SPDX-License-Identifier: Apache-2.0
"""Every instance of the convolution's kernels, on the CPU by ``helpers/simt.h``.

Rows of several tiles cut into several stretches, aligned and not, both layouts, either direction of
time, states in and out, packed or whole: outputs, states and gradients against the float64
reference. That the shapes here reach all instances of both tables is a test of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers import simt
from helpers.differential import check_sequence
from helpers.layouts import lay_out
from helpers.op_inputs import Kwargs, conv_inputs
from helpers.packing import Packing, poison

from statescan import ops
from statescan.backends.cuda import causal_conv1d as conv
from statescan.backends.cuda import sequences, tables

pytestmark = pytest.mark.skipif(simt.COMPILER is None, reason="needs g++ or clang++")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OP = "causal_conv1d"


class Shape(NamedTuple):
    """A call's sizes and where x lies; every_other takes strides that no vector fits."""

    batch: int
    dim: int
    seqlen: int
    width: int
    layout: str = "contiguous"


SHAPES = (
    Shape(2, 3, 1056, 4),
    Shape(1, 5, 531, 4),
    Shape(3, 2, 264, 7),
    Shape(2, 2, 77, 2),
    Shape(2, 16, 61, 4, "channel_last"),
    Shape(3, 8, 35, 3, "channel_last"),
    Shape(2, 7, 41, 4, "channel_last"),
    Shape(2, 3, 37, 5, "every_other"),
    Shape(2, 3, 45, 11),
)
# Tokens that are 16 bytes into a vector, a tile, a stretch; beside each other; far apart.
CUTS = (0, 1, 4, 5, 8, 24, 27, 33, 33, 64, 250, 256, 259, 511, 512, 600, 1041)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are cut as long ones are."""
    monkeypatch.setattr(conv, "_ROW_PARTS", (512,))
    monkeypatch.setattr(conv, "_LEAST_STRETCH", 16)


def make(shape: Shape, dtype: torch.dtype, seed: int, **options: Any) -> Kwargs:
    batch, dim, seqlen, width, layout = shape
    kwargs = conv_inputs(batch, dim, seqlen, width, dtype=dtype, seed=seed, **options)
    return kwargs | {"x": lay_out(kwargs["x"], layout)}


def bounds_of(seqlen: int) -> torch.Tensor:
    inner = [cut for cut in CUTS if cut < seqlen]
    return torch.tensor([*inner, seqlen], dtype=torch.int32)


def name_of(value: Any) -> str:
    if isinstance(value, Shape):
        return "_".join(map(str, value))
    return str(value).removeprefix("torch.")


every_shape = pytest.mark.parametrize("shape", SHAPES, ids=name_of)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


@pytest.mark.usefixtures("guarded", "simulated")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@every_dtype
@every_shape
def test_whole_rows(shape: Shape, dtype: torch.dtype, reverse: bool) -> None:
    kwargs = make(shape, dtype, seed=shape.seqlen + reverse)
    check_sequence(OP, kwargs | {"reverse": reverse}, "cuda")


@pytest.mark.usefixtures("guarded", "simulated")
@every_shape
def test_bare_rows(shape: Shape) -> None:
    kwargs = make(shape, torch.float32, seed=5, options="", activation=None)
    check_sequence(OP, kwargs | {"return_final_states": False}, "cuda")


@pytest.mark.usefixtures("guarded", "simulated")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@every_shape
def test_packed_by_bounds(shape: Shape, reverse: bool) -> None:
    shape = shape._replace(batch=1)
    bounds = bounds_of(shape.seqlen)
    kwargs = make(shape, torch.float32, seed=int(reverse), num_states=len(bounds) - 1)
    check_sequence(OP, kwargs | {"cu_seqlens": bounds, "reverse": reverse}, "cuda")


@pytest.mark.usefixtures("guarded", "simulated")
@every_shape
def test_padding_is_never_looked_at(shape: Shape) -> None:
    packing = _padded(shape.batch, shape.seqlen)
    kwargs = make(shape, torch.float32, seed=3) | packing.arguments()
    x = lay_out(poison(kwargs, packing)["x"], shape.layout)
    results = check_sequence(OP, kwargs | {"x": x}, "cuda")
    assert not any(result.isnan().any() for result in results.values())


def _padded(batch: int, seqlen: int) -> Packing:
    """Gaps of padding before, between and behind sequences, elsewhere in each row."""
    rows = []
    for row in range(batch):
        cuts = [min(cut + row, seqlen - 1) for cut in (2, 9, 13, 20, seqlen // 2, seqlen - 7)]
        rows.append(tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if a < b))
    return Packing(tuple(rows), seqlen)


@pytest.mark.usefixtures("guarded", "simulated")
@pytest.mark.parametrize("offset", ["offset_1", "offset_3", "slice_of_wide"])
@every_dtype
def test_rows_that_begin_anywhere(offset: str, dtype: torch.dtype) -> None:
    kwargs = make(Shape(2, 3, 331, 4, offset), dtype, seed=7)
    check_sequence(OP, kwargs, "cuda")


@pytest.mark.usefixtures("simulated")
@every_shape
def test_equal_bits_in_any_order_of_threads(shape: Shape) -> None:
    def gradients() -> tuple[torch.Tensor, ...]:
        kwargs = make(shape, torch.bfloat16, seed=1)
        leaves = {n: kwargs[n].requires_grad_() for n in ("x", "weight", "bias", "initial_states")}
        out, final = ops.causal_conv1d(**kwargs, backend="cuda")
        seeds = (torch.ones_like(out), torch.ones_like(final))
        return torch.autograd.grad((out, final), tuple(leaves.values()), seeds)

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("simulated")
def test_an_infinity_reaches_only_the_tokens_that_it_meets() -> None:
    x = torch.ones(1, 1, 600, dtype=torch.bfloat16)
    x[..., 300] = float("inf")
    x.requires_grad_()
    weight = torch.ones(1, 4, dtype=torch.bfloat16)
    out = ops.causal_conv1d(x, weight, activation="silu", backend="cuda")
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert bool(out[0, 0].isinf().nonzero().flatten().tolist() == [300, 301, 302, 303])
    near = set(range(297, 304))
    assert set(dx[0, 0].isfinite().logical_not().nonzero().flatten().tolist()) <= near


def test_these_shapes_reach_every_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[tuple[str, str]] = set()

    def record(stem: str, suffix: str, *rest: Any) -> None:
        launched.add((stem, suffix))

    for module in (conv, sequences):
        monkeypatch.setattr(module, "launch", record)
    for shape in SHAPES:
        for dtype in DTYPES:
            kwargs = make(shape, dtype, seed=0)
            x, weight = kwargs["x"], kwargs["weight"]
            conv.causal_conv1d_fwd(x, weight, None, None, None, None, True, False)
            conv.causal_conv1d_bwd(x, None, x, weight, None, None, None, None, True, False)
    stems = ("causal_conv1d_fwd", "causal_conv1d_bwd")
    assert launched == {
        (stem, one.suffix) for stem in stems for one in tables.kernel(stem).instances
    }
