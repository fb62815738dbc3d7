# SPDX-License-Identifier: Apache-2.0
"""Which versions are chosen, which targets are refused, and what is offered instead."""

import itertools

import pytest

import statescan
from statescan.doctor import catalog, releases
from statescan.doctor.generate import WRITERS, choices
from statescan.doctor.generate.choice import number
from statescan.doctor.generate.choices import PACKAGES, choose
from statescan.doctor.generate.matrix import ImpossibleTarget
from statescan.doctor.generate.table import known_torch
from statescan.doctor.generate.target import Target, parse

INDEX = "https://download.pytorch.org/whl/"


def chosen(text, package="mamba-ssm", kind="requirements"):
    return choose(kind, package, parse(text))


def refused(text, package="mamba-ssm", kind="requirements"):
    with pytest.raises(ImpossibleTarget) as caught:
        chosen(text, package, kind)
    return caught.value


@pytest.mark.parametrize(
    ("text", "torch", "index"),
    [
        ("torch=2.7 cuda=12.8", "torch==2.7.1+cu128", INDEX + "cu128"),
        ("torch=2.7.0 cuda=11.8", "torch==2.7.0+cu118", INDEX + "cu118"),
        ("torch=2.7 cuda=none", "torch==2.7.1+cpu", INDEX + "cpu"),
        ("torch=2.7 cuda=none machine=aarch64", "torch==2.7.1", INDEX + "cpu"),
        ("torch=2.7 cuda=rocm6.3", "torch==2.7.1+rocm6.3", INDEX + "rocm6.3"),
        ("torch=2.7 os=windows", "torch==2.7.1", ""),
        ("torch=2.7 os=windows cuda=12.8", "torch==2.7.1+cu128", INDEX + "cu128"),
        ("torch=2.7 os=macos", "torch==2.7.1", ""),
    ],
)
def test_the_build_of_torch_and_its_index(text, torch, index):
    found = chosen(text, "statescan")
    assert (found.torch, found.index) == (torch, index)


def test_statescan_is_pinned_to_the_version_that_writes():
    assert chosen("torch=2.7", "statescan").extras == (f"statescan=={statescan.__version__}",)
    there = Target(origin="facts", os="linux", machine="x86_64", statescan="7.8.9")
    assert choose("lock", "statescan", there).extras == ("statescan==7.8.9",)


def test_statescan_needs_no_toolkit():
    found = chosen("torch=2.7 cuda=12.8 python=3.11", "statescan", "dockerfile")
    assert found.sources == ()
    assert found.build.tools == ()
    assert found.images.build == found.images.final == "python:3.11.13-slim-bookworm"


@pytest.mark.parametrize("torch", list(known_torch()))
@pytest.mark.parametrize("package", PACKAGES)
def test_every_known_torch_has_files(package, torch):
    if package == "statescan" and number(torch) < (2, 4):
        assert "needs torch 2.4" in refused(f"torch={torch}", package).needed
        return
    target = chosen(f"torch={torch}", package).target
    assert target.python in releases.torch_pythons(torch)
    assert target.cuda in ("none", *known_torch()[torch]["cuda"])
    assert (target.cuda == "none") == (package == "statescan")


def test_the_pair_fits():
    for torch in known_torch():
        conv, mamba = chosen(f"torch={torch}").sources
        assert (conv.package, mamba.package) == ("causal-conv1d", "mamba-ssm")
        offered = releases.release("causal-conv1d", conv.version)
        called = releases.release("mamba-ssm", mamba.version)
        assert offered.conv_generation == called.conv_generation
        assert offered.sdist_has_sources
        assert called.sdist_has_sources


def test_the_convolution_alone():
    (source,) = chosen("torch=2.7 cuda=12.8", "causal-conv1d").sources
    assert source.package == "causal-conv1d"
    assert source.command.env["CAUSAL_CONV1D_FORCE_BUILD"] == "TRUE"


def test_the_builds_say_all_that_they_need():
    for source in chosen("torch=2.7 cuda=12.8").sources:
        assert source.command.run[:2] == ("pip", "install")
        assert "--no-build-isolation" in source.command.run
        assert "--no-deps" in source.command.run
        assert source.command.run[-1] == f"{source.package}=={source.version}"
        assert source.command.env["MAX_JOBS"] == "2"
    assert source.command.env["MAMBA_FORCE_BUILD"] == "TRUE"
    assert source.command.env["MAMBA_KEEP_CUDA_BUILD"] == "TRUE"


def test_triton_does_not_force_another_torch():
    """mamba-ssm 2.3.2 asks for Triton 3.5, which torch before 2.9 does not have."""
    assert number(chosen("torch=2.7").sources[1].version) < (2, 3, 2)
    assert number(chosen("torch=2.9").sources[1].version) >= (2, 3, 2)


def test_a_gpu_that_the_newest_releases_left_out():
    """V100: the last releases with its code are taken rather than newer ones without."""
    for text, has in (("gpu=7.0", True), ("gpu=9.0", False)):
        for source in chosen(f"torch=2.9 cuda=12.6 {text}").sources:
            release = releases.release(source.package, source.version)
            assert ("sm_70" in release.cubins("12.6")) is has
            assert "NVCC_APPEND_FLAGS" not in source.command.env


def test_a_gpu_that_no_release_has_code_for():
    found = chosen("torch=2.6 cuda=12.6 gpu=6.1")
    for source in found.sources:
        flags = source.command.env["NVCC_APPEND_FLAGS"]
        assert "-gencode arch=compute_61,code=sm_61" in flags
    assert found.why("NVCC_APPEND_FLAGS")
    for source in chosen("torch=2.6 cuda=12.6 gpu=9.0").sources:
        assert "NVCC_APPEND_FLAGS" not in source.command.env


@pytest.mark.parametrize("cuda", ["11.8", "12.1", "12.4", "12.6", "12.8", "12.9", "13.0", "13.2"])
def test_the_compiler_is_one_that_nvcc_accepts(cuda):
    found = chosen(f"cuda={cuda}", kind="dockerfile")
    low, high = releases.gcc_bounds(cuda)
    assert number(str(low)) <= number(found.build.gcc) <= number(str(high))
    assert found.images.build.startswith(f"nvidia/cuda:{cuda}.")
    assert "-devel-" in found.images.build
    assert found.images.final == found.images.build.replace("-devel-", "-runtime-")


def test_jobs_by_the_memory_of_the_machine():
    def jobs(kind="requirements", **known):
        there = Target(origin="facts", os="linux", machine="x86_64", torch="2.7.1", **known)
        return choose(kind, "mamba-ssm", there).build.jobs

    assert jobs(memory_gb=128.0, cores=8) == 8
    assert jobs(memory_gb=32.0, cores=64) == 5
    assert jobs(memory_gb=2.0, cores=64) == 1
    assert jobs() == 2
    # A workflow runs on another machine than the one that wrote it.
    assert jobs("ci", memory_gb=128.0, cores=64) == 2


def test_a_cuda_for_the_driver():
    def cuda(driver):
        there = Target(origin="facts", os="linux", machine="x86_64", driver_cuda=driver)
        return choose("requirements", "mamba-ssm", there).target.cuda

    assert number(cuda("13.1"))[0] == 13
    assert number(cuda("12.4"))[0] == 12


def test_a_cpu_torch_is_replaced_where_cuda_is_needed():
    there = Target(
        origin="facts", os="linux", machine="x86_64", python="3.11", torch="2.7.1", cuda="none"
    )
    found = choose("requirements", "mamba-ssm", there)
    assert found.target.cuda != "none"
    assert found.target.torch == "2.7.1"
    assert "this machine's torch is a CPU build" in found.why("cuda")
    assert choose("requirements", "statescan", there).target.cuda == "none"


def test_a_torch_newer_than_the_table_is_said():
    found = chosen("torch=2.99.0 cuda=13.0 python=3.12", "statescan")
    assert found.torch == "torch==2.99.0+cu130"
    assert "2.99.0 is newer than this statescan" in found.notes[0]
    assert chosen("torch=2.7", "statescan").notes == ()


@pytest.mark.parametrize(
    ("text", "package", "reason", "nearest"),
    [
        ("torch=2.7 python=3.14", "mamba-ssm", "no wheels for Python 3.14", "python=3.13"),
        ("torch=2.7 python=3.14", "statescan", "no wheels for Python 3.14", "python=3.13"),
        ("cuda=12.8 torch=2.1", "mamba-ssm", "never built for CUDA 12.8", "cuda=12.1"),
        ("os=macos", "mamba-ssm", "macOS has no CUDA", "os=linux"),
        ("os=macos cuda=12.8", "statescan", "macOS has no CUDA", "os=macos"),
        ("os=windows cuda=12.8", "causal-conv1d", "no Windows wheels", "os=linux"),
        ("cuda=none", "mamba-ssm", "CUDA kernels only", "cuda=12"),
        ("cuda=rocm6.3", "causal-conv1d", "CUDA kernels only", "cuda=12"),
        ("cuda=12.3 torch=2.4", "mamba-ssm", "No torch is built for CUDA 12.3", "cuda=12.4"),
        ("cuda=10.2", "mamba-ssm", "No torch is built for CUDA 10.2", "cuda=11.8"),
        ("torch=1.13", "mamba-ssm", "not in the table", "torch=2.1"),
        ("torch=2.3", "statescan", "does not run with torch 2.3", "torch=2.4"),
        ("python=3.9", "statescan", "does not run with Python 3.9", "python=3.10"),
        ("cuda=12.8 gpu=7.0", "mamba-ssm", "do not run on compute capability 7.0", "cuda=12.6"),
        ("cuda=12.6 gpu=12.0", "statescan", "do not run on compute capability 12.0", "cuda=12.8"),
        ("python=3.8 torch=2.2", "mamba-ssm", "No release of mamba-ssm fits", "python=3.9"),
    ],
)
def test_impossible_targets(text, package, reason, nearest):
    refusal = refused(text, package)
    assert reason.lower() in refusal.reason.lower()
    assert refusal.needed
    assert nearest in refusal.nearest
    assert refusal.nearest in str(refusal)


def test_what_is_offered_instead_is_possible():
    torches = ("", "1.13", "2.1", "2.7", "2.13")
    cudas = ("", "none", "11.8", "12.3", "12.8", "13.2")
    pythons, gpus = ("", "3.8", "3.14"), ("", "7.0", "12.0")
    offered = set()
    for package, torch, cuda, python, gpu in itertools.product(
        PACKAGES, torches, cudas, pythons, gpus
    ):
        asked = Target(torch=torch, cuda=cuda, python=python, gpus=(gpu,) if gpu else ())
        try:
            choose("dockerfile", package, asked)
        except ImpossibleTarget as refusal:
            offered.add((package, refusal.nearest))
    assert len(offered) > 50
    for package, nearest in offered:
        target = parse(nearest)
        found = choose("dockerfile", package, target).target
        for name in ("torch", "cuda", "python", "os", "machine", "gpus"):
            said = getattr(target, name)
            assert getattr(found, name) == said or (name == "torch" and said in found.torch)


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        (Target(origin="facts", os="linux", machine="x86_64", libc="musl"), "musl"),
        (Target(origin="facts", os="linux", machine="ppc64le", libc="glibc"), "ppc64le"),
    ],
)
def test_machines_without_wheels_of_torch(there, reason):
    with pytest.raises(ImpossibleTarget, match=reason):
        choose("requirements", "statescan", there)


def test_a_container_does_not_care_about_the_host():
    """Alpine and Windows run Linux images."""
    for there in (
        Target(origin="facts", os="linux", machine="x86_64", libc="musl"),
        Target(origin="facts", os="windows", machine="x86_64"),
    ):
        assert choose("dockerfile", "mamba-ssm", there).target.os == "linux"


@pytest.mark.parametrize("kind", list(WRITERS))
@pytest.mark.parametrize("package", PACKAGES)
def test_every_choice_has_a_reason(kind, package):
    rows = choose(kind, package, parse("torch=2.7")).rows
    assert len(rows) >= 6
    for row in rows:
        assert row.name
        assert row.value
        assert len(row.why) > 5
        assert not row.why.endswith(".")
    assert len({row.name for row in rows}) == len(rows)


def test_the_images_are_of_the_cudas_that_torch_has():
    cudas = {cuda for row in known_torch().values() for cuda in row["cuda"]}
    images = catalog.load("images")
    assert set(images["cuda"]) == set(images["conda_labels"]) == cudas
    for cuda, image in images["cuda"].items():
        assert image["release"].startswith(f"{cuda}.")
        assert image["system"] in images["systems"]
    assert set(catalog.load("pins")["torch_gpus"]) == cudas


def test_names_are_good_for_images_and_environments():
    assert chosen("torch=2.7 cuda=12.8 python=3.11").name == "mamba-ssm-py311-torch271-cu128"
    assert chosen("torch=2.7", "statescan").name.startswith("statescan-py3")
    assert chosen("torch=2.7 os=macos", "statescan").name.endswith("-cpu")


def test_two_writers_of_the_same_thing_agree_on_the_names():
    from statescan.cli import write

    assert tuple(write.KINDS) == tuple(WRITERS)
    assert write.PACKAGES == choices.PACKAGES
