# SPDX-License-Identifier: Apache-2.0
"""Files that lie: each gives an answer or one BinaryError, soon, and never another exception."""

import os
import random
import struct
import time
from pathlib import Path

import pytest
from helpers import binaries

from statescan.doctor.model import Facts
from statescan.doctor.symbols import judge, judge_wheel, report, text, wheel
from statescan.doctor.symbols.binary import BinaryError, WrongKindError

FLIPS = 150
SLOW = 30.0
"""Seconds after which a file counts as one that hangs the program; none takes one."""


def elf_sample(folder: Path) -> bytes:
    code = binaries.gpu_section(folder, binaries.fat_binary(["80", "90a"], ["90"]))
    needs = [binaries.library(folder / "libc10.so", [binaries.OLD_CHECK, "near"])]
    path = folder / binaries.MODULE
    binaries.extension(path, [binaries.OLD_CHECK, "near", "printf"], needs, (), code)
    return path.read_bytes()


def sysv_sample(folder: Path) -> bytes:
    path = binaries.library(folder / "libold.so", ["a", "b", "c"], "-Wl,--hash-style=sysv")
    return path.read_bytes()


SAMPLES = {
    "elf": elf_sample,
    "elf-sysv": sysv_sample,
    "pe": lambda _: binaries.windows_library({"c10.dll": ["a", "b"]}, ["x", "y"]),
    "macho": lambda _: binaries.mac_library(["@rpath/libc10.dylib"], ["/a"]),
}


def dynamic_section(data: bytes) -> tuple[int, int]:
    """Where the dynamic section of a 64-bit file is, and its size."""
    program, count = struct.unpack_from("<Q", data, 0x20)[0], data[0x38]
    rows = [struct.unpack_from("<IIQQQQQQ", data, program + 56 * n) for n in range(count)]
    return next((row[2], row[5]) for row in rows if row[0] == 2)


def survives(path: Path) -> None:
    """The whole way from the file to lines of text, within the time."""
    started = time.process_time()
    found = report.report(path, {})
    rows = judge.judge(found, Facts())
    lines = [*text.binary_lines(found, 80), *text.answer_lines(rows, "", "bash", 80, False)]
    assert all(line.isprintable() for line in lines if line)
    assert found["problem"] == "" or len(found["problem"].splitlines()) == 1
    assert time.process_time() - started < SLOW


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_cut_of_a_file(tmp_path, kind):
    data = SAMPLES[kind](tmp_path)
    path = tmp_path / "cut.so"
    # Headers byte by byte, what follows in steps.
    for size in [*range(0, min(len(data), 300), 3), *range(300, len(data), 1 + len(data) // 100)]:
        path.write_bytes(data[:size])
        survives(path)


@pytest.mark.parametrize("kind", SAMPLES)
def test_flipped_bytes(tmp_path, kind):
    data = SAMPLES[kind](tmp_path)
    path = tmp_path / "flipped.so"
    draw = random.Random(5)
    for number in range(FLIPS):
        changed = bytearray(data)
        # Half of the flips go to the headers, where they matter most.
        reach = len(data) if number % 2 else min(len(data), 1024)
        for _ in range(draw.choice((1, 1, 4, 20))):
            changed[draw.randrange(4, reach)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, 7))
        path.write_bytes(changed)
        survives(path)


@pytest.mark.parametrize("kind", ["elf", "elf-sysv"])
def test_flipped_bytes_of_the_dynamic_section(tmp_path, kind):
    data = SAMPLES[kind](tmp_path)
    path = tmp_path / "flipped.so"
    offset, size = dynamic_section(data)
    draw = random.Random(6)
    for number in range(FLIPS):
        changed = bytearray(data)
        place = offset + 8 * draw.randrange(size // 8)
        value = draw.choice((0, 1, len(data) - 1, len(data), 1 << 31, (1 << 63) - 1, number))
        struct.pack_into("<Q", changed, place, value)
        path.write_bytes(changed)
        survives(path)


def test_huge_counts_are_refused_and_not_walked(tmp_path):
    data = bytearray(sysv_sample(tmp_path))
    path = tmp_path / "huge.so"
    # Without section headers, the old hash table alone says how many symbols there are.
    data[0x28:0x30], data[0x3A:0x40] = bytes(8), bytes(6)
    offset, size = dynamic_section(data)
    rows = [struct.unpack_from("<QQ", data, at) for at in range(offset, offset + size, 16)]
    # The table is in the first segment, whose addresses are the offsets of the file.
    (place,) = [value for tag, value in rows if tag == 4]
    struct.pack_into("<I", data, place + 4, 0xFFFFFFF0)
    path.write_bytes(data)
    started = time.process_time()
    assert "symbols" in report.report(path, {})["problem"]
    assert time.process_time() - started < SLOW


@pytest.mark.parametrize(
    ("length", "count", "words"),
    [
        # Gigabytes of text, if the one long name were read for each symbol.
        (16_000, 200_000, "names are larger than any real file has"),
        (16_000, 1_000, "more symbols than any real file does"),
        (3, 100_000, "more symbols than any real file does"),
        (20_000, 1, "a name has no end"),
    ],
)
def test_many_symbols_and_long_names_are_bounded(tmp_path, length, count, words):
    # Each of the symbols has the name of the library, which is needed as well.
    data = bytearray(binaries.small_elf(wide=True, big=False, machine=62, needed=["x" * length]))
    symbols = len(data)
    data += struct.pack("<IBBHQQ", 1, 0x10, 0, 0, 0, 0) * (count + 1)
    table = len(data)
    data += struct.pack("<II", 1, count + 1) + bytes(4 * 8)
    start, size = 64 + 2 * 56, 16 * 4
    entries = [struct.unpack_from("<QQ", data, start + at) for at in range(0, size, 16)]
    # Its place among the four entries goes to the table of symbols, that of the end to the hashes.
    entries = [*entries[1:3], (6, symbols), (4, table)]
    struct.pack_into("<8Q", data, start, *[word for entry in entries for word in entry])
    struct.pack_into("<QQ", data, 64 + 32, len(data), len(data))
    path = tmp_path / "long.so"
    path.write_bytes(data)
    started = time.process_time()
    assert words in report.report(path, {})["problem"]
    assert time.process_time() - started < SLOW


def test_control_characters_in_names_never_reach_the_terminal(tmp_path):
    needed = ["lib\x1b[31mred.so", "a\nb.so", "libtorch.so"]
    path = tmp_path / "\x1b[31m.so"
    path.write_bytes(binaries.small_elf(wide=True, big=False, machine=62, needed=needed))
    found = report.report(path, {})
    assert found["needed"] == needed
    lines = text.binary_lines(found, 80)
    assert not [line for line in lines if "\x1b" in line or "\n" in line]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"!<arch>\nlibx.o/", "a static library"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html>", "a page of HTML"),
        (b"#!/bin/sh\n", "a script"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"plain words", "no binary of Linux, Windows or macOS"),
        (b"\x7f", "no binary of Linux, Windows or macOS"),
    ],
)
def test_other_kinds_of_files_are_named(tmp_path, content, words):
    path = tmp_path / "what.so"
    path.write_bytes(content)
    with pytest.raises(WrongKindError, match=words):
        report.read(path, {})


def test_places_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.so")
    (tmp_path / "loop.so").symlink_to("loop.so")
    (tmp_path / "empty.so").touch()
    for name, words in (
        ("pipe.so", "no regular file"),
        ("loop.so", "cannot be read|absent"),
        ("absent.so", "absent"),
        ("empty.so", "is empty"),
    ):
        with pytest.raises(BinaryError, match=words):
            report.read(tmp_path / name, {})
    with pytest.raises(WrongKindError, match="a folder"):
        report.read(tmp_path, {})


def test_damaged_wheels(tmp_path):
    name = "mamba_ssm-2.2.4+cu12torch2.5cxx11abiFALSE-cp311-cp311-linux_x86_64.whl"
    data = binaries.wheel(tmp_path / name, {binaries.MODULE: elf_sample(tmp_path)}).read_bytes()
    path = tmp_path / name
    draw = random.Random(7)
    for number in range(200):
        changed = bytearray(data)
        if number % 2:
            changed = changed[: draw.randrange(len(data))]
        else:
            # The table of the archive is at its end.
            low = len(data) - 600 if number % 4 else 0
            for _ in range(draw.choice((1, 3, 10))):
                changed[draw.randrange(max(low, 0), len(data))] = draw.randrange(256)
        path.write_bytes(changed)
        started = time.process_time()
        content, problem = None, ""
        try:
            content = wheel.inspect(path, {})
        except BinaryError as error:
            problem = str(error)
        if content is None:
            assert len(problem.splitlines()) == 1
        else:
            judge_wheel.judge_wheel(content, Facts())
            assert text.wheel_lines(content, 80)
        assert time.process_time() - started < SLOW
