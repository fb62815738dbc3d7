# SPDX-License-Identifier: Apache-2.0
"""The C library: linked to nothing, same structs as in Python, right level, faithful launches."""

from __future__ import annotations

import ctypes
import platform
import re
import struct
import sys
from pathlib import Path

import pytest

from statescan.backends import native
from statescan.backends.cpu import abi
from statescan.errors import BackendUnavailableError

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "src/statescan/kernels/cpu/abi.h"
WORD = 8
OTHER_EXPORTS = {
    "statescan_abi_version",
    "statescan_isa_level",
    "statescan_launch",
    "statescan_layout",
    "statescan_set_pool",
    "statescan_use_isa",
    "statescan_vector_bytes",
}
SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


@pytest.fixture(scope="module")
def library(native_install) -> native.NativeLibrary:
    found = native.find([native_install / "statescan"])
    assert found.library is not None, found.reason
    return found.library


class Recorder:
    """A stand-in for cuLaunchKernel that keeps what it was given."""

    def __init__(self, params_bytes: int, answer: int = 0) -> None:
        self.calls: list[dict[str, object]] = []
        self.params_bytes = params_bytes
        self.answer = answer
        self.callback = SIGNATURE(self._record)
        self.address = ctypes.cast(self.callback, ctypes.c_void_p).value

    def _record(self, kernel, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        self.calls.append(
            {
                "kernel": kernel,
                "grid": (gx, gy, gz),
                "block": (bx, by, bz),
                "shared_bytes": shared,
                "stream": stream,
                "params": ctypes.string_at(params[0], self.params_bytes),
                "extra": extra,
            }
        )
        return self.answer


def test_library_needs_no_other_library(library):
    elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools is not installed")
    if not sys.platform.startswith("linux"):
        pytest.skip(f"an ELF check; this is {sys.platform}")
    with library.path.open("rb") as stream:
        elf = elffile.ELFFile(stream)
        tags = {tag.entry.d_tag for tag in elf.get_section_by_name(".dynamic").iter_tags()}
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
        stack = next(s for s in elf.iter_segments() if s.header.p_type == "PT_GNU_STACK")
    assert not tags & {"DT_NEEDED", "DT_VERNEED", "DT_RPATH", "DT_RUNPATH"}
    assert not stack.header.p_flags & 1, "the stack would be executable"
    undefined = [s.name for s in symbols if s.name and s.entry.st_shndx == "SHN_UNDEF"]
    exported = {s.name for s in symbols if s.name and s.entry.st_shndx != "SHN_UNDEF"}
    assert undefined == []
    kernels = {f"statescan_{name}" for name in native.KERNELS}
    assert exported == OTHER_EXPORTS | kernels


def test_python_declares_what_the_header_exports():
    declared = re.findall(r"STATESCAN_EXPORT\s[^;]*?\b(statescan_\w+)\(", HEADER.read_text())
    assert len(declared) == len(set(declared))
    assert set(declared) == OTHER_EXPORTS | {f"statescan_{name}" for name in native.KERNELS}


def layout_in_python():
    """(offset, size) by (struct, field), from both tables of structs."""
    found = {}
    for name, structure in native.STRUCTURES.items():
        found[name, ""] = (0, ctypes.sizeof(structure))
        for field, _ in structure._fields_:
            place = getattr(structure, field)
            found[name, field] = (place.offset, place.size)
    for name, fields in abi.STRUCTURES.items():
        offset = 0
        for field in fields:
            size = WORD * abi.words(field)
            found[name, field.partition(":")[0]] = (offset, size)
            offset += size
        found[name, ""] = (0, offset)
    return found


def test_every_struct_has_the_same_layout_in_c_and_in_python(library):
    assert native.layout(library.handle) == layout_in_python()


def test_no_struct_is_described_twice():
    assert not native.STRUCTURES.keys() & abi.STRUCTURES.keys()


def test_every_struct_of_the_header_has_rows(library):
    """Also those that only lie in others, so that no field moves unseen."""
    declared = set(re.findall(r"^struct (\w+) \{", HEADER.read_text(), re.MULTILINE))
    assert {structure for structure, _ in native.layout(library.handle)} == declared


def test_every_field_of_a_struct_has_a_row(library):
    """The rows of a struct fill it from its first byte to its last, without a gap."""
    rows = native.layout(library.handle)
    for name in {structure for structure, _ in rows}:
        places = sorted(place for (owner, field), place in rows.items() if owner == name and field)
        ends = [offset + size for offset, size in places]
        assert [offset for offset, _ in places] == [0, *ends[:-1]], name
        assert ends[-1] == rows[name, ""][1], name


def test_parameters_of_kernels_are_made_of_words(library):
    """What ``abi.pack`` needs: it packs integers of 8 bytes one behind the other."""
    assert ctypes.sizeof(ctypes.c_void_p) == WORD
    for (name, field), (offset, size) in native.layout(library.handle).items():
        if name in abi.STRUCTURES:
            assert (offset % WORD, size % WORD) == (0, 0), (name, field)


def test_packing_puts_nested_fields_in_their_order():
    numbers = iter(range(1, 100))
    fields = abi.STRUCTURES["statescan_causal_conv1d_fwd"]
    values = [tuple(next(numbers) for _ in range(abi.words(field))) for field in fields]
    packed = abi.pack("causal_conv1d_fwd", *(v if len(v) > 1 else v[0] for v in values))
    assert abi.words_of(packed) == tuple(range(1, next(numbers)))


def test_each_kernel_has_a_struct_of_its_name_or_is_told_otherwise(library):
    for name in native.KERNELS:
        function = getattr(library.handle, f"statescan_{name}")
        assert function.restype is None
        assert set(function.argtypes) == {ctypes.c_char_p}
        assert f"statescan_{name}" in abi.STRUCTURES


def test_lower_vector_levels_can_be_chosen_and_left_again(library):
    use_isa, own = library.handle.statescan_use_isa, library.handle.statescan_isa_level()
    assert native.ISA_NAMES[own] == library.isa
    try:
        widths = []
        for level in range(own + 1):
            assert use_isa(level) == level
            widths.append(library.handle.statescan_vector_bytes())
        assert widths == sorted(widths)
        assert set(widths) <= {16, 32, 64}
        assert use_isa(own + 1) == own
    finally:
        assert use_isa(-1) == own
    assert library.handle.statescan_vector_bytes() == widths[-1]


def test_packed_request_has_the_layout_of_the_struct():
    values = range(1, 1 + len(native.LaunchRequest._fields_))
    request = native.LaunchRequest.from_buffer_copy(native.LAUNCH_REQUEST.pack(*values))
    fields = [getattr(request, name) for name, _ in native.LaunchRequest._fields_]
    assert fields == list(values)
    assert native.LAUNCH_REQUEST.size == ctypes.sizeof(native.LaunchRequest)


def test_python_and_header_name_the_same_version_and_levels():
    header = HEADER.read_text()
    assert f"#define STATESCAN_ABI_VERSION {native.ABI_VERSION}\n" in header
    for level, name in native.ISA_NAMES.items():
        assert f"STATESCAN_ISA_{name.upper()} = {level}" in header


def test_isa_level_agrees_with_the_operating_system(library):
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        assert library.isa == "neon"
        return
    if machine not in ("x86_64", "amd64") or not sys.platform.startswith("linux"):
        pytest.skip(f"no second source for the processor's features on {sys.platform} {machine}")
    text = Path("/proc/cpuinfo").read_text()
    flags = set(text.split("\nflags", 1)[1].split(":", 1)[1].split("\n", 1)[0].split())
    expected = "baseline"
    if {"avx", "avx2", "fma", "f16c"} <= flags:
        expected = "avx2"
        if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
            expected = "avx512"
    assert library.isa == expected


def test_launch_passes_everything_on_with_params_behind_the_request(library):
    params = struct.pack("@QQif", 0x1122334455667788, 2**64 - 1, -3, 0.5)
    recorder = Recorder(len(params))
    request = native.LAUNCH_REQUEST.pack(
        recorder.address, 0xABCDEF0123, 0x77, 0, 2**31 - 1, 65535, 3, 1024, 2, 1, 99_000, 0
    )
    assert library.handle.statescan_launch(request + params) == 0
    assert recorder.calls == [
        {
            "kernel": 0xABCDEF0123,
            "grid": (2**31 - 1, 65535, 3),
            "block": (1024, 2, 1),
            "shared_bytes": 99_000,
            "stream": 0x77,
            "params": params,
            "extra": None,
        }
    ]


def test_launch_takes_params_by_pointer(library):
    params = ctypes.create_string_buffer(b"0123456789abcdef", 16)
    recorder = Recorder(16)
    request = native.LAUNCH_REQUEST.pack(
        recorder.address, 1, 0, ctypes.addressof(params), 1, 1, 1, 1, 1, 1, 0, 0
    )
    assert library.handle.statescan_launch(request) == 0
    assert recorder.calls[0]["params"] == b"0123456789abcdef"
    assert recorder.calls[0]["stream"] is None


def test_launch_returns_the_driver_status(library):
    recorder = Recorder(0, answer=719)
    request = native.LAUNCH_REQUEST.pack(recorder.address, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0)
    assert library.handle.statescan_launch(request) == 719


def test_launch_without_a_function_is_refused(library):
    request = native.LAUNCH_REQUEST.pack(0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0)
    assert library.handle.statescan_launch(request) == -1


def test_a_damaged_library_is_a_reason_and_keeps_its_error(tmp_path):
    (tmp_path / native.file_name()).write_bytes(b"not a library")
    found = native.find([tmp_path])
    assert found.library is None
    assert str(tmp_path) in found.reason
    assert isinstance(found.error, OSError)


def test_a_library_of_another_abi_is_a_reason(native_install, monkeypatch):
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    found = native.find([native_install / "statescan"])
    assert found.library is None
    assert "left over from another build" in found.reason


def test_the_first_folder_that_has_the_library_wins(native_install, tmp_path):
    found = native.find([tmp_path, native_install / "statescan"])
    assert found.library is not None
    assert found.library.path.parent == native_install / "statescan"


def test_pure_environment_leaves_the_library_alone(monkeypatch):
    monkeypatch.setenv("STATESCAN_PURE", "1")
    native.status.cache_clear()
    try:
        assert native.status() == native.NativeStatus(None, "STATESCAN_PURE is set")
        with pytest.raises(BackendUnavailableError, match="STATESCAN_PURE is set"):
            native.require()
    finally:
        native.status.cache_clear()
