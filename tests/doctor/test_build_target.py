# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a build is for."""

from __future__ import annotations

import pytest

from statescan.doctor.builder import target
from statescan.doctor.model import Fact, Facts
from statescan.errors import ArgumentError

RTX = {"name": "NVIDIA GeForce RTX 3090", "capability": "8.6", "memory_gb": 24.0}
H100 = {"name": "NVIDIA H100", "capability": "9.0", "memory_gb": 80.0}


def facts(gpus=(), arch_list=""):
    variables = {"TORCH_CUDA_ARCH_LIST": arch_list} if arch_list else {}
    values = {"driver.gpus": list(gpus), "environment.variables": variables}
    return Facts({name: Fact(name, value, "test") for name, value in values.items()})


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["sm_90"], "sm_90"),
        (["90"], "sm_90"),
        (["9.0"], "sm_90"),
        (["compute_90"], "sm_90"),
        (["12.0"], "sm_120"),
        (["sm_90a"], "sm_90a"),
        (["8.6+PTX"], "sm_86 compute_86"),
        (["8.0,8.6", "9.0"], "sm_80 sm_86 sm_90"),
        (["80;80"], "sm_80"),
    ],
)
def test_spellings_of_arch(words, names):
    assert target.choose(words, facts([RTX])).names == tuple(names.split())


@pytest.mark.parametrize("word", ["hopper", "sm_9", "9", "sm_90b", "all", "-1"])
def test_other_words_are_refused(word):
    with pytest.raises(ArgumentError, match="is no GPU code"):
        target.choose([word], facts())


def test_pairs_are_what_nvcc_reads():
    assert target.choose(["9.0+PTX"], facts()).pairs == (
        "arch=compute_90,code=sm_90",
        "arch=compute_90,code=compute_90",
    )


def test_the_gpus_of_the_machine_each_kind_once():
    found = target.choose([], facts([H100, RTX, RTX]))
    assert found.names == ("sm_90", "sm_86")
    assert found.why == "NVIDIA H100, NVIDIA GeForce RTX 3090"


def test_the_variable_that_the_originals_ignore_is_honoured():
    found = target.choose([], facts([RTX], "8.0 9.0+PTX"))
    assert found.names == ("sm_80", "sm_90", "compute_90")
    assert target.choose(["86"], facts([RTX], "8.0")).names == ("sm_86",)
    # A name such as Ampere stands for several; the GPUs that are there decide instead.
    assert target.choose([], facts([RTX], "Ampere")).names == ("sm_86",)


def test_without_gpu_and_wish_the_release_decides():
    found = target.choose([], facts())
    assert (found.names, found.pairs) == ((), ())
    assert "no GPU is visible" in found.why


def test_targets_as_facts_of_gpus():
    rows = target.as_gpus(target.choose(["sm_90a", "120"], facts()))
    assert [row["capability"] for row in rows] == ["9.0", "12.0"]
