# SPDX-License-Identifier: Apache-2.0
import os

import pytest
from helpers import binaries
from helpers.fake_machine import machine, write

from statescan.doctor.facts import libraries


def stdcxx(folder, glibcxx, cxxabi):
    """A library with the names of versions in it, as the real one has them."""
    text = "".join(f'.asciz "GLIBCXX_{one}"\n' for one in ("3.4", "3.4.9", *glibcxx))
    text += "".join(f'.asciz "CXXABI_{one}"\n' for one in cxxabi)
    text += '.asciz "GLIBCXX_DEBUG_MESSAGE_LENGTH"\n.asciz "CXXABI_TM_1"\n'
    options = ["-Wl,-soname,libstdc++.so.6"]
    return binaries.shared(folder / "libstdc++.so.6", f".data\n{text}", options=options)


def test_the_first_that_the_loader_finds_comes_first(tmp_path):
    old = stdcxx(tmp_path / "old", ["3.4.10", "3.4.28"], ["1.3", "1.3.12"])
    new = stdcxx(tmp_path / "usr/lib64", ["3.4.30"], ["1.3.13"])
    here = machine(tmp_path, environ={"LD_LIBRARY_PATH": f"{tmp_path}/none:{tmp_path}/old"})
    assert libraries.libstdcxx(here) == [
        {"path": str(old), "glibcxx": "3.4.28", "cxxabi": "1.3.12", "via": "LD_LIBRARY_PATH"},
        {"path": str(new), "glibcxx": "3.4.30", "cxxabi": "1.3.13", "via": "system"},
    ]


def test_the_rpath_of_a_conda_python_comes_before_everything(tmp_path):
    prefix = tmp_path / "conda"
    (prefix / "conda-meta").mkdir(parents=True)
    old = stdcxx(prefix / "lib", ["3.4.26"], ["1.3.12"])
    stdcxx(tmp_path / "other", ["3.4.33"], ["1.3.15"])
    python = prefix / "bin/python"
    options = ["-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN/../lib"]
    binaries.shared(python, "", options=options)
    environ = {"LD_LIBRARY_PATH": str(tmp_path / "other")}
    here = machine(tmp_path, executable=python, base_prefix=prefix, environ=environ)
    first, second = libraries.libstdcxx(here)
    assert first == {"path": str(old), "glibcxx": "3.4.26", "cxxabi": "1.3.12", "via": "conda"}
    assert second["via"] == "LD_LIBRARY_PATH"


def test_a_runpath_of_the_program_is_not_for_other_libraries(tmp_path):
    stdcxx(tmp_path / "p/lib", ["3.4.26"], ["1.3.12"])
    python = tmp_path / "p/bin/python"
    binaries.shared(python, "", options=["-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN/../lib"])
    assert libraries.libstdcxx(machine(tmp_path, executable=python)) == []


def test_what_is_no_library_is_passed_over(tmp_path):
    write(tmp_path / "lib64/libstdc++.so.6", "text")
    assert libraries.libstdcxx(machine(tmp_path)) == []


def test_other_systems_have_none(tmp_path):
    assert libraries.libstdcxx(machine(tmp_path, "windows")) == []
    assert libraries.libstdcxx(machine(tmp_path, "macos")) == []


@pytest.mark.parametrize("wheel", ["cuda_runtime/lib/libcudart.so.12", "cu13/lib/libcudart.so.13"])
def test_the_runtime_of_torchs_wheels(tmp_path, wheel):
    here = machine(tmp_path)
    path = write(here.site / "nvidia" / wheel)
    write(path.with_name("libcudart_static.a"))
    assert libraries.cudart(here) == [
        {"soname": path.name, "path": str(path), "via": "torch wheel"}
    ]


def test_runtimes_on_the_loaders_way(tmp_path):
    here = machine(tmp_path, environ={"LD_LIBRARY_PATH": str(tmp_path / "cuda-11.8/lib64")})
    own = write(here.site / "nvidia/cuda_runtime/lib/libcudart.so.12")
    real = write(tmp_path / "cuda-11.8/lib64/libcudart.so.11.8.89")
    real.with_name("libcudart.so.11.0").symlink_to(real)
    assert [(row["soname"], row["via"]) for row in libraries.cudart(here)] == [
        ("libcudart.so.12", "torch wheel"),
        ("libcudart.so.11.0", "LD_LIBRARY_PATH"),
    ]
    assert libraries.cudart(here)[0]["path"] == str(own)


def test_runtimes_on_windows(tmp_path):
    here = machine(tmp_path, "windows", environ={"PATH": "none"})
    path = write(here.site / "torch/lib/cudart64_12.dll")
    assert libraries.cudart(here) == [
        {"soname": "cudart64_12.dll", "path": str(path), "via": "torch"}
    ]


@pytest.mark.skipif(os.name == "nt", reason="no libstdc++ there")
def test_this_python_takes_the_one_that_it_has_loaded():
    """torch has loaded it, and the loader's own table says from where."""
    from pathlib import Path

    from statescan.doctor.facts.machine import Machine

    maps = Path("/proc/self/maps").read_text().split()
    loaded = {Path(word).resolve() for word in maps if "libstdc++.so.6" in word}
    assert Path(libraries.libstdcxx(Machine.here())[0]["path"]).resolve() in loaded
