# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from helpers import binaries

from statescan.doctor.symbols.binary import BinaryError, opened
from statescan.doctor.symbols.elf import Elf


def system_libraries() -> list[Path]:
    """Real files of different makers: the interpreter, the C library, and torch's."""
    import torch

    program = Path(sys.executable).resolve()
    libraries = Path(torch.__file__).parent / "lib"
    return [program, *(libraries / name for name in ("libc10.so", "libtorch_python.so"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A library with exports, version needs and weak symbols, made by the compiler here."""
    folder = tmp_path_factory.mktemp("elf")
    source = (
        "#include <stdio.h>\n#include <string.h>\n"
        "extern int absent(void); extern int maybe(void) __attribute__((weak));\n"
        "int visible(char *to, char *from) { memcpy(to, from, absent()); return puts(to); }\n"
        "int other(void) { return maybe ? maybe() : 0; }\n"
    )
    return binaries.shared(
        folder / "libmade.so",
        "",
        source=source,
        options=["-Wl,-soname,libmade.so.3", "-Wl,-rpath,$ORIGIN/deps:/opt/there"],
    )


def independent(path: Path) -> dict[str, object]:
    """What pyelftools reads of the file."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic = next(part for part in elf.iter_sections() if isinstance(part, DynamicSection))
        tags = [tag for tag in dynamic.iter_tags() if hasattr(tag, "needed") or tag.entry.d_tag]
        needs = [part for part in elf.iter_sections() if isinstance(part, GNUVerNeedSection)]
        symbols = [
            symbol
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol.name and symbol["st_info"]["bind"] != "STB_LOCAL"
        ]
        return {
            "needed": [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"],
            "soname": "".join(tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"),
            "runpath": [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"],
            "versions": {
                need.name: sorted({item.name for item in items})
                for part in needs
                for need, items in part.iter_versions()
            },
            "undefined": sorted(s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF"),
            "weak": sorted(
                s.name
                for s in symbols
                if s["st_shndx"] == "SHN_UNDEF" and s["st_info"]["bind"] == "STB_WEAK"
            ),
            "defined": sorted(s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF"),
        }


def ours(path: Path) -> dict[str, object]:
    with opened(path) as view:
        elf = Elf(view)
        symbols = list(elf.symbols())
        return {
            "needed": elf.needed,
            "soname": elf.soname,
            "runpath": [":".join(elf.runpath)] if elf.runpath else [],
            "versions": {name: sorted(found) for name, found in elf.version_needs().items()},
            "undefined": sorted(s.name for s in symbols if not s.defined),
            "weak": sorted(s.name for s in symbols if not s.defined and s.weak),
            "defined": sorted(s.name for s in symbols if s.defined),
        }


def test_reads_what_an_independent_reader_reads(built):
    for path in (built, *system_libraries()):
        assert ours(path) == independent(path), path.name


def test_a_symbol_is_found_by_its_hash_exactly_when_it_is_defined(built):
    for path in (built, *system_libraries()):
        expected = independent(path)
        with opened(path) as view:
            elf = Elf(view)
            defined = expected["defined"]
            # Each kind of table has thousands of names in torch's libraries; every 50th will do.
            for name in defined[:: 1 + len(defined) // 200]:
                assert elf.exports(name), name
            absent = [*sorted(set(expected["undefined"]) - set(defined)), "surely_not_there"]
            assert not [name for name in absent if elf.exports(name)]


@pytest.mark.parametrize("style", ["sysv", "gnu", "both"])
def test_both_kinds_of_hash_table_serve_lookups(tmp_path, style):
    names = [f"function_{number}" for number in range(300)]
    path = binaries.library(tmp_path / "libmany.so", names, f"-Wl,--hash-style={style}")
    with opened(path) as view:
        elf = Elf(view)
        assert all(elf.exports(name) for name in names)
        assert not any(elf.exports(f"{name}x") for name in names)


@pytest.mark.parametrize("style", ["sysv", "gnu"])
def test_a_file_without_section_headers_tells_the_same(built, tmp_path, style):
    source = binaries.library(tmp_path / "libplain.so", ["one", "two"], f"-Wl,--hash-style={style}")
    stripped = tmp_path / "libstripped.so"
    data = bytearray(source.read_bytes())
    # Address, size, number and index of the section headers.
    data[0x28:0x30] = bytes(8)
    data[0x3A:0x40] = bytes(6)
    stripped.write_bytes(data)
    assert ours(stripped)["defined"] == ours(source)["defined"] == ["one", "two"]
    with opened(stripped) as view:
        assert Elf(view).sections() == []


@pytest.mark.parametrize(
    ("wide", "big", "number", "machine"),
    [
        (True, False, 183, "aarch64"),
        (True, True, 22, "s390x"),
        (True, False, 21, "ppc64le"),
        (True, True, 21, "ppc64"),
        (False, False, 40, "arm"),
        (False, True, 8, "mips"),
        (False, False, 3, "i386"),
    ],
)
def test_other_machines_sizes_and_byte_orders_are_read(tmp_path, wide, big, number, machine):
    path = tmp_path / "small.so"
    needed = ["libc10.so", "libc.so.6"]
    path.write_bytes(binaries.small_elf(wide=wide, big=big, machine=number, needed=needed))
    with opened(path) as view:
        elf = Elf(view)
        assert (elf.machine, elf.wide, elf.big_endian) == (machine, wide, big)
        assert elf.needed == needed
        assert elf.kind == "shared object"
    # The writer of this test is checked as well.
    with path.open("rb") as file:
        other = ELFFile(file)
        assert (other.elfclass, other.little_endian) == (64 if wide else 32, not big)
        segment = next(part for part in other.iter_segments() if part["p_type"] == "PT_DYNAMIC")
        tags = [tag.needed for tag in segment.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
        assert tags == needed


def test_offered_versions_are_listed(tmp_path):
    script = tmp_path / "versions"
    script.write_text("MINE_1.0 { global: first; }; MINE_2.0 { global: second; } MINE_1.0;")
    path = binaries.library(
        tmp_path / "libversions.so", ["first", "second"], f"-Wl,--version-script={script}"
    )
    with opened(path) as view:
        assert Elf(view).version_definitions() == ["libversions.so", "MINE_1.0", "MINE_2.0"]


def test_an_interpreter_tells_a_program_from_a_library(built):
    with opened(Path(sys.executable).resolve()) as view:
        assert Elf(view).has_interpreter
    with opened(built) as view:
        assert not Elf(view).has_interpreter


def test_an_object_file_has_its_own_kind(tmp_path):
    source = tmp_path / "part.c"
    source.write_text("int part;\n")
    subprocess.run([binaries.gcc(), "-c", source, "-o", tmp_path / "part.o"], check=True)
    with opened(tmp_path / "part.o") as view:
        assert Elf(view).kind == "relocatable object"


def test_what_is_no_elf_file_is_refused(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("hello" * 100)
    with opened(path) as view, pytest.raises(BinaryError, match=r"text\.so is not an ELF file"):
        Elf(view)


def test_readelf_agrees_on_needed_libraries(built):
    readelf = shutil.which("readelf")
    assert readelf, "gcc brings readelf"
    text = subprocess.run(
        [readelf, "-dW", built], check=True, capture_output=True, text=True, env={"LC_ALL": "C"}
    ).stdout
    said = [line.split("[")[1].split("]")[0] for line in text.splitlines() if "(NEEDED)" in line]
    assert ours(built)["needed"] == said
