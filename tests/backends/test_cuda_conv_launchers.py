# SPDX-License-Identifier: Apache-2.0
"""What the launchers of the convolution and of the decode ops hand to the driver, without a GPU.

The kernels do not run here: that is for the tests marked gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from statescan import ops, testing
from statescan.backends.cpu import CpuBackend
from statescan.backends.cuda import causal_conv1d as conv
from statescan.backends.cuda import causal_conv1d_update as conv_update
from statescan.backends.cuda import selective_state_update as state_update
from statescan.backends.cuda import sequences, tables
from statescan.ops import _plans

MODULES = {
    "causal_conv1d": conv,
    "causal_conv1d_update": conv_update,
    "selective_state_update": state_update,
}
LIMITS = (2**31 - 1, 65535, 65535)
CASES = [case for op in MODULES for case in testing.all_cases(op) if not case.has("complex")]


class Recorder:
    """Stands in for ``launch``: packs what it is given, as the real one does, and keeps it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[int, int, int]]] = []

    def __call__(
        self, stem: str, suffix: str, device: torch.device, grid: Any, values: Any
    ) -> None:
        kernel = tables.kernel(stem)
        assert suffix in kernel.by_suffix
        assert len(kernel.packer.pack(*values)) == 8 * len(kernel.fields)
        assert all(1 <= size <= limit for size, limit in zip(grid, LIMITS, strict=True))
        self.calls.append((stem, suffix, grid))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    found = Recorder()
    for module in (*MODULES.values(), sequences):
        monkeypatch.setattr(module, "launch", found)

    def function(backend: CpuBackend, op: str, direction: str) -> Any:
        return getattr(MODULES[op], f"{op}_{direction}" if direction else op)

    monkeypatch.setattr(CpuBackend, "function", function)
    monkeypatch.setattr(CpuBackend, "plan", lambda self, op: getattr(MODULES[op], f"{op}_plan"))
    _plans._plans.forget()
    yield found
    _plans._plans.forget()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_fills_the_struct_of_an_instance_that_exists(
    case: testing.Case, recorder: Recorder
) -> None:
    kwargs = testing.make(case, torch.bfloat16)
    tensors = [t for t in kwargs.values() if isinstance(t, torch.Tensor)]
    if case.op != "causal_conv1d":
        with torch.no_grad():
            getattr(ops, case.op)(**kwargs, backend="cpu")
    else:
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
        out, final = ops.causal_conv1d(**kwargs | {"return_final_states": True}, backend="cpu")
        torch.autograd.grad((out.sum(), final.sum()), kwargs["x"], allow_unused=True)
    axes = ("batch", "dim", "seqlen")
    assert bool(recorder.calls) == all(case.sizes.get(axis, 1) > 0 for axis in axes)


def test_a_planned_call_launches_once_and_what_the_long_road_launches(recorder: Recorder) -> None:
    x, conv_state = torch.zeros(3, 64), torch.zeros(3, 64, 4)
    weight, ssm_state, B = torch.zeros(64, 4), torch.zeros(3, 64, 16), torch.zeros(3, 16)
    with torch.no_grad():
        for _ in range(3):
            ops.causal_conv1d_update(x, conv_state, weight, backend="cpu")
            ops.selective_state_update(
                ssm_state, x, x, torch.zeros(64, 16), B, B, z=x, backend="cpu"
            )
    assert recorder.calls[:2] == recorder.calls[2:4] == recorder.calls[4:]
    assert [suffix for _, suffix, _ in recorder.calls[:2]] == [
        "float32_columns4",
        "float32_float32_vectors1",
    ]


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((70000, 3, 5), "first"),
        ((2, 70000, 5), "first"),
        ((2, 70000, 5), "last"),
        ((1, 3, 3 * 2**30), "first"),
        ((70000, 8, 4), "last"),
        ((1, 4, 2**31 + 7), "last"),
    ],
)
def test_grids_are_within_limits_whatever_the_shape(
    shape: tuple[int, int, int], layout: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, dim, seqlen = shape
    strides = (dim * seqlen, seqlen, 1) if layout == "first" else (dim * seqlen, 1, dim)
    x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    small = torch.empty((dim, 4), dtype=torch.bfloat16, device="meta")
    # Tensors without memory have no address.
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    conv.causal_conv1d_fwd(x, small, None, None, None, None, True, False)
    conv.causal_conv1d_bwd(x, None, x, small, None, None, None, None, True, False)
    stems = [stem for stem, _, _ in recorder.calls]
    assert stems == sorted(stems, reverse=True)
    assert set(stems) == {"causal_conv1d_fwd", "causal_conv1d_bwd"}
    assert recorder.calls[-1][1] == "sums"


def test_parts_of_the_sums_depend_on_the_shape_alone() -> None:
    x = torch.empty((8, 4096, 2048), dtype=torch.bfloat16, device="meta")
    assert conv._cut("rows", x, 0, 4, conv._BWD_BLOCKS) == (4096, 2, (1024, 4, 1))
    assert conv._cut("walk", x, 0, 4, conv._BWD_BLOCKS) == (256, 1, (8, 64, 1))


@pytest.mark.parametrize(
    ("blocks", "seqlen", "stretch"),
    [
        (64, 2048, 256),  # 8 pieces of 64 blocks: 512 of 528 at once
        (2, 65536, 256),  # 256 pieces
        (192, 512, 256),  # 2 pieces: 384 of 528
        (300, 512, 176),  # 3 pieces: 900 of 2 rounds
        (1056, 700, 704),  # 2 rounds of whole rows
        (1, 7, 8),  # no pieces of fewer tokens than are worth while
    ],
)
def test_threads_along_time_fill_their_rounds(blocks: int, seqlen: int, stretch: int) -> None:
    assert conv._stretch(blocks, seqlen, 528) == stretch


@pytest.mark.parametrize(
    ("shape", "options", "launched"),
    [
        ((2, 8, 64), {}, ["rows_bfloat16_taps4", "sums"]),
        ((2, 8, 65), {}, ["rows_bfloat16_taps4", "steps_taps4", "sums"]),
        ((2, 8, 64), {"seq_idx": (2, 64)}, ["rows_bfloat16_taps4", "steps_taps4", "sums"]),
        ((2, 8, 64), {"initial_states": (2, 8, 3)}, ["rows_bfloat16_taps4", "steps_taps4", "sums"]),
    ],
)
def test_steps_are_launched_only_where_there_may_be_special_ones(
    shape: tuple[int, int, int],
    options: dict[str, tuple[int, ...]],
    launched: list[str],
    recorder: Recorder,
) -> None:
    x, weight = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape[1], 4)
    states, ids = options.get("initial_states"), options.get("seq_idx")
    initial_states = None if states is None else torch.zeros(states)
    seq_idx = None if ids is None else torch.zeros(ids, dtype=torch.int32)
    conv.causal_conv1d_bwd(x, None, x, weight, None, initial_states, seq_idx, None, True, False)
    suffixes = [suffix for stem, suffix, _ in recorder.calls if stem == "causal_conv1d_bwd"]
    assert suffixes == launched
