# SPDX-License-Identifier: Apache-2.0
import os

import pytest
from helpers.fake_machine import GCC, machine, program, write

from statescan.doctor.facts import compiler, environment

CLANG = "Ubuntu clang version 14.0.0-1ubuntu1.1\nTarget: x86_64-pc-linux-gnu\n"
APPLE = "Apple clang version 15.0.0 (clang-1500.3.9.4)\nTarget: arm64-apple-darwin23.5.0\n"
COS6 = "x86_64-conda_cos6-linux-gnu-cc"
RED_HAT = "gcc (GCC) 8.5.0 20210514 (Red Hat 8.5.0-20)\n"


def gcc(path, version, text=""):
    """Answers -dumpfullversion as GCC 7 and later do."""
    said = text or GCC.replace("11.4.0", version)
    script = f"case $1 in -dumpfullversion) echo {version};; *) cat <<'END'\n{said}END\n;; esac\n"
    return program(path, script=script)


def here(tmp_path, **environ):
    return machine(tmp_path, environ={"PATH": str(tmp_path / "bin"), **environ})


def test_the_usual_compilers(tmp_path):
    gcc(tmp_path / "bin/gcc", "11.4.0")
    gcc(tmp_path / "bin/g++", "11.4.0")
    assert compiler.c(here(tmp_path)).value == {
        "command": "gcc",
        "path": str(tmp_path / "bin/gcc"),
        "family": "gcc",
        "version": "11.4.0",
    }
    assert compiler.cxx(here(tmp_path)).value["command"] == "g++"
    gcc(tmp_path / "bin/c++", "12.1.0")
    assert compiler.cxx(here(tmp_path)).value["command"] == "c++"
    assert compiler.cuda_host(here(tmp_path)).value["version"] == "11.4.0"


def test_no_compiler_is_a_name_without_a_path(tmp_path):
    nothing = {"path": None, "family": None, "version": None}
    assert compiler.c(here(tmp_path)).value == {"command": "gcc", **nothing}
    assert compiler.cxx(here(tmp_path)).value == {"command": "c++", **nothing}
    assert compiler.cuda_host(here(tmp_path)).value == {"command": "gcc", **nothing}
    assert compiler.available(here(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        (CLANG, "clang", "14.0.0"),
        (APPLE, "clang", "15.0.0"),
        (RED_HAT, "gcc", "8.5.0"),
        ("g++ (Debian 4.8.5-4) 4.8.5\n", "gcc", "4.8.5"),
        ("gcc (GCC) 4.8.5 20150623 (Red Hat 4.8.5-44)\n", "gcc", "4.8.5"),
        ("something else 3.2\n", None, "3.2"),
    ],
)
def test_the_family_is_what_the_program_says_not_its_name(tmp_path, text, family, version):
    program(tmp_path / "bin/gcc", text)
    found = compiler.c(here(tmp_path)).value
    assert (found["family"], found["version"]) == (family, version)


def test_the_full_version_of_a_gcc_that_prints_its_major_only(tmp_path):
    gcc(tmp_path / "bin/gcc", "13.2.1", "gcc (SUSE Linux) 13\n")
    assert compiler.c(here(tmp_path)).value["version"] == "13.2.1"


def test_variables_come_first_and_are_the_source(tmp_path):
    gcc(tmp_path / "bin/gcc", "11.4.0")
    gcc(tmp_path / "bin/gcc-9", "9.5.0")
    seen = compiler.c(here(tmp_path, CC="ccache gcc-9 -O2"))
    assert (seen.value["command"], seen.value["version"]) == ("gcc-9", "9.5.0")
    assert seen.source == "CC=ccache gcc-9 -O2"


def test_what_a_variable_names_may_be_missing(tmp_path):
    gcc(tmp_path / "bin/g++", "11.4.0")
    found = compiler.cxx(here(tmp_path, CXX="g++-10")).value
    assert (found["command"], found["path"]) == ("g++-10", None)


def test_what_nvcc_calls_by_the_variable_that_counts_most(tmp_path):
    """As nvcc 13.0 does it with the options of a torch build: each line outdoes those above."""
    ladder = (
        ("", "", "13.1.0"),
        # nvcc does not read it.
        ("CUDAHOSTCXX", "g++-12", "13.1.0"),
        ("NVCC_CCBIN", "g++-11", "11.1.0"),
        ("NVCC_PREPEND_FLAGS", " -ccbin={0}/g++-12", "12.1.0"),
        ("CC", "gcc-10", "10.1.0"),
        ("NVCC_APPEND_FLAGS", "-O2 --compiler-bindir {0}/g++-9 -g", "9.1.0"),
    )
    for name in ("gcc-13.1.0", "g++-14.1.0", "g++-9.1.0", "gcc-10.1.0", "g++-11.1.0", "g++-12.1.0"):
        stem, _, version = name.partition("-")
        number = version.partition(".")[0]
        short = stem if number in ("13", "14") else f"{stem}-{number}"
        gcc(tmp_path / "bin" / short, version)
    environ: dict[str, str] = {}
    for name, value, version in ladder:
        environ |= {name: value.format(tmp_path / "bin")} if name else {}
        seen = compiler.cuda_host(here(tmp_path, **environ))
        assert seen.value["version"] == version, (name, seen)
    assert seen.source == f"NVCC_APPEND_FLAGS={environ['NVCC_APPEND_FLAGS']}"


def test_flags_of_nvcc_that_name_no_compiler(tmp_path):
    gcc(tmp_path / "bin/gcc", "11.4.0")
    flags = "-gencode=arch=compute_120,code=sm_120 -Xcompiler=-ccbin-like"
    seen = compiler.cuda_host(here(tmp_path, NVCC_APPEND_FLAGS=flags, NVCC_PREPEND_FLAGS="-ccbin"))
    assert (seen.value["command"], seen.source) == ("gcc", "PATH")


def test_nvcc_ccbin_may_be_a_folder(tmp_path):
    gcc(tmp_path / "old/gcc", "10.2.0")
    found = compiler.cuda_host(here(tmp_path, NVCC_CCBIN=str(tmp_path / "old"))).value
    assert (found["path"], found["version"]) == (str(tmp_path / "old/gcc"), "10.2.0")


def test_every_compiler_on_path(tmp_path):
    for name in ("gcc", "g++-12", "clang++-14", "x86_64-conda-linux-gnu-c++", COS6):
        gcc(tmp_path / "bin" / name, "12.3.0")
    for name in ("gcc-ar-12", "c99-gcc", "gccgo", "clang-format-14"):
        gcc(tmp_path / "bin" / name, "1.0.0")
    write(tmp_path / "bin/g++-9", "not executable")
    (tmp_path / "link").symlink_to(tmp_path / "bin")
    environ = {"PATH": os.pathsep.join([str(tmp_path / "bin"), str(tmp_path / "link")])}
    rows = compiler.available(machine(tmp_path, environ=environ))
    assert [row["command"] for row in rows] == [
        "clang++-14",
        "g++-12",
        "gcc",
        "x86_64-conda-linux-gnu-c++",
        COS6,
    ]
    assert {row["version"] for row in rows} == {"12.3.0"}


def test_visual_cpp_of_an_open_prompt(tmp_path):
    environ = {
        "VSINSTALLDIR": str(tmp_path / "VS"),
        "VCINSTALLDIR": str(tmp_path / "VS/VC"),
        "VCToolsVersion": "14.38.33130",
        "WindowsSdkDir": "C:\\Kits",
    }
    seen = compiler.msvc(machine(tmp_path, "windows", environ=environ))
    assert (seen.value["version"], seen.value["prompt"], seen.value["sdk"]) == ("19.38", True, True)
    assert seen.source == "VSINSTALLDIR"


def test_names_of_variables_as_python_tells_them_on_windows(tmp_path):
    """In upper case, whatever the case that they were set in."""
    environ = {
        "VSINSTALLDIR": "C:\\VS",
        "VCTOOLSVERSION": "14.38.33130",
        "WINDOWSSDKDIR": "C:\\Kits",
    }
    found = compiler.msvc(machine(tmp_path, "windows", environ=environ)).value
    assert (found["version"], found["sdk"]) == ("19.38", True)
    told = environment.variables(machine(tmp_path, "windows", environ=environ))
    assert told["VCToolsVersion"] == "14.38.33130"
    assert "VCToolsVersion" not in environment.variables(machine(tmp_path, environ=environ))


def test_visual_cpp_found_by_vswhere(tmp_path):
    programs, studio = tmp_path / "Programs", tmp_path / "VS"
    where = programs / "Microsoft Visual Studio/Installer/vswhere.exe"
    program(where, f"{studio}\n")
    write(studio / "VC/Auxiliary/Build/Microsoft.VCToolsVersion.default.txt", "14.43.34808\n")
    environ = {"ProgramFiles(x86)": str(programs)}
    seen = compiler.msvc(machine(tmp_path, "windows", environ=environ))
    assert seen.value["version"] == "19.43"
    assert (seen.value["sdk"], seen.value["prompt"]) == (False, False)
    assert "14.43.34808" in seen.value["path"]


def test_visual_cpp_is_of_windows_alone(tmp_path):
    assert compiler.msvc(machine(tmp_path, "windows")).value is None
    assert compiler.msvc(machine(tmp_path, environ={"VCToolsVersion": "14.38.1"})) is None


def test_ninja_and_make(tmp_path):
    assert compiler.ninja(here(tmp_path)) is None
    assert compiler.make(here(tmp_path)) is None
    program(tmp_path / "bin/ninja", "1.11.1")
    program(tmp_path / "bin/make")
    assert compiler.ninja(here(tmp_path)) == {
        "path": str(tmp_path / "bin/ninja"),
        "version": "1.11.1",
    }
    assert compiler.make(here(tmp_path)) == {"path": str(tmp_path / "bin/make")}
