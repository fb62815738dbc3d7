# SPDX-License-Identifier: Apache-2.0
"""Checks of what a build of the originals needs: toolkit, compilers, headers, memory, disk."""

from __future__ import annotations

import pytest
from helpers.judging import facts, ids, only, to_build
from helpers.machine_parts import (
    GTX_1080_TI,
    RTX_5090,
    V100,
    compiler,
    home,
    no_gcc,
    no_toolkit,
    use_gcc,
    use_gpu,
    use_python,
    use_toolkit,
    use_torch,
)
from helpers.machines_base import linux, windows

from statescan.doctor.checks import known, matrix
from statescan.doctor.model import Facts, Severity
from statescan.doctor.releases import releases

MAMBA = "mamba-ssm"


def with_nvcc(version, values=None, **toolkit):
    values = values or to_build()
    use_toolkit(values, {**home("/usr/local/cuda", version, ["PATH"]), **toolkit}, "PATH")
    return values


def cuda_home(path, *, exists=False):
    return {"path": path, "via": "CUDA_HOME", "exists": exists, "nvcc": None, "version": None}


@pytest.mark.parametrize(
    ("path", "exists", "words"),
    [
        ("/opt/cuda-12.1", False, "no such folder"),
        ("/opt/runtime", True, "no bin/nvcc in it"),
        ("/usr/local/cuda/bin", True, "the folder above bin"),
        ("/usr/local/cuda-12:/usr/local/cuda-11", False, "a list of folders"),
    ],
)
def test_cuda_home_says_what_is_wrong_with_it(path, exists, words):
    values = to_build()
    row = only(values, MAMBA, toolkit__build=cuda_home(path, exists=exists))
    assert row.problem.slug == "cuda-home-wrong"
    assert words in row.summary
    assert path in row.summary
    assert row.evidence[1:] == ("a toolkit: /usr/local/cuda",)
    assert any(step.set.get("CUDA_HOME") == "/usr/local/cuda" for step in row.fix.commands)


def test_a_colon_is_part_of_paths_of_windows():
    build = {**cuda_home("C:\\CUDA", exists=True), "via": "CUDA_PATH"}
    row = only(windows(), "causal-conv1d", toolkit__build=build)
    assert "no bin/nvcc in it" in row.summary


def test_no_nvcc_and_the_wheel_that_needs_none():
    values = linux()
    no_toolkit(values)
    row = only(values, MAMBA)
    assert row.problem.slug == "nvcc-missing"
    assert (
        "mamba_ssm-2.3.1+cu12torch2.7cxx11abiTRUE-cp311-cp311-linux_x86_64.whl"
        in (row.evidence[-1])
    )
    values = to_build()
    no_toolkit(values)
    assert only(values, MAMBA).evidence == ()


def test_a_toolkit_off_the_path_is_named_in_the_fix():
    values = to_build()
    no_toolkit(values)
    others = [home("/opt/cuda-11.8", "11.8", ["/opt"]), home("/opt/cuda-12.8", "12.8", ["/opt"])]
    row = only(values, MAMBA, toolkit__homes=others)
    assert "there is a toolkit in /opt/cuda-12.8" in row.summary, "the one of torch's CUDA"
    assert any(step.set.get("CUDA_HOME") == "/opt/cuda-12.8" for step in row.fix.commands)


@pytest.mark.parametrize(("version", "old"), [("10.1", True), ("11.5", True), ("11.6", False)])
def test_nvcc_from_11_6_on(version, old):
    values = to_build()
    use_torch(values, "2.7.1+cu118", "11.8", "3.3.1")
    assert ids(with_nvcc(version, values), MAMBA) == (["nvcc-too-old"] if old else [])


def test_nvcc_of_another_major_version_than_torch():
    row = only(with_nvcc("13.0"), MAMBA)
    assert row.problem.slug == "nvcc-torch-cuda-mismatch"
    assert "13.0" in row.summary
    assert "12.8" in row.summary
    assert ids(with_nvcc("12.4"), MAMBA) == []
    assert ids(with_nvcc("13.0", linux()), MAMBA) == [], "a wheel is published"


@pytest.mark.parametrize("version", ["10.1", "13.0"])
def test_a_toolkit_that_would_do_is_named_in_the_fix(version):
    values = with_nvcc(version)
    values["toolkit.homes"].append(home("/opt/cuda-12.6", "12.6", ["/opt"]))
    row = only(values, MAMBA)
    assert row.fix.text == "Let CUDA_HOME name /opt/cuda-12.6, the CUDA 12.6 toolkit that is there."
    assert row.fix.safe
    assert row.fix.commands[0].set == {"CUDA_HOME": "/opt/cuda-12.6"}
    assert row.fix.commands[-1].run[-1] == MAMBA


def test_a_wrapper_of_nvcc_hides_the_headers_of_its_toolkit():
    values = with_nvcc("12.8", headers={"cuda_runtime.h": False})
    values["toolkit.homes"].append(home("/usr/local/cuda-12.8", "12.8", ["/usr/local"]))
    row = only(values, MAMBA)
    assert row.problem.slug == "cuda-headers-missing"
    assert "/usr/local/cuda-12.8" in row.fix.text


def test_headers_that_were_not_looked_for_are_not_missing():
    assert ids(with_nvcc("12.8", headers={}), MAMBA) == []
    row = only(with_nvcc("12.8", headers={"cuda_bf16.h": False, "cuda_fp16.h": True}), MAMBA)
    assert row.problem.slug == "cuda-headers-missing"
    assert row.evidence == ("missing: cuda_bf16.h",)


def test_headers_of_cuda_libraries_are_not_needed():
    assert ids(with_nvcc("12.8", headers={"cusparse.h": False}), MAMBA) == []


def test_a_library_to_link_with():
    row = only(with_nvcc("12.8", libraries={"cudart": None}), MAMBA)
    assert row.problem.slug == "cuda-lib-link-missing"
    assert ids(with_nvcc("12.8", libraries={}), MAMBA) == []


@pytest.mark.parametrize(
    ("nvcc", "gcc", "found"),
    [
        ("12.1", "12.3.0", []),
        ("12.1", "13.1.0", ["gcc-too-new-for-nvcc"]),
        ("12.4", "13.3.0", []),
        ("12.8", "14.2.0", []),
        ("12.8", "15.1.0", ["gcc-too-new-for-nvcc"]),
        ("12.8", "9.1.0", []),
        ("12.8", "8.5.0", ["gcc-too-old"]),
    ],
)
def test_gcc_between_torch_and_nvcc(nvcc, gcc, found):
    values = with_nvcc(nvcc)
    use_gcc(values, gcc)
    assert ids(values, MAMBA) == found


def test_another_gcc_on_the_path_is_named():
    values = with_nvcc("12.1")
    use_gcc(values, "14.2.0")
    values["compiler.available"] += [compiler("g++-12", "12.4.0"), compiler("g++-4", "4.8.5")]
    assert "on PATH as well: g++-12 (12.4.0)" in only(values, MAMBA).evidence
    use_gcc(values, "4.8.5")
    values["compiler.available"] += [compiler("g++-12", "12.4.0")]
    assert "on PATH as well: g++-12 (12.4.0)" in only(values, MAMBA).evidence


def test_clang_is_not_measured_by_gcc():
    values = to_build()
    clang = compiler("clang++", "19.1.0", family="clang")
    assert ids(values, MAMBA, compiler__cxx=clang, compiler__cuda_host=clang) == []


def test_no_compiler_is_the_cause_for_triton_too():
    values = to_build()
    no_gcc(values)
    assert ids(values, MAMBA) == ["host-compiler-missing"]
    values = linux()
    no_gcc(values)
    assert ids(values, MAMBA) == ["triton-host-compiler"], "a wheel needs no C++ compiler"
    assert ids(values, "causal-conv1d") == []


def test_python_headers_for_a_build():
    headers = {"folder": "/usr/include/python3.14", "present": False}
    row = only(to_build(), "causal-conv1d", python__headers=headers)
    assert row.problem.slug == "python-headers-missing"
    assert "python3.14-dev" in row.fix.commands[0].run


def test_visual_c():
    assert ids(windows(), "causal-conv1d", compiler__msvc=None) == ["msvc-missing"]
    assert ids(windows(), "causal-conv1d") == []
    newer = {"version": "19.60", "path": "cl.exe", "sdk": True, "prompt": True}
    row = only(windows(), "causal-conv1d", compiler__msvc=newer)
    assert row.problem.slug == "msvc-too-new-for-nvcc"
    assert ids(windows(), MAMBA) == ["msvc-code-portability"]
    assert ids(windows()) == []


@pytest.mark.parametrize(("version", "old"), [("5.7.31", True), ("6.2.4", False)])
def test_rocm_from_6_0_on(version, old):
    values = to_build()
    no_toolkit(values)
    use_torch(values, "2.10.0+rocm", None, None)
    changes = {"torch__hip": version, "driver__gpus": [], "torch__devices": []}
    found = ids(values, MAMBA, **changes, driver__amd={"rocm": version, "gpus": ["gfx942"]})
    assert found == (["rocm-hip-compile"] if old else [])


def test_a_gpu_that_no_release_has_code_for():
    values = to_build()
    use_torch(values, "2.10.0+cu126", "12.6", "3.6.0", archs=("sm_61", "sm_80"))
    use_gpu(values, GTX_1080_TI)
    row = only(with_nvcc("12.6", values), MAMBA)
    assert (row.problem.slug, row.severity) == ("gpu-arch-not-in-binary", Severity.ERROR)
    assert "sm_61" in row.fix.text
    wheel = linux()
    use_torch(wheel, "2.7.1+cu126", "12.6", "3.3.1", archs=("sm_61", "sm_80"))
    use_gpu(wheel, GTX_1080_TI)
    row = only(wheel, MAMBA)
    assert row.severity is Severity.ERROR
    assert "has a wheel for" in row.summary


def test_a_gpu_that_only_older_releases_have_code_for():
    values = to_build()
    use_torch(values, "2.10.0+cu126", "12.6", "3.6.0", archs=("sm_70", "sm_80"))
    use_gpu(values, V100)
    row = only(with_nvcc("12.6", values), MAMBA)
    assert (row.problem.slug, row.severity) == ("gpu-arch-not-in-binary", Severity.WARNING)
    assert "mamba-ssm 2.3.1 is the last one" in row.evidence[-1]


def test_a_gpu_that_nvcc_does_not_know():
    values = to_build()
    use_gpu(values, RTX_5090)
    assert ids(values, MAMBA) == []
    row = only(with_nvcc("12.4", values), MAMBA)
    assert row.problem.slug == "nvcc-arch-unsupported"
    assert "12.0" in row.summary


def test_memory_for_as_many_compilers_as_would_run():
    def memory(free, limit=None):
        return {"total_gb": 64.0, "free_gb": free, "limit_gb": limit}

    values = to_build()
    row = only(values, MAMBA, system__memory=memory(11.0))
    assert (row.problem.slug, row.severity) == ("build-out-of-memory", Severity.WARNING)
    assert "10 compilers at once (16 cores" in row.summary
    assert ids(values, "causal-conv1d", system__memory=memory(11.0)) == [], "it has few files"
    assert ids(values, MAMBA, system__memory=memory(11.0), system__cores=4) == []
    values["environment.variables"]["MAX_JOBS"] = "4"
    assert ids(values, MAMBA, system__memory=memory(11.0)) == []
    row = only(values, MAMBA, system__memory=memory(50.0, 2.0))
    assert row.severity is Severity.ERROR
    assert "limit of this container: 2.0 GB" in row.evidence
    assert ids(values, MAMBA, system__memory={}) == []


def test_disk_for_a_build_and_for_an_install():
    def disks(tmp, site=100.0):
        return {
            "tmp": {"path": "/tmp", "free_gb": tmp},
            "site": {"path": "/venv", "free_gb": site},
        }

    row = only(to_build(), MAMBA, system__disks=disks(1.2))
    assert row.problem.slug == "disk-full"
    assert "/tmp has 1.2 GB free" in row.summary
    assert row.evidence == ("/venv: 100.0 GB free",)
    assert ids(linux(), MAMBA, system__disks=disks(1.2)) == [], "a wheel is small"
    assert ids(linux(), MAMBA, system__disks=disks(100.0, 0.1)) == ["disk-full"]
    assert ids(to_build(), MAMBA, system__disks={"tmp": None}) == []


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("mamba_ssm-2.2.2-cp314-cp314-linux_x86_64.whl", True),
        ("mamba_ssm-2.2.2-cp310-cp310-linux_x86_64.whl", False),
        ("causal_conv1d-1.4.0-cp314-cp314-linux_x86_64.whl", False),
    ],
)
def test_a_wheel_that_pip_would_take_from_its_cache(file, found):
    cached = [{"file": file, "path": f"/home/user/.cache/pip/wheels/{file}"}]
    values = to_build()
    assert ids(values, MAMBA, caches__pip_wheels=cached) == (["stale-wheel-cache"] if found else [])
    assert ids(values, caches__pip_wheels=cached) == []


def test_the_release_that_fits_this_python_and_triton():
    values = linux()
    assert known.fitting(facts(values), MAMBA).version == "2.3.1", "torch 2.7 has Triton 3.3"
    assert known.fitting(facts(to_build()), MAMBA).version == releases(MAMBA)[-1].version
    use_python(values, "3.8.10")
    assert known.fitting(facts(values), MAMBA).version == "2.2.2"


def test_wheels_of_containers_are_named_by_the_container():
    values = linux()
    assert known.published(facts(values), MAMBA) is True
    assert known.published(facts(values, system__ngc="25.06"), MAMBA) is not True
    assert known.published(facts(values, system__os="windows"), MAMBA) is False
    musl = {"kind": "musl", "version": "1.2"}
    assert known.published(facts(values, system__libc=musl), MAMBA) is False


def test_a_release_newer_than_the_table_of_wheels_is_taken_to_have_them_too():
    assert known.published(facts(linux()), "causal-conv1d") is True


def test_the_matrix_says_where_the_machine_stands():
    rows = matrix.build(facts(linux(), python__version="3.8.1"))
    stands = {(row["package"], row["component"]): row["stands"] for row in rows["packages"]}
    assert stands["statescan", "python"] == "too old"
    assert stands["statescan", "cuda"] == "not needed"
    assert stands["mamba-ssm", "cuda"] == "ok"
    assert rows["here"] == {
        "python": "3.8.1",
        "torch": "2.7.1+cu128",
        "cuda": "12.8",
        "gcc": "11.4.0",
    }
    newest = rows["releases"][0]
    assert (newest["package"], newest["version"]) == (MAMBA, releases(MAMBA)[-1].version)
    assert newest["torch"]["least"] == "2.9", "the first torch with Triton 3.5"
    assert newest["for_this_python"] is False
    counts = {MAMBA: len(releases(MAMBA)), "causal-conv1d": len(releases("causal-conv1d"))}
    assert len(rows["releases"]) == sum(counts.values())


def test_the_matrix_of_one_package_and_of_an_unknown_machine():
    rows = matrix.build(Facts(), "causal-conv1d")
    assert {row["package"] for row in rows["packages"] + rows["releases"]} == {"causal-conv1d"}
    assert {row["stands"] for row in rows["packages"]} == {"missing"}
    for row in rows["releases"]:
        for component in matrix.COMPONENTS:
            least, best = row[component]["least"], row[component]["best"]
            assert not known.older(best, least), (row["version"], component)
