# SPDX-License-Identifier: Apache-2.0
"""What ``--target`` text and facts say about an environment."""

import pytest

from statescan.doctor.generate.target import KEYS, Target, from_facts, parse
from statescan.doctor.model import Fact, Facts
from statescan.errors import ArgumentError


def facts_of(**values):
    """Facts by name, with __ for the dot."""
    names = {name.replace("__", "."): value for name, value in values.items()}
    return Facts({name: Fact(name, value, "test") for name, value in names.items()})


def test_every_key():
    text = "cuda=12.8.1 torch=2.7.1 python=3.11.7 os=Linux machine=amd64 gpu=12.0,9.0"
    assert parse(text) == Target(
        os="linux",
        machine="x86_64",
        python="3.11",
        torch="2.7.1",
        cuda="12.8",
        gpus=("9.0", "12.0"),
    )


@pytest.mark.parametrize(
    ("text", "torch", "cuda"),
    [
        ("torch=2.7.1+cu128", "2.7.1", "12.8"),
        ("torch=2.7.1+cpu", "2.7.1", "none"),
        ("torch=2.7.1+rocm6.3", "2.7.1", "rocm6.3"),
        ("torch=2.7 cuda=cpu", "2.7", "none"),
        ("torch=2.7.1+cu128 cuda=12.8.1", "2.7.1", "12.8"),
    ],
)
def test_the_build_of_torch(text, torch, cuda):
    assert (parse(text).torch, parse(text).cuda) == (torch, cuda)


def test_its_own_text_is_read_back():
    target = parse("gpu=9.0,8.0 machine=arm64 os=linux python=3.12 torch=2.8 cuda=12.9")
    assert parse(target.text()) == target


@pytest.mark.parametrize(
    "text",
    [
        *("", "   ", "cuda", "cuda=", "=12.8", "toolkit=12.8", "CUDA=12.8"),
        *("torch=new", "torch=2", "torch=2.7.1+cu1", "torch=2.7.0a0", "cuda=twelve", "cuda=12"),
        *("python=3", "python=3.11-dev", "os=beos", "machine=vax", "gpu=h200", "gpu=90"),
        *("torch=2.7 torch=2.8", "torch=2.7.1+cu128 cuda=12.6", "torch=2.7.1+cpu cuda=12.8"),
        *("cuda=12.8\npython=3.11\x00", "torch=2.7;rm -rf"),
    ],
)
def test_anything_else_is_a_usage_error(text):
    with pytest.raises(ArgumentError) as caught:
        parse(text)
    # Exactly this class is a usage error to the program.
    assert type(caught.value) is ArgumentError
    given, needed, example = (
        str(caught.value).splitlines()[0:1] + str(caught.value).splitlines()[-2:]
    )
    assert given.startswith("--target: ")
    assert needed
    assert example.startswith("An example: --target ")


def test_an_unknown_key_lists_the_known_ones():
    with pytest.raises(ArgumentError, match=", ".join(KEYS)):
        parse("cudnn=9")


def test_a_machine_with_a_gpu():
    facts = facts_of(
        system__os="linux",
        system__machine="x86_64",
        system__cores=16,
        system__memory={"total_gb": 128.0, "free_gb": 3.0, "limit_gb": 24.0},
        system__libc={"kind": "glibc", "version": "2.35"},
        python__version="3.11.7",
        torch__version="2.7.1+cu128",
        torch__cuda="12.8",
        driver__cuda="12.9",
        driver__gpus=[{"capability": "9.0"}, {"capability": "9.0"}, {"capability": "8.0"}],
        statescan__version="0.1.0",
        packages__installed={
            "numpy": {"version": "2.1.0"},
            "mine": {"version": "1.0", "editable": True},
            "theirs": {"version": "1.0", "direct_url": "file:///somewhere"},
        },
    )
    assert from_facts(facts) == Target(
        origin="facts",
        os="linux",
        machine="x86_64",
        python="3.11",
        torch="2.7.1",
        cuda="12.8",
        gpus=("8.0", "9.0"),
        driver_cuda="12.9",
        libc="glibc",
        memory_gb=24.0,
        cores=16,
        statescan="0.1.0",
        installed={"mine": None, "numpy": "2.1.0", "theirs": None},
    )


def test_free_memory_does_not_count():
    """It changes from minute to minute, and the file must not."""
    one = facts_of(system__memory={"total_gb": 64.0, "free_gb": 1.0, "limit_gb": None})
    other = facts_of(system__memory={"total_gb": 64.0, "free_gb": 60.0, "limit_gb": None})
    assert from_facts(one) == from_facts(other)
    assert from_facts(one).memory_gb == 64.0


def test_a_machine_of_which_nothing_is_known():
    assert from_facts(Facts()) == Target(origin="facts")


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "expected"),
    [
        ("2.7.1+cpu", None, None, ("2.7.1", "none")),
        ("2.7.1+rocm6.3", None, "6.3.42131", ("2.7.1", "rocm6.3")),
        ("2.7.1", None, "6.2.4", ("2.7.1", "rocm6.2")),
        ("2.13.0", "13.0", None, ("2.13.0", "13.0")),
        # Builds between releases are on no index.
        ("2.7.0a0+79aa17489c.nv25.4", "12.9", None, ("", "")),
        ("2.9.0.dev20250901+cu130", "13.0", None, ("", "")),
    ],
)
def test_the_torch_of_a_machine(version, cuda, hip, expected):
    target = from_facts(facts_of(torch__version=version, torch__cuda=cuda, torch__hip=hip))
    assert (target.torch, target.cuda) == expected
