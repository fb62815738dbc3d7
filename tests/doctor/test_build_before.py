# SPDX-License-Identifier: Apache-2.0
"""What is decided before a build, and on which recorded machines it is refused, with which fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from statescan.doctor.builder import before
from statescan.doctor.model import Fact, Facts
from statescan.doctor.shells import lines
from statescan.errors import ArgumentError

MACHINES = Path(__file__).parent / "machines"
FOLDER = Path("/home/user/.cache/statescan/builds/x")


def machine(name, **changes):
    facts = Facts.read(MACHINES / f"{name}.json")
    rows = {fact.name: fact for fact in facts}
    for key, value in changes.items():
        rows[key.replace("__", ".")] = Fact(key.replace("__", "."), value, "test")
    return Facts(rows)


def prepared(name="healthy-gpu", package="causal-conv1d", version="", archs=(), **changes):
    request = before.Request(package, version, tuple(archs))
    return before.prepare(request, machine(name, **changes), FOLDER, "/home/user/venv/bin/python")


def refused(*args, **options):
    return [row.problem.slug for row in prepared(*args, **options).findings]


def test_a_healthy_machine_may_build_the_newest_release_for_its_gpu():
    setup = prepared()
    assert setup.findings == ()
    assert setup.release.version == "1.7.0"
    assert setup.targets.names == ("sm_86",)
    assert setup.toolkit == "/usr/local/cuda"
    assert setup.environment.set["PYTORCH_NVCC"] == f"{FOLDER}/nvcc"
    assert setup.environment.set["PATH"] == "/usr/local/cuda/bin:/home/user/venv/bin"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("nvcc-missing", "nvcc-missing"),
        ("slim-container", "nvcc-missing"),
        ("cuda-home-list", "cuda-home-wrong"),
        ("conda-nvcc-without-headers", "cuda-headers-missing"),
        ("gcc-14-nvcc-121", "gcc-too-new-for-nvcc"),
        ("no-python-headers", "python-headers-missing"),
        ("no-disk", "disk-full"),
        ("tiny-memory-container", "build-out-of-memory"),
        ("rtx-5090-nvcc-124", "nvcc-arch-unsupported"),
        ("bare-venv", "torch-missing"),
        ("torch-cpu-on-gpu", "torch-is-cpu-only"),
        ("debian-system-python", "externally-managed"),
        ("mac-arm64", "macos-unsupported"),
        ("windows-without-msvc", "msvc-code-portability"),
        ("rocm", "rocm-hip-compile"),
    ],
)
def test_a_build_that_cannot_succeed_is_refused(name, slug):
    found = prepared(name).findings
    assert slug in [row.problem.slug for row in found]
    assert all(row.fix.text for row in found)


@pytest.mark.parametrize("name", ["nvcc-off-path", "two-cudas-wrong-first"])
def test_a_toolkit_that_is_only_not_found_is_found(name):
    """Where the doctor tells what to set, the build sets it."""
    setup = prepared(name)
    assert setup.findings == ()
    assert setup.toolkit.startswith(("/opt/cuda", "/usr/local/cuda-12"))


@pytest.mark.parametrize(
    "name",
    ["switch-is-1", "stale-wheel-cache", "uv-venv-without-tools", "conv-missing"],
)
def test_what_the_build_itself_mends_is_no_reason_to_refuse(name):
    changes = {"python__pip": {"version": "25.0"}} if name.startswith("uv-") else {}
    assert refused(name, **changes) == []


def test_an_installed_package_and_a_published_wheel_hide_nothing():
    """The question is a build, though the package works here and has a wheel."""
    assert refused("healthy-gpu", toolkit__build=None, toolkit__homes=[]) == ["nvcc-missing"]
    old = {"command": "g++", "path": "/usr/bin/g++", "family": "gcc", "version": "4.8.5"}
    found = refused("healthy-gpu", compiler__cxx=old, compiler__cuda_host=old)
    assert "gcc-too-old" in found


def test_a_machine_without_gpu_builds_for_a_named_one():
    no_gpu = {"driver__gpus": [], "torch__devices": [], "torch__cuda_available": False}
    setup = prepared(archs=["sm_90"], **no_gpu)
    assert (setup.findings, setup.targets.names) == ((), ("sm_90",))
    nothing = {"driver__library": None, "driver__version": None, "driver__cuda": None}
    nothing |= {"toolkit__build": None, "toolkit__homes": [], "toolkit__nvcc_on_path": []}
    assert refused(archs=["sm_90"], **no_gpu, **nothing) == ["nvcc-missing"]


def test_a_gpu_that_the_release_lacks_is_no_obstacle_where_nvcc_knows_it():
    setup = prepared("gtx-1080-ti")
    assert setup.findings == ()
    assert setup.targets.pairs == ("arch=compute_61,code=sm_61",)


def test_a_gpu_that_nvcc_does_not_know_any_more():
    toolkit = {
        "path": "/opt/cuda-13.0",
        "via": "CUDA_HOME",
        "exists": True,
        "version": "13.0",
        "nvcc": "/opt/cuda-13.0/bin/nvcc",
    }
    setup = prepared(archs=["sm_70"], toolkit__build=toolkit, torch__cuda="13.0")
    row = next(row for row in setup.findings if row.problem.slug == "nvcc-arch-unsupported")
    assert "sm_75 to sm_121" in row.summary
    assert "CUDA 12 toolkit" in row.fix.text


def test_an_old_release_has_no_sources_and_the_fix_names_one_that_has():
    setup = prepared(version="1.4.0")
    row = next(row for row in setup.findings if row.problem.slug == "sdist-missing-sources")
    assert lines(row.fix.commands[0], "bash") == ["statescan build causal-conv1d --version 1.7.0"]
    assert "only from tag v1.4.0" in row.fix.text
    tagged = lines(row.fix.commands[1], "bash")[-1]
    assert tagged.startswith("CAUSAL_CONV1D_FORCE_BUILD=TRUE python -m pip install ")
    assert tagged.endswith("git+https://github.com/Dao-AILab/causal-conv1d@v1.4.0")
    old = prepared(package="mamba-ssm", version="2.2.2").findings
    row = next(row for row in old if row.problem.slug == "sdist-missing-sources")
    assert row.fix.commands[1].env == {
        "MAMBA_FORCE_BUILD": "TRUE", "MAMBA_KEEP_CUDA_BUILD": "TRUE",
    }  # fmt: skip
    assert row.fix.commands[1].run[-1].endswith("state-spaces/mamba@v2.2.2")


def test_a_release_that_does_not_exist_is_refused_with_the_list():
    with pytest.raises(ArgumentError, match=r"no release 0\.1.*\nReleases: 1\.7\.0, "):
        prepared(version="0.1")
    assert not prepared(version="99.0").release.exact


def test_a_variable_that_leaves_everything_out_is_a_reason_to_refuse():
    assert "skip-build-set" in refused("skip-build-set", package="mamba-ssm")
    assert refused("skip-build-set", package="causal-conv1d") == []


def test_on_windows_only_the_way_out_is_told():
    assert refused("windows-without-msvc") == ["msvc-code-portability"]


def test_memory_is_a_reason_only_where_not_even_one_compiler_fits():
    assert refused("little-memory") == []
    assert "build-out-of-memory" not in [
        row.problem.slug for row in prepared("little-memory").warnings
    ]
