# SPDX-License-Identifier: Apache-2.0
"""`statescan.prepare`: every instance that a call may launch is loaded, and nothing is computed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from helpers.fake_driver import ship

import statescan
from statescan.backends.base import Backend
from statescan.backends.cuda import loading
from statescan.backends.cuda.launch import launch
from statescan.backends.cuda.prepare import preparing
from statescan.backends.torch import TorchBackend
from statescan.dispatch import registry
from statescan.errors import ArgumentError, BackendUnavailableError

CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)
GRID, VALUES = (1, 1, 1), (1, 2, 3)


def loaded():
    return {key[1:] for key in loading.LOADED}


def test_launches_load_and_do_nothing_more(gpu, compiler):
    with preparing():
        launch("toy", "bf16", CUDA0, GRID, VALUES)
    assert gpu.calls("cuLaunchKernel") == []
    gpu.capture(0xA0)
    launch("toy", "bf16", CUDA0, GRID, VALUES)
    assert len(gpu.calls("cuLaunchKernel")) == 1


def test_every_instance_of_a_shipped_file_is_loaded(gpu, compiler):
    ship("sm_90")
    with preparing():
        launch("toy", "bf16", CUDA0, GRID, VALUES)
    assert loaded() == {("bf16", 0), ("f32", 0), ("f32_wide", 0)}
    assert compiler.compiled == []


def test_only_what_was_asked_for_is_compiled(gpu, compiler):
    with preparing():
        launch("toy", "bf16", CUDA0, GRID, VALUES)
    assert compiler.compiled == [("statescan_toy__bf16", "sm_90")]


def test_other_devices_are_prepared_in_their_own_context(gpu, compiler):
    ship("sm_90")
    with preparing():
        launch("toy", "bf16", CUDA1, GRID, VALUES)
    assert loaded() == {("bf16", 1), ("f32", 1), ("f32_wide", 1)}
    assert gpu.device == 0
    gpu.capture(0xB0)
    launch("toy", "f32", CUDA1, GRID, VALUES)
    assert "cuLaunchKernel on 1" in gpu.calls("cuLaunchKernel")[0]


def test_preparing_inside_of_a_capture_is_refused(gpu):
    gpu.capture(0xA0)
    with (
        pytest.raises(BackendUnavailableError, match="A CUDA graph is being captured"),
        preparing(),
    ):
        launch("toy", "bf16", CUDA0, GRID, VALUES)
    gpu.capture(0)
    launch("toy", "bf16", CUDA0, GRID, VALUES)
    assert len(gpu.calls("cuLaunchKernel")) == 1, "after the error launches are launches again"


class Watching(Backend):
    """Runs as the torch backend does, and tells which functions ran inside of ``preparing``."""

    name = "watching"
    modules = TorchBackend.modules

    def __init__(self) -> None:
        self.inside = False
        self.ran: list[tuple[str, str]] = []
        self.seen: dict[str, list[torch.Tensor]] = {}

    def availability(self):
        return TorchBackend().availability()

    def function(self, op, direction):
        run = TorchBackend().function(op, direction)

        def watched(*args):
            assert self.inside
            self.ran.append((op, direction))
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.seen[direction] = tensors
            return run(*args)

        return watched

    @contextmanager
    def preparing(self):
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


@pytest.fixture
def watching(monkeypatch):
    found = Watching()
    monkeypatch.setattr(registry, "_BACKENDS", (found,))
    return found


SCAN = ((2, 8, 5), (2, 8, 5), (8, 4), (2, 4, 5), (2, 4, 5))


def test_sizes_stand_for_tensors_and_both_directions_run(watching):
    statescan.prepare("selective_scan", *SCAN, D=(8,), device="cpu", dtype=torch.bfloat16)
    directions = {direction for _, direction in watching.ran}
    assert directions == {"fwd", "bwd"}
    x, _, A, *_, D = watching.seen["fwd"]
    assert (x.shape, x.dtype) == ((2, 8, 5), torch.bfloat16)
    assert (A.dtype, D.dtype) == (torch.float32, torch.float32)


def test_without_backward_only_the_forward_runs(watching):
    statescan.prepare(statescan.selective_scan, *SCAN, device="cpu", backward=False)
    assert watching.ran == [("selective_scan", "fwd")]


def test_sizes_of_index_arguments_give_integers(watching):
    statescan.prepare("causal_conv1d", (2, 8, 5), (8, 4), seq_idx=(2, 5), device="cpu")
    kinds = {tensor.dtype for tensor in watching.seen["fwd"]}
    assert kinds == {torch.float32, torch.int32}


def test_tensors_lend_strides_and_alignment_and_are_not_touched(watching):
    x = torch.randn(2, 5, 9)[:, :, 1:].transpose(1, 2)
    before, version = x.clone(), x._version
    statescan.prepare("causal_conv1d", x, (8, 4))
    seen = watching.seen["fwd"][0]
    assert seen.stride() == x.stride()
    assert seen.data_ptr() % 16 == x.data_ptr() % 16
    assert seen.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
    assert x._version == version
    assert not x.requires_grad


def test_states_are_not_advanced(watching):
    state = torch.randn(2, 8, 3)
    before = state.clone()
    statescan.prepare("causal_conv1d_update", torch.randn(2, 8), state, (8, 4))
    assert watching.ran == [("causal_conv1d_update", "")]
    assert torch.equal(state, before)


def test_wrong_names_and_arguments_are_told():
    with pytest.raises(ArgumentError, match="'scan' is not an op"):
        statescan.prepare("scan", (1, 2, 3))
    with pytest.raises(ArgumentError, match="missing a required argument: 'weight'"):
        statescan.prepare("causal_conv1d", (1, 2, 3), device="cpu")
