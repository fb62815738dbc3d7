# SPDX-License-Identifier: Apache-2.0
"""Shipped cubins: they are in wheel and sdist, and the build's gates let no bad one through."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from argparse import Namespace
from datetime import date
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from statescan.backends.cuda import cubins, nvrtc, source, tables
from statescan.backends.cuda.tables.base import Instance, Kernel

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
STEM = "sequence_marks"
RELEASE = os.environ.get("STATESCAN_REQUIRE_NATIVE") == "1"
STORE = "src/statescan/kernels/cuda/cubins"
KERNEL = Kernel("toy", (("x", "ptr"), ("n", "i64")), (Instance("f32", "float", 128),))
SYMBOL = KERNEL.symbol(KERNEL.instances[0])


@pytest.fixture
def scripts(monkeypatch):
    """The modules of scripts/ by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name in ("build_cubins", "cubin_gates", "cubin_elf"):
        sys.modules.pop(name, None)


def attribute(number: int, payload: bytes) -> bytes:
    return struct.pack("<BBH", 4, number, len(payload)) + payload


def cubin(
    registers: int = 40,
    stack: int = 0,
    parameters: int = KERNEL.packer.size,
    abi: tuple[int, int] = (0x33, 7),
    symbol: str = SYMBOL,
) -> bytes:
    """The parts of a cubin that the build reads, written as NVRTC writes them."""
    strings = f"\0{symbol}\0".encode()
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0, 0, 1, 0, 0)
    facts = b"".join(
        attribute(number, struct.pack("<II", 1, value))
        for number, value in ((0x2F, registers), (0x11, stack), (0x12, stack))
    )
    block = attribute(0x0A, struct.pack("<IHH", 7, 0x210, parameters))
    bodies = {
        "": b"",
        f".text.{symbol}": b"\0" * 16,
        ".nv.info": facts,
        f".nv.info.{symbol}": block,
        f".nv.shared.{symbol}": b"\0" * 2048,
        ".symtab": symbols,
        ".strtab": strings,
    }
    names = b"".join(name.encode() + b"\0" for name in (*bodies, ".shstrtab"))
    bodies[".shstrtab"] = names
    rows, data, place = [], b"", 64
    for number, (name, body) in enumerate(bodies.items()):
        link = list(bodies).index(".strtab") if name == ".symtab" else 0
        at = names.index(name.encode() + b"\0") if number else len(names) - 1
        rows.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, place, len(body), link, 0, 1, 0))
        data, place = data + body, place + len(body)
    head = bytearray(64)
    head[:9] = b"\x7fELF\x02\x01\x01" + bytes(abi)
    struct.pack_into("<Q", head, 0x28, place)
    struct.pack_into("<HHH", head, 0x3A, 64, len(rows), len(rows) - 1)
    return bytes(head) + data + b"".join(rows)


def judged(scripts, architecture="sm_90", kernel=KERNEL, **parts):
    data = scripts("cubin_elf").Cubin(cubin(**parts))
    return scripts("cubin_gates").judge(kernel, architecture, data)


def test_resources_are_read_from_the_file(scripts):
    found = scripts("cubin_elf").Cubin(cubin(registers=77, stack=96))
    assert found.abi == (0x33, 7)
    resources = found.kernels()[SYMBOL]
    assert (resources.registers, resources.local_bytes) == (77, 96)
    assert (resources.shared_bytes, resources.parameter_bytes) == (2048, 16)


def test_what_is_no_cubin_is_refused(scripts):
    with pytest.raises(ValueError, match="not a cubin"):
        scripts("cubin_elf").Cubin(b"MZ nothing of the kind")


def test_a_good_cubin_passes(scripts):
    assert judged(scripts) == []


@pytest.mark.parametrize(
    ("architecture", "abi", "good"),
    [
        ("sm_70", (0x33, 7), True),
        ("sm_90", (0x33, 7), True),
        ("sm_90", (0x41, 8), False),
        ("sm_100", (0x41, 8), True),
        ("sm_110", (0x41, 8), True),
        ("sm_120", (0x33, 7), False),
    ],
)
def test_the_abi_is_the_oldest_that_the_architecture_has(scripts, architecture, abi, good):
    # With the form of CUDA 13 every driver before 580 would refuse the file.
    assert (judged(scripts, architecture, abi=abi) == []) is good


def test_parameters_of_another_size_fail(scripts):
    (problem,) = judged(scripts, parameters=24)
    assert "parameters take 24 bytes, Python packs 16" in problem


def test_a_missing_or_surplus_kernel_fails(scripts):
    (problem,) = judged(scripts, symbol="statescan_toy__other")
    assert "statescan_toy__f32" in problem
    assert "statescan_toy__other" in problem


@pytest.fixture
def record(scripts, monkeypatch, tmp_path):
    """The gate that compares a manifest of one kernel with the record, or records it."""
    gates = scripts("cubin_gates")
    monkeypatch.setattr(gates, "RECORD", tmp_path / "record.json")

    def check(size: int, local: int = 0, record: bool = False) -> list[str]:
        folder = tmp_path / "sm_90"
        folder.mkdir(exist_ok=True)
        made = {"bytes": size, "instances": {"only": {"local_bytes": local}}}
        manifest = {"schema": cubins.SCHEMA, "kernels": {STEM: made}}
        (folder / cubins.MANIFEST).write_text(json.dumps(manifest))
        return gates.check(tmp_path, ["sm_90"], [STEM], record)

    return check


def test_growth_fails_until_it_is_recorded(record):
    assert record(1000)[0] == f"sm_90 {STEM}: 1000 bytes, and not in record.json"
    assert record(1000, record=True) == []
    assert record(1090) == []
    problems = record(1200)
    assert problems[0] == f"sm_90 {STEM}: 1200 bytes, recorded 1000"
    assert "--record" in problems[-1]
    assert record(1200, record=True) == []
    assert record(1200) == []


def test_local_memory_fails_beyond_what_is_recorded(record):
    record(1000, record=True)
    assert f"sm_90 {STEM} only: 8 bytes of local memory a thread, recorded 0" in record(1000, 8)
    record(1000, 8, record=True)
    assert record(1000, 8) == []
    assert record(1000, 16) != []


def test_a_record_of_other_sources_is_told(scripts, record, monkeypatch):
    gates = scripts("cubin_gates")
    record(1000, record=True)
    assert gates.stems_of_other_sources(["sm_90"], [STEM]) == []
    (problem,) = gates.stems_of_other_sources(["sm_70"], [STEM])
    assert problem == f"sm_70 {STEM}: record.json is not of these sources"
    monkeypatch.setattr(gates.source, "unit_hash", lambda kernel: "of another text")
    assert len(gates.stems_of_other_sources(["sm_90"], [STEM])) == 1


def test_the_record_is_of_these_sources_for_every_architecture(scripts):
    gates, build = scripts("cubin_gates"), scripts("build_cubins")
    assert gates.stems_of_other_sources(list(build.COMPILER_OF), list(tables.stems())) == []


def test_the_sample_takes_every_architecture_in_turn(scripts, monkeypatch):
    build = scripts("build_cubins")
    seen = set()
    for day in range(1, len(build.COMPILER_OF) + 1):
        monkeypatch.setattr(
            build, "date", SimpleNamespace(today=lambda day=day: date(2026, 1, day))
        )
        seen.update(build.sampled())
    assert seen == set(build.COMPILER_OF)


def test_every_architecture_has_a_pinned_compiler(scripts):
    build = scripts("build_cubins")
    assert {"sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90"} < set(build.COMPILER_OF)
    assert {"sm_100", "sm_103", "sm_110", "sm_120", "sm_121"} < set(build.COMPILER_OF)
    assert set(build.COMPILER_OF.values()) == set(build.PACKAGES)
    assert all("==" in package for package in build.PACKAGES.values())


def test_the_program_says_which_compiler_is_missing(scripts, tmp_path):
    program = [sys.executable, "-S", str(SCRIPTS / "build_cubins.py"), "--arch", "sm_90"]
    command = [*program, "--stem", "sequence_marks", "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"HOME": "/"})
    if done.returncode == 0:
        pytest.skip("this system has the pinned NVRTC outside of Python's packages")
    assert "sm_90 is compiled by NVRTC 12.9, which is not here" in done.stderr
    assert "pip install nvidia-cuda-nvrtc-cu12==12.9.86" in done.stderr


def test_a_kernel_is_compiled_kept_and_compiled_again_when_its_text_changes(scripts, tmp_path):
    build = scripts("build_cubins")
    try:
        build.compiler_of("sm_90", ())
    except SystemExit as missing:
        pytest.skip(str(missing))
    options = Namespace(out=tmp_path, nvrtc=[], force=False, compress=True)
    task = build.Task("sm_90", "sequence_marks", options)
    first = build.compile_one(task)
    build.write_manifest(tmp_path / "sm_90", "sm_90", [first])
    target = tmp_path / "sm_90" / "sequence_marks.cubin.xz"
    assert first["problems"] == []
    assert first["record"]["sha256"] == sha256(target.read_bytes()).hexdigest()
    assert "(kept)" in build.compile_one(task)["summary"]
    target.write_bytes(b"damaged")
    assert "(kept)" not in build.compile_one(task)["summary"]


def shipped_folders():
    return sorted(cubins.FOLDER.glob("*/manifest.json"))


def test_shipped_cubins_are_those_of_these_sources():
    if not shipped_folders():
        pytest.skip("this checkout has no cubins: scripts/build_cubins makes them")
    for path in shipped_folders():
        for stem, record in json.loads(path.read_text())["kernels"].items():
            kernel = tables.kernel(stem)
            if record["source"] != source.unit_hash(kernel) and not RELEASE:
                pytest.skip(f"{stem} changed since its cubins were made, by scripts/build_cubins")
            assert record["source"] == source.unit_hash(kernel), f"{path.parent.name} {stem}"
            assert record["flags"] == list(nvrtc.FLAGS)
            assert set(record["instances"]) == set(kernel.by_suffix)
            data = (path.parent / record["file"]).read_bytes()
            assert sha256(data).hexdigest() == record["sha256"]


@pytest.mark.packaging
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_cubins_are_packed_although_git_ignores_them(kind, builder, tmp_path):
    copy = Path(shutil.copytree(builder.source, tmp_path / "source"))
    shutil.copy(ROOT / ".gitignore", copy)
    shutil.rmtree(copy / STORE, ignore_errors=True)
    (copy / STORE / "sm_90").mkdir(parents=True)
    files = {"manifest.json", "toy.cubin.xz"}
    for name in files:
        (copy / STORE / "sm_90" / name).write_text("stands for one")
    if kind == "wheel":
        with zipfile.ZipFile(builder.wheel({"STATESCAN_PURE": "1"}, copy)) as archive:
            names = archive.namelist()
    else:
        code = "from scikit_build_core import build; build.build_sdist('out')"
        subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, timeout=120)
        with tarfile.open(next((copy / "out").glob("*.tar.gz"))) as archive:
            names = archive.getnames()
    packed = {Path(name).name for name in names if "kernels/cuda/cubins/sm_90/" in name}
    assert packed == files


@pytest.mark.packaging
def test_kernel_sources_are_packed(pure_wheel):
    with zipfile.ZipFile(pure_wheel) as archive:
        names = set(archive.namelist())
    expected = {f"statescan/kernels/cuda/{path.name}" for path in source.FOLDER.glob("*.cu*")}
    assert {name for name in expected if not name.endswith("cubins")} <= names
