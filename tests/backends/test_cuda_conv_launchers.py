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
from statescan.backends.cuda.tables.base import packer
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
        self,
        stem: str,
        suffix: str,
        device: torch.device,
        grid: Any,
        values: Any,
        shared_bytes: Any = None,
        rest: bytes = b"",
    ) -> None:
        kernel = tables.kernel(stem)
        assert suffix in kernel.by_suffix
        assert len(packer(len(values)).pack(*values) + rest) == kernel.packer.size
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
        "float32_float32_channels",
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
    assert stems == ["causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_bwd"]


def test_parts_of_the_sums_depend_on_the_shape_alone() -> None:
    x = torch.empty((8, 4096, 2048), dtype=torch.bfloat16, device="meta")
    assert conv._cut_sums("rows", x, 0) == (4, 4096, 2, (1024, 4, 1))
    assert conv._cut_sums("walk", x, 0)[:3] == (128, 128, 1)
