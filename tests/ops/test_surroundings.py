# SPDX-License-Identifier: Apache-2.0
"""Global settings of torch that users change must not change what an op computes.

Autocast is in the tests of each op; compilation and transforms have their own files.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.differential import (
    assert_same,
    call,
    check_sequence,
    check_update,
    differentiate,
    draw_cotangents,
)
from helpers.op_inputs import conv_inputs, inner_inputs, scan_inputs, state_inputs, taps_inputs

from statescan.errors import ArgumentError

SEQ_IDX = torch.tensor([[0, 0, 1, 1, -1, 2, 2, 2, -1], [-1, 0, 0, 0, 0, 1, 1, 1, 1]])
NORMS = (
    "b_norm_weight c_norm_weight dt_norm_weight conv_bias out_proj_weight out_proj_bias D "
    "initial_states"
)


def sequence_calls():
    """(op, arguments) that together take every road through a backend."""
    for reverse in (False, True):
        packed = {"seq_idx": SEQ_IDX, "reverse": reverse}
        bounds = {"cu_seqlens": torch.tensor([0, 2, 2, 9]), "reverse": reverse}
        for kind in ({}, {"ngroups": 2}, {"constant": "BC"}, {"is_complex": True}):
            yield "selective_scan", scan_inputs(**kind) | packed
            yield "selective_scan", scan_inputs(1, num_states=3, **kind) | bounds
        yield "causal_conv1d", conv_inputs() | packed
        yield "causal_conv1d", conv_inputs(1, num_states=3) | bounds
        yield "mamba_inner", inner_inputs(seqlen=9, options=NORMS) | packed
        yield "mamba_inner", inner_inputs(1, seqlen=9, num_states=3, is_complex=True) | bounds


def update_calls():
    rows = torch.tensor([4, -1, 0])
    for kind in ({}, {"ntokens": 2, "ngroups": 2}, {"heads": (4, 3)}, {"is_complex": True}):
        made = state_inputs(slots=5, kept=2, **kind) | {"state_batch_indices": rows}
        yield "selective_state_update", made
        yield "selective_state_update", made | {"num_accepted_tokens": torch.tensor([1, 9, 0])}
    for kind in ({}, {"ntokens": 2}):
        made = taps_inputs(slots=5, kept=2, **kind) | {"conv_state_indices": rows}
        yield "causal_conv1d_update", made
        yield "causal_conv1d_update", made | {"cache_seqlens": torch.tensor([1, 2, 7])}
        yield "causal_conv1d_update", made | {"num_accepted_tokens": torch.tensor([1, 9, 0])}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def flushed_denormals():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


SETTINGS = {
    "default_dtype_float64": lambda: default_dtype(torch.float64),
    "default_dtype_bfloat16": lambda: default_dtype(torch.bfloat16),
    "default_device": lambda: torch.device("meta"),
    "deterministic_algorithms": deterministic,
    "flushed_denormals": flushed_denormals,
    "anomaly_detection": torch.autograd.detect_anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_do_not_reach_sequences(backend, setting):
    for op, kwargs in sequence_calls():
        cotangents = draw_cotangents(op, kwargs)

        def run():
            return differentiate(lambda **named: call(op, named, backend), op, kwargs, cotangents)  # noqa: B023

        expected = run()
        with SETTINGS[setting]():
            results = run()
        for name, result in results.items():
            assert (result.dtype, result.device) == (expected[name].dtype, expected[name].device)
            assert_same(result, expected[name], f"{op} {name}")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_do_not_reach_steps(backend, setting):
    for op, kwargs in update_calls():
        other = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
        expected = call(op, kwargs, backend)
        with SETTINGS[setting]():
            result = call(op, other, backend)
        assert_same(result, expected)
        for name in ("ssm_state", "conv_state", "intermediate_states"):
            if name in kwargs:
                assert_same(other[name], kwargs[name], name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_the_same_bits(backend, mode):
    """What is saved for the backward does not change the forward."""
    for op, kwargs in sequence_calls():
        leaves = {
            n: v.clone().requires_grad_()
            for n, v in kwargs.items()
            if isinstance(v, torch.Tensor) and n not in ("seq_idx", "cu_seqlens")
        }
        recorded = call(op, kwargs | leaves, backend)
        with mode():
            plain = call(op, kwargs | leaves, backend)
        for result, expected in zip(plain, recorded, strict=True):
            assert not result.requires_grad
            assert_same(result, expected.detach(), op)
    for op, kwargs in update_calls():
        with mode():
            check_update(op, kwargs, backend)


def test_calls_from_several_threads(backend):
    """No working memory is shared between calls."""
    calls = list(sequence_calls())

    def run(item):
        op, kwargs = item
        return [check_sequence(op, kwargs, backend)["out"] for _ in range(2)]

    with ThreadPoolExecutor(4) as pool:
        for first, second in pool.map(run, calls):
            assert_same(first, second)


@pytest.mark.parametrize("written", ["pool", "intermediate_states", "out"])
def test_memory_that_overlaps_itself_is_not_written(backend, written):
    """A state, history or result whose elements share memory is refused before any write."""
    for op, kwargs in update_calls():
        name = written
        if written == "pool":
            name = "ssm_state" if "ssm_state" in kwargs else "conv_state"
        value = torch.zeros_like(kwargs["x"]) if written == "out" else kwargs[name]
        spoilt = kwargs | {name: value[:1].expand(value.shape)}
        before = {n: v.clone() for n, v in spoilt.items() if isinstance(v, torch.Tensor)}
        with pytest.raises(ArgumentError, match=f"'{name}'"):
            call(op, spoilt, backend)
        for other, old in before.items():
            assert_same(spoilt[other], old, other)
