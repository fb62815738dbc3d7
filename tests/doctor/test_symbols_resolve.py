# SPDX-License-Identifier: Apache-2.0
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import binaries

from statescan.doctor.symbols import report, torch_files
from statescan.doctor.symbols.demangle import demangle
from statescan.doctor.symbols.resolve import Scope, cached_libraries

RPATH, RUNPATH = "-Wl,--disable-new-dtags", "-Wl,--enable-new-dtags"


def loads(path: Path, first: str = "", **environment: str) -> bool:
    """Whether the loader of this machine loads the file, in a process of its own."""
    code = f"{first}\nimport ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_NOW)"
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def states(path: Path, torch_libraries=None) -> dict[str, str]:
    found = report.report(path, torch_libraries or {})
    return {row["name"]: row["status"] for row in found["libraries"]}


def ways(path: Path) -> dict[str, str]:
    return {row["name"]: row["via"] for row in report.report(path, {})["libraries"]}


def is_sound(path: Path, torch_libraries=None) -> bool:
    """Whether the report says that nothing is missing."""
    found = report.report(path, torch_libraries or {})
    return (
        all(row["status"] == "found" for row in found["libraries"])
        and not found["missing"]["torch"]
        and not found["missing"]["other"]
        and not found["versions_missing"]
    )


@pytest.fixture
def near(tmp_path) -> Path:
    return binaries.library(tmp_path / "deps" / "libnear.so.1", ["near"])


@pytest.mark.parametrize("kind", [RPATH, RUNPATH])
@pytest.mark.parametrize("written", ["$ORIGIN/deps", "${ORIGIN}/deps", "/nowhere:$ORIGIN/deps"])
def test_origin_in_rpath_and_runpath(tmp_path, near, kind, written):
    path = binaries.extension(tmp_path / "x.so", ["near"], [near], [kind, f"-Wl,-rpath,{written}"])
    assert states(path)["libnear.so.1"] == "found"
    assert is_sound(path) and loads(path)
    assert ways(path)["libnear.so.1"].startswith("RPATH" if kind == RPATH else "RUNPATH")


def test_a_library_in_no_folder_of_the_search_is_missing(tmp_path, near):
    path = binaries.extension(tmp_path / "x.so", ["near"], [near])
    assert states(path)["libnear.so.1"] == "missing"
    assert not is_sound(path) and not loads(path)


def test_ld_library_path(tmp_path, near, monkeypatch):
    path = binaries.extension(tmp_path / "x.so", ["near"], [near])
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{near.parent}")
    assert ways(path)["libnear.so.1"] == "LD_LIBRARY_PATH"
    assert loads(path)


@pytest.mark.parametrize(("kind", "first"), [(RPATH, "own"), (RUNPATH, "other")])
def test_ld_library_path_comes_after_rpath_and_before_runpath(tmp_path, monkeypatch, kind, first):
    own = binaries.library(tmp_path / "own" / "libboth.so", ["both"])
    binaries.library(tmp_path / "other" / "libboth.so", ["both"])
    path = binaries.extension(tmp_path / "x.so", ["both"], [own], [kind, "-Wl,-rpath,$ORIGIN/own"])
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "other"))
    rows = {row["name"]: row["path"] for row in report.report(path, {})["libraries"]}
    assert Path(rows["libboth.so"]).resolve() == tmp_path / first / "libboth.so"


@pytest.mark.parametrize(("kind", "sound"), [(RPATH, True), (RUNPATH, False)])
def test_rpath_counts_for_libraries_behind_and_runpath_does_not(tmp_path, kind, sound):
    deep = binaries.library(tmp_path / "deps" / "libdeep.so", ["deep"])
    middle = binaries.shared(
        tmp_path / "deps" / "libmiddle.so",
        binaries.defining(["middle"]),
        options=["-Wl,-soname,libmiddle.so", "-Wl,--no-as-needed", f"-L{deep.parent}", "-ldeep"],
    )
    options = [kind, "-Wl,-rpath,$ORIGIN/deps", f"-Wl,-rpath-link,{deep.parent}"]
    path = binaries.extension(tmp_path / "x.so", ["middle"], [middle], options)
    assert is_sound(path) is loads(path) is sound
    rows = report.report(path, {})["libraries"]
    behind = [(row["name"], row["needed_by"]) for row in rows if row["status"] == "missing"]
    assert behind == ([] if sound else [("libdeep.so", "libmiddle.so")])


def test_a_wrong_soname_is_found_out(tmp_path):
    # Linked as libright.so; the file there now calls itself, and is called, something else.
    right = binaries.library(tmp_path / "deps" / "libright.so", ["right"])
    path = binaries.extension(tmp_path / "x.so", ["right"], [right], ["-Wl,-rpath,$ORIGIN/deps"])
    right.rename(right.with_name("libright.so.2"))
    assert states(path)["libright.so"] == "missing"
    assert not loads(path)


def test_a_library_for_another_machine_is_passed_over(tmp_path, near):
    options = ["-Wl,-rpath,$ORIGIN/foreign:$ORIGIN/deps"]
    path = binaries.extension(tmp_path / "x.so", ["near"], [near], options)
    foreign = tmp_path / "foreign" / near.name
    foreign.parent.mkdir()
    data = bytearray(near.read_bytes())
    data[18:20] = struct.pack("<H", 183)
    foreign.write_bytes(data)
    assert ways(path)["libnear.so.1"] == "RUNPATH $ORIGIN/deps"
    assert is_sound(path) and loads(path)


def test_a_symbol_that_no_library_defines(tmp_path, near):
    options = ["-Wl,-rpath,$ORIGIN/deps"]
    path = binaries.extension(tmp_path / "x.so", ["near", "nowhere_at_all"], [near], options)
    missing = report.report(path, {})["missing"]
    assert [row["symbol"] for row in missing["other"]] == ["nowhere_at_all"]
    assert missing["complete"] is True
    assert not loads(path)


def test_symbols_of_python_and_of_the_c_library_are_there(tmp_path):
    path = binaries.extension(tmp_path / "x.so", ["PyList_New", "printf", "_Py_NoneStruct"])
    assert is_sound(path) and loads(path)


def test_a_weak_symbol_may_be_absent(tmp_path):
    path = binaries.extension(
        tmp_path / "x.so", assembly=".data\n.weak perhaps_somewhere\n.quad perhaps_somewhere"
    )
    assert is_sound(path) and loads(path)


def test_a_version_that_the_real_library_lacks(tmp_path):
    script = tmp_path / "versions"
    script.write_text("GLIBCXX_3.4 { global: old; }; GLIBCXX_3.4.99 { global: coming; };")
    stub = binaries.library(
        tmp_path / "stub" / "libstdc++.so.6", ["old", "coming"], f"-Wl,--version-script={script}"
    )
    path = binaries.extension(tmp_path / "x.so", ["coming"], [stub])
    found = report.report(path, {})
    assert found["version_needs"]["libstdc++.so.6"] == ["GLIBCXX_3.4.99"]
    (row,) = found["versions_missing"]
    assert (row["library"], row["versions"]) == ("libstdc++.so.6", ["GLIBCXX_3.4.99"])
    assert "GLIBCXX_3.4" in row["has"]
    assert not loads(path)


def test_what_is_found_only_after_torch_is_imported(tmp_path):
    torch = torch_files.libraries(binaries.fake_torch(tmp_path / "site"))
    needs = [Path(torch[name]) for name in ("libc10.so", "libtorch_cpu.so")]
    path = binaries.extension(tmp_path / "x.so", [binaries.OLD_CHECK], needs)
    found = states(path, torch)
    assert {found["libc10.so"], found["libtorch_cpu.so"]} == {"after-torch"}
    assert report.report(path, torch)["missing"]["torch"] == []
    load = f"import ctypes; ctypes.CDLL({torch['libtorch_python.so']!r})"
    assert not loads(path) and loads(path, load)


def test_torch_of_the_same_site_packages_is_found_without_being_told(tmp_path):
    site = tmp_path / "site"
    libraries = torch_files.libraries(binaries.fake_torch(site))
    needs = [Path(libraries["libc10.so"])]
    path = binaries.extension(site / binaries.MODULE, [binaries.OLD_CHECK], needs)
    found = report.report(path)
    assert {row["status"] for row in found["libraries"] if "c10" in row["name"]} == {"after-torch"}
    assert found["missing"]["searched_torch"] is True


def test_a_library_in_the_process_that_the_binary_does_not_name_is_out_of_its_sight(tmp_path):
    torch = torch_files.libraries(binaries.fake_torch(tmp_path / "site"))
    needs = [Path(torch["libtorch_cpu.so"])]
    path = binaries.extension(tmp_path / "x.so", [binaries.OLD_CHECK], needs)
    (row,) = report.report(path, torch)["missing"]["torch"]
    assert row["symbol"] == binaries.OLD_CHECK
    assert row["defined_in"] == "libc10.so"
    load = f"import ctypes; ctypes.CDLL({torch['libtorch_python.so']!r})"
    assert not loads(path, load)


def test_the_cache_of_the_loader(tmp_path):
    paths = ["/opt/a/libone.so.1", "/opt/b/libone.so.1"]
    head, entry = 48, 24
    strings, places = b"", []
    for text in ["libone.so.1", *paths]:
        places.append(head + 2 * entry + len(strings))
        strings += text.encode() + b"\0"
    rows = b"".join(struct.pack("<iIIIQ", 0x303, places[0], at, 0, 0) for at in places[1:])
    new = b"glibc-ld.so.cache1.1" + struct.pack("<II", 2, len(strings))
    new = new.ljust(head, b"\0") + rows + strings
    file = tmp_path / "ld.so.cache"
    file.write_bytes(new)
    assert cached_libraries(file) == {"libone.so.1": paths}
    # The form that older systems write has the new one behind an old one.
    both = tmp_path / "both"
    both.write_bytes(b"ld.so-1.7.0\0" + struct.pack("<I", 1) + bytes(12) + bytes(4) + new)
    assert cached_libraries(both) == {"libone.so.1": paths}
    for size in range(0, len(new), 7):
        (tmp_path / f"cut{size}").write_bytes(new[:size])
        assert cached_libraries(tmp_path / f"cut{size}") == {}
    assert cached_libraries(tmp_path / "absent") == {}


@pytest.mark.parametrize(("kind", "sound"), [(RPATH, True), (RUNPATH, False)])
def test_an_environment_whose_program_brings_the_folder_of_its_libraries(
    tmp_path, near, kind, sound
):
    # As conda lays it out: bin/python has an RPATH to ../lib, which counts for what it loads.
    prefix = tmp_path / "env"
    (prefix / "bin").mkdir(parents=True)
    near.parent.rename(prefix / "lib")
    source = prefix / "main.c"
    source.write_text(
        "#include <dlfcn.h>\n"
        "int main(int count, char **words) { return dlopen(words[count - 1], RTLD_NOW) == 0; }\n"
    )
    program = prefix / "bin" / "python"
    command = [binaries.gcc(), source, "-o", program, kind, "-Wl,-rpath,$ORIGIN/../lib", "-ldl"]
    subprocess.run(command, check=True)
    needs = [prefix / "lib" / near.name]
    path = binaries.extension(tmp_path / "site" / "x.so", ["near"], needs)
    with Scope({}, program) as scope:
        root = scope.add(path, "given", ())
        states = {row["name"]: row["status"] for row in scope.rows(root)}
    assert (states["libnear.so.1"] == "found") is sound
    assert (subprocess.run([program, path], env={}, check=False).returncode == 0) is sound


def test_a_program_that_is_no_elf_file_does_no_harm(tmp_path, near):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    path = binaries.extension(tmp_path / "x.so", ["near"], [near])
    with Scope({}, script) as scope:
        root = scope.add(path, "given", ())
        rows = {row["name"]: row["status"] for row in scope.rows(root)}
    assert rows == {"libnear.so.1": "missing", "libc.so.6": "found"}


def test_with_an_unknown_program_no_symbol_is_called_missing(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    path = binaries.extension(tmp_path / "x.so", ["PyList_New"])
    monkeypatch.setattr(sys, "executable", str(script))
    assert report.report(path, {})["missing"]["complete"] is False


def test_names_are_written_as_people_write_them():
    names = ["_ZN3c104cuda9SetDeviceEi", binaries.NEW_CHECK, "plain_c"]
    readable, tool = demangle(names)
    assert tool in ("c++filt", "libstdc++")
    assert readable["_ZN3c104cuda9SetDeviceEi"] == "c10::cuda::SetDevice(int)"
    assert "std::__cxx11::string const&" in readable[binaries.NEW_CHECK]
    assert "plain_c" not in readable


def test_without_the_program_the_c_plus_plus_library_writes_names(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    readable, tool = demangle(["_ZN3c104cuda9SetDeviceEi", "_Znonsense("])
    assert tool == "libstdc++"
    assert readable == {"_ZN3c104cuda9SetDeviceEi": "c10::cuda::SetDevice(int)"}
