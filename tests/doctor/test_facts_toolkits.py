# SPDX-License-Identifier: Apache-2.0
import os

import pytest
from helpers.fake_machine import machine, nvcc, program, write
from torch.utils import cpp_extension

from statescan.doctor.facts import toolkits


def path(*folders) -> dict[str, str]:
    return {"PATH": os.pathsep.join(map(str, folders))}


def whole(home, version):
    """A toolkit with headers and libraries."""
    nvcc(home, version)
    for name in toolkits.HEADERS:
        write(home / "include" / name)
    write(home / "lib64" / "libcudart.so")
    return home


@pytest.fixture
def two(tmp_path):
    """An old nvcc of the distribution that is first on PATH, and a whole toolkit."""
    nvcc(tmp_path / "usr", "11.5")
    return tmp_path / "usr", whole(tmp_path / "usr/local/cuda-12.4", "12.4")


def test_every_nvcc_in_the_order_of_path(tmp_path, two):
    old, new = two
    here = machine(tmp_path, environ=path(tmp_path / "none", old / "bin", new / "bin", old / "bin"))
    rows = toolkits.nvcc_on_path(here)
    assert [(row["path"], row["version"]) for row in rows] == [
        (str(old / "bin/nvcc"), "11.5"),
        (str(new / "bin/nvcc"), "12.4"),
    ]


def test_a_link_tells_the_real_program(tmp_path, two):
    _, new = two
    link = tmp_path / "bin/nvcc"
    link.parent.mkdir()
    link.symlink_to(new / "bin/nvcc")
    (row,) = toolkits.nvcc_on_path(machine(tmp_path, environ=path(link.parent)))
    assert (row["path"], row["real"]) == (str(link), str(new / "bin/nvcc"))


def test_an_nvcc_that_fails_has_no_version(tmp_path):
    program(tmp_path / "bin/nvcc", script="echo 'release 12.4' >&2; exit 3\n")
    (row,) = toolkits.nvcc_on_path(machine(tmp_path, environ=path(tmp_path / "bin")))
    assert row["version"] is None


def build(here):
    found = toolkits.build(here)
    return None if found is None else found.value


def test_a_build_takes_cuda_home_before_path(tmp_path, two):
    old, new = two
    here = machine(tmp_path, environ={**path(old / "bin"), "CUDA_HOME": str(new)})
    assert build(here) == {
        "path": str(new),
        "via": "CUDA_HOME",
        "exists": True,
        "nvcc": str(new / "bin/nvcc"),
        "version": "12.4",
    }


def test_a_build_takes_the_first_nvcc_of_path_as_it_is_named(tmp_path, two):
    """torch takes the folder above the link's folder, not that of the program behind it."""
    _, new = two
    link = tmp_path / "opt/bin/nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(new / "bin/nvcc")
    found = build(machine(tmp_path, environ=path(link.parent, new / "bin")))
    assert (found["path"], found["via"], found["version"]) == (
        str(tmp_path / "opt"),
        "PATH",
        "12.4",
    )


def test_a_wrong_cuda_home_is_taken_all_the_same(tmp_path, two):
    old, _ = two
    here = machine(tmp_path, environ={**path(old / "bin"), "CUDA_HOME": "/usr/local/cuda:/opt/x"})
    assert build(here) == {
        "path": "/usr/local/cuda:/opt/x",
        "via": "CUDA_HOME",
        "exists": False,
        "nvcc": None,
        "version": None,
    }


def test_the_usual_folder_comes_last(tmp_path):
    assert build(machine(tmp_path)) is None
    whole(tmp_path / "usr/local/cuda", "12.8")
    found = build(machine(tmp_path))
    assert (found["path"], found["via"]) == (str(tmp_path / "usr/local/cuda"), "/usr/local")


@pytest.mark.parametrize("home", [None, "", "given", "/none/such"])
@pytest.mark.parametrize("cuda_path", [None, "", "given"])
@pytest.mark.parametrize("on_path", [True, False])
def test_the_rules_are_those_of_torch(tmp_path, monkeypatch, home, cuda_path, on_path):
    program_folder = nvcc(tmp_path / "toolkit", "12.1").parent
    variables = path(program_folder if on_path else tmp_path / "none")
    for name, value in (("CUDA_HOME", home), ("CUDA_PATH", cuda_path)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            variables[name] = str(tmp_path / "given") if value == "given" else value
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here = machine(tmp_path, environ=variables, root=None)
    assert (build(here) or {"path": None})["path"] == (cpp_extension._find_cuda_home() or None)


def test_windows_takes_the_first_folder_of_its_programs(tmp_path):
    base = tmp_path / "C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA"
    for name in ("v11.8", "v12.4", "old"):
        program(base / name / "bin/nvcc.exe", "Cuda compilation tools, release 12.4, V12.4.1")
    here = machine(tmp_path, "windows")
    found = build(here)
    assert (found["path"], found["via"]) == (str(base / "v11.8"), "Program Files")
    assert found["nvcc"] == str(base / "v11.8/bin/nvcc.exe")
    assert [row["path"] for row in toolkits.homes(here)] == [
        str(base / "v11.8"),
        str(base / "v12.4"),
    ]


def test_the_toolkit_of_a_build_is_the_first_home_under_the_same_name(tmp_path, two):
    old, new = two
    environ = {**path(old / "bin"), "CUDA_HOME": f"{new}/"}
    here = machine(tmp_path, environ=environ)
    rows = toolkits.homes(here)
    assert rows[0]["path"] == build(here)["path"] == f"{new}/"
    assert rows[0]["via"] == ["CUDA_HOME", "/usr/local"]
    assert all(rows[0]["headers"].values())
    assert rows[0]["libraries"]["cudart"] == str(new / "lib64/libcudart.so")
    assert rows[0]["libraries"]["cublas"] is None
    assert [(row["path"], row["via"], row["version"]) for row in rows[1:]] == [
        (str(old), ["PATH"], "11.5")
    ]


def test_one_toolkit_by_two_names_is_one_home(tmp_path, two):
    _, new = two
    (tmp_path / "usr/local/cuda").symlink_to(new)
    (row,) = toolkits.homes(machine(tmp_path))
    assert (row["path"], row["via"]) == (str(tmp_path / "usr/local/cuda"), ["/usr/local"])


def test_conda_nvcc_without_headers(tmp_path):
    prefix = tmp_path / "miniconda3/envs/mamba"
    nvcc(prefix, "12.1")
    (prefix / "conda-meta").mkdir()
    here = machine(tmp_path, environ={**path(prefix / "bin"), "CONDA_PREFIX": str(prefix)})
    (row,) = toolkits.homes(here)
    assert (row["path"], row["via"], row["nvcc"]) == (str(prefix), ["PATH", "conda"], True)
    assert set(row["headers"].values()) == {False}
    assert row["libraries"]["cudart"] is None


def test_headers_that_cuda_13_keeps_in_a_folder_of_their_own(tmp_path):
    home = tmp_path / "usr/local/cuda"
    write(home / "include/cccl/thrust/version.h")
    write(home / "include/cccl/nv/target")
    write(home / "include/cub/version.cuh")
    (row,) = toolkits.homes(machine(tmp_path))
    there = {name for name, present in row["headers"].items() if present}
    assert there == {"thrust/version.h", "nv/target", "cub/version.cuh"}


def test_conda_on_windows_has_its_toolkit_in_library(tmp_path):
    prefix = tmp_path / "conda"
    (prefix / "conda-meta").mkdir(parents=True)
    write(prefix / "Library/include/cuda_runtime.h")
    write(prefix / "Library/lib/cudart.lib")
    (row,) = toolkits.homes(machine(tmp_path, "windows", environ={"CONDA_PREFIX": str(prefix)}))
    assert (row["path"], row["via"]) == (str(prefix / "Library"), ["conda"])
    assert row["libraries"]["cudart"] == str(prefix / "Library/lib/cudart.lib")


def test_headers_and_libraries_of_conda_are_in_targets(tmp_path):
    prefix = tmp_path / "miniconda3"
    (prefix / "conda-meta").mkdir(parents=True)
    write(prefix / "targets/x86_64-linux/include/cuda_runtime.h")
    write(prefix / "targets/x86_64-linux/lib/libcudart.so")
    (row,) = toolkits.homes(machine(tmp_path, base_prefix=prefix))
    assert (row["via"], row["nvcc"], row["version"]) == (["conda"], False, None)
    assert row["headers"]["cuda_runtime.h"] and not row["headers"]["cusparse.h"]
    assert row["libraries"]["cudart"] == str(prefix / "targets/x86_64-linux/lib/libcudart.so")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("version.json", '{"cuda": {"name": "CUDA SDK", "version": "11.8.20220929"}}'),
        ("version.txt", "CUDA Version 11.8.0\n"),
    ],
)
def test_a_toolkit_without_nvcc_has_its_version_in_a_file(tmp_path, file, text):
    home = tmp_path / "usr/local/cuda-11.8"
    write(home / "include/cuda_runtime.h")
    write(home / file, text)
    (row,) = toolkits.homes(machine(tmp_path))
    assert (row["version"], row["nvcc"]) == ("11.8", False)


def test_a_damaged_version_file_is_no_version(tmp_path):
    home = tmp_path / "opt/cuda"
    write(home / "include/cuda_runtime.h")
    write(home / "version.json", '{"cuda": [')
    (row,) = toolkits.homes(machine(tmp_path))
    assert (row["version"], row["via"]) == (None, ["/opt"])


def test_wheels_of_nvidia_may_hold_a_compiler(tmp_path):
    here = machine(tmp_path)
    nvcc(here.site / "nvidia/cuda_nvcc", "12.8")
    nvcc(here.site / "nvidia/cu13", "13.0")
    write(here.site / "nvidia/cublas/lib/libcublas.so.12")
    rows = toolkits.homes(here)
    assert [(row["version"], row["via"]) for row in rows] == [("13.0", ["pip"]), ("12.8", ["pip"])]


def test_an_empty_folder_is_no_toolkit(tmp_path):
    (tmp_path / "usr/local/cuda-12.6").mkdir(parents=True)
    assert toolkits.homes(machine(tmp_path)) == []
