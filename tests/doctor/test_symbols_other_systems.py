# SPDX-License-Identifier: Apache-2.0
import struct
from pathlib import Path

import pefile
import pytest
import setuptools
from helpers import binaries

from statescan.doctor.symbols import judge, macho, names, report
from statescan.doctor.symbols.binary import BinaryError, View, opened
from statescan.doctor.symbols.pe import Pe

OLD, NEW = "?SetDevice@cuda@c10@@YAXH@Z", "?SetDevice@cuda@c10@@YAXC@Z"
IMPORTS = {
    "c10_cuda.dll": [NEW, "?device_count@cuda@c10@@YACXZ"],
    "cudart64_12.dll": ["cudaLaunchKernel"],
    "python311.dll": ["PyModule_Create2"],
    "KERNEL32.dll": ["Sleep"],
}


def windows_programs() -> list[Path]:
    """Real files of Microsoft's compiler, which setuptools brings on every system."""
    return sorted(Path(setuptools.__file__).parent.glob("*.exe"))


def independent(data: bytes) -> dict[str, list[str]]:
    file = pefile.PE(data=data)
    return {
        entry.dll.decode(): [item.name.decode() for item in entry.imports if item.name]
        for entry in file.DIRECTORY_ENTRY_IMPORT
    }


def test_real_windows_files_are_read_as_an_independent_reader_reads_them():
    programs = windows_programs()
    assert programs
    for path in programs:
        data = path.read_bytes()
        ours, other = Pe(View(data)), pefile.PE(data=data)
        assert ours.imports == independent(data), path.name
        assert ours.is_library is bool(other.is_dll())
        assert [part.name for part in ours.sections] == [
            part.Name.rstrip(b"\0").decode() for part in other.sections
        ]


def test_a_written_library_is_read_as_an_independent_reader_reads_it():
    exports = [f"name_{number}" for number in range(50)]
    data = binaries.windows_library(IMPORTS, exports)
    ours, other = Pe(View(data)), pefile.PE(data=data)
    assert ours.imports == independent(data) == IMPORTS
    assert ours.machine == "amd64"
    assert ours.is_library
    offered = [row.name.decode() for row in other.DIRECTORY_ENTRY_EXPORT.symbols]
    assert offered == sorted(exports)
    assert all(ours.exports(name) for name in exports)
    assert not any(ours.exports(name) for name in ("name", "name_9x", "zzz", "aaa"))


def test_a_report_of_a_windows_module(tmp_path):
    path = tmp_path / "selective_scan_cuda.cp311-win_amd64.pyd"
    path.write_bytes(binaries.windows_library(IMPORTS))
    found = report.report(path, {})
    assert (found["format"], found["machine"], found["python_tag"]) == ("pe", "amd64", "cp311")
    assert found["platform_tag"] == "win_amd64"
    assert found["module"] == "selective_scan_cuda"
    assert found["needed"] == list(IMPORTS)
    assert found["imports"] == IMPORTS
    assert found["cudart"] == "12"
    assert found["links_torch"] is True
    assert found["undefined_torch"] == sorted(IMPORTS["c10_cuda.dll"])


def test_symbols_are_looked_up_in_the_libraries_of_a_windows_torch(tmp_path):
    library = tmp_path / "c10_cuda.dll"
    library.write_bytes(binaries.windows_library({}, [OLD, "?device_count@cuda@c10@@YACXZ"]))
    path = tmp_path / "x.cp311-win_amd64.pyd"
    path.write_bytes(binaries.windows_library(IMPORTS))
    found = report.report(path, {"c10_cuda.dll": str(library)})
    assert [row["symbol"] for row in found["missing"]["torch"]] == [NEW]
    rows = judge.missing_symbols(found, {"c10_cuda.dll": str(library)})
    assert [row["symbol"] for row in rows] == [NEW]


def test_delayed_imports_are_needed_too():
    data = bytearray(binaries.windows_library({"torch_cpu.dll": ["a"]}))
    # The same table entry, told as one of the delayed kind.
    place = data.index(b"PE\0\0") + 24 + 112
    delayed = 0x400 + 512 - 64
    (names_at,) = struct.unpack_from("<12xI4x", data, 0x400)
    (thunks_at,) = struct.unpack_from("<I", data, 0x400)
    struct.pack_into("<8I", data, delayed, 1, names_at, 0, 0, thunks_at, 0, 0, 0)
    struct.pack_into("<II", data, place + 8, 0, 0)
    struct.pack_into("<II", data, place + 8 * 13, 0x1000 + delayed - 0x400, 64)
    assert Pe(View(bytes(data))).imports == {"torch_cpu.dll": ["a"]}


@pytest.mark.parametrize("size", [2, 63, 64, 200])
def test_a_windows_file_that_ends_too_early(size):
    with pytest.raises(BinaryError):
        Pe(View(binaries.windows_library(IMPORTS)[:size], "x.pyd"))


def test_a_mac_library(tmp_path):
    needed = ["@rpath/libc10.dylib", "/usr/lib/libSystem.B.dylib"]
    path = tmp_path / "x.cpython-311-darwin.so"
    path.write_bytes(binaries.mac_library(needed, ["@loader_path/torch/lib"]))
    found = report.report(path, {})
    assert (found["format"], found["machine"], found["kind"]) == ("macho", "arm64", "shared object")
    assert found["needed"] == needed
    assert found["rpath"] == ["@loader_path/torch/lib"]
    assert found["links_torch"] is True
    assert (found["python_tag"], found["platform_tag"]) == ("cp311", "darwin")


def test_a_universal_mac_file_names_all_its_machines(tmp_path):
    first = binaries.mac_library(["/usr/lib/one.dylib"], cpu=0x01000007)
    second = binaries.mac_library(["/usr/lib/two.dylib"])
    head = struct.pack(">II", 0xCAFEBABE, 2)
    head += struct.pack(">IIIII", 0x01000007, 3, 64, len(first), 0)
    head += struct.pack(">IIIII", 0x0100000C, 0, 64 + len(first), len(second), 0)
    path = tmp_path / "x.dylib"
    path.write_bytes(head.ljust(64, b"\0") + first + second)
    with opened(path) as view:
        assert macho.read(view).machines == ("x86_64", "arm64")
    assert report.report(path, {})["machine"] == "x86_64+arm64"


def test_a_java_class_file_is_no_mac_binary():
    assert not macho.is_macho(b"\xca\xfe\xba\xbe\x00\x00\x00\x34")


@pytest.mark.parametrize(
    ("name", "tag", "platform"),
    [
        ("x.cpython-311-x86_64-linux-gnu.so", "cp311", "x86_64-linux-gnu"),
        ("x.cpython-313t-aarch64-linux-gnu.so", "cp313t", "aarch64-linux-gnu"),
        ("x.cpython-312-darwin.so", "cp312", "darwin"),
        ("x.cpython-311-x86_64-linux-musl.so", "cp311", "x86_64-linux-musl"),
        ("x.cp310-win_amd64.pyd", "cp310", "win_amd64"),
        ("x.cp314t-win_arm64.pyd", "cp314t", "win_arm64"),
        ("x.pypy310-pp73-x86_64-linux-gnu.so", "pp310", "x86_64-linux-gnu"),
        ("x.abi3.so", "abi3", None),
        ("x.so", None, None),
        ("libx.so.3", None, None),
        ("x.pyd", None, None),
    ],
)
def test_tags_in_the_name_of_a_module(name, tag, platform):
    assert names.python_tag(name) == tag
    assert names.platform_tag(name) == platform


@pytest.mark.parametrize(
    ("library", "major"),
    [
        ("libcudart.so.12", "12"),
        ("libcudart.so.11.0", "11"),
        ("libcudart.so.13", "13"),
        ("cudart64_110.dll", "11"),
        ("cudart64_101.dll", "10"),
        ("cudart64_12.dll", "12"),
        # A copy inside a wheel serves that wheel alone.
        ("libcudart.7ec1eba6.so.12", None),
        ("libcublas.so.12", None),
        ("libcudart.so", None),
    ],
)
def test_the_cuda_runtime_in_the_name_of_a_library(library, major):
    assert names.cudart_major(library) == major
