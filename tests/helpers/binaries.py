# SPDX-License-Identifier: Apache-2.0
"""Makes real binaries for tests: extensions, stand-ins of torch's libraries, fat binaries, wheels.

Compiled with the gcc of the machine; what gcc cannot make (other systems' formats, GPU code) is
written byte by byte.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

NEW_CHECK = (
    "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
)
OLD_CHECK = "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"
SET_DEVICE_INT = "_ZN3c104cuda9SetDeviceEi"
SET_DEVICE_CHAR = "_ZN3c104cuda9SetDeviceEa"
EMPTY_TENSOR = "_ZN2at10empty_likeERKNS_6TensorE"
MODULE = "selective_scan_cuda.cpython-311-x86_64-linux-gnu.so"


def gcc() -> str:
    """The C compiler; the test is skipped where there is none."""
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("there is no gcc, which makes the binaries of this test")
    return found


def shared(target: Path, assembly: str, *, options: Sequence[str] = (), source: str = "") -> Path:
    """A shared library from assembly text and C text."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = target.parent / f".{target.name}"
    asm, c = stem.with_suffix(".s"), stem.with_suffix(".c")
    asm.write_text(f'{assembly}\n.section .note.GNU-stack,"",@progbits\n', encoding="ascii")
    c.write_text(source or "static int unused __attribute__((unused));\n", encoding="ascii")
    command = [gcc(), "-shared", "-fPIC", "-nostartfiles", "-o", target, asm, c, *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    asm.unlink()
    c.unlink()
    return target


def defining(symbols: Iterable[str]) -> str:
    """Assembly that defines these functions."""
    return "\n".join(
        f".text\n.globl {name}\n.type {name}, @function\n{name}: ret" for name in symbols
    )


def wanting(symbols: Iterable[str]) -> str:
    """Assembly that needs these symbols."""
    return "\n".join(f".data\n.quad {name}" for name in symbols)


def library(target: Path, symbols: Iterable[str], *options: str) -> Path:
    """A library with these functions, named as its file is."""
    return shared(target, defining(symbols), options=[f"-Wl,-soname,{target.name}", *options])


def extension(
    target: Path,
    wants: Iterable[str] = (),
    needs: Iterable[Path] = (),
    options: Sequence[str] = (),
    assembly: str = "",
) -> Path:
    """An extension module that wants symbols and names these libraries as needed."""
    linked = [word for path in needs for word in (f"-L{path.parent}", f"-l:{path.name}")]
    return shared(
        target,
        f"{defining(['PyInit_' + target.name.split('.')[0]])}\n{wanting(wants)}\n{assembly}",
        options=["-Wl,--no-as-needed", *linked, *options],
    )


def fake_torch(
    site: Path,
    *,
    version: str = "2.1.2+cpu",
    cuda: str | None = None,
    symbols: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """A folder laid out like an installed torch, with stubs for libraries."""
    folder = site / "torch"
    contents = {"libc10.so": [OLD_CHECK], "libtorch_cpu.so": [EMPTY_TENSOR], **(symbols or {})}
    origin = "-Wl,-rpath,$ORIGIN"
    made = [library(folder / "lib" / name, names, origin) for name, names in contents.items()]
    shared(
        folder / "lib" / "libtorch_python.so",
        defining(["_Z16THPVariable_WrapN2at10TensorBaseE"]),
        options=[
            *("-Wl,-soname,libtorch_python.so", origin, "-Wl,--no-as-needed"),
            *(word for path in made for word in (f"-L{path.parent}", f"-l:{path.name}")),
        ],
    )
    (folder / "version.py").write_text(
        f"__version__ = {version!r}\ndebug = False\ncuda: Optional[str] = {cuda!r}\n"
        "hip: Optional[str] = None\n",
        encoding="utf-8",
    )
    return folder


def fat_binary(
    cubins: Sequence[str] = (), ptx: Sequence[str] = (), *, compressed: bool = False
) -> bytes:
    """A CUDA fat binary whose entries have these targets, such as "90" or "100f"."""
    entries = b""
    for kind, targets in ((2, cubins), (1, ptx)):
        for target in targets:
            flags = 0x11 | (0x8000 if compressed else 0)
            flags |= {"a": 1 << 20, "f": 1 << 21}.get(target[-1], 0)
            payload = b"\x28\xb5\x2f\xfd".ljust(64, b"\0") if compressed else b"\x7fELF".ljust(64)
            entries += (
                struct.pack(
                    "<HHIQIIHHIIIQQQ",
                    *(kind, 0x101, 64, len(payload), len(payload) if compressed else 0, 0, 8, 1),
                    *(int(target.rstrip("af")), 0, 0, flags, 0, 1000 if compressed else 0),
                )
                + payload
            )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def gpu_section(folder: Path, content: bytes, name: str = ".nv_fatbin") -> str:
    """Assembly that puts the bytes into a section of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".{name.strip('._')}.bin"
    file.write_bytes(content)
    return f'.section {name},"a"\n.balign 8\n.incbin "{file}"'


def wheel(
    target: Path,
    members: Mapping[str, bytes],
    *,
    tags: Sequence[str] = (),
    requires_python: str = ">=3.9",
    requires: Sequence[str] = ("torch",),
) -> Path:
    """A wheel with these files; its WHEEL says the tags of its name unless others are given."""
    name, version, *_ = target.name.split("-")
    python, abi, platform = target.name.removesuffix(".whl").split("-")[-3:]
    info = f"{name}-{version}.dist-info"
    said = tags or [f"{python}-{abi}-{platform}"]
    texts = {
        f"{info}/METADATA": "\n".join(
            [
                *("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"),
                f"Requires-Python: {requires_python}",
                *(f"Requires-Dist: {line}" for line in requires),
            ]
        ),
        f"{info}/WHEEL": "\n".join(
            ["Wheel-Version: 1.0", "Root-Is-Purelib: false", *(f"Tag: {tag}" for tag in said)]
        ),
    }
    files = {**members, **{path: f"{text}\n".encode() for path, text in texts.items()}}
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", "".join(_record(*item) for item in files.items()))
    return target


def _record(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def windows_library(
    imports: Mapping[str, Sequence[str]], exports: Sequence[str] = (), *, machine: int = 0x8664
) -> bytes:
    """A 64-bit DLL with these imported and exported names, and nothing else."""
    base, content = 0x1000, bytearray(20 * (len(imports) + 1))

    def put(data: bytes) -> int:
        content.extend(b"\0" * (-len(content) % 8))
        content.extend(data)
        return base + len(content) - len(data)

    for number, (dll, symbols) in enumerate(imports.items()):
        hints = [put(b"\0\0" + symbol.encode() + b"\0") for symbol in symbols]
        thunks = put(struct.pack(f"<{len(hints) + 1}Q", *hints, 0))
        name = put(dll.encode() + b"\0")
        struct.pack_into("<IIIII", content, 20 * number, thunks, 0, 0, name, thunks)
    pointers = [put(symbol.encode() + b"\0") for symbol in sorted(exports)]
    table = put(struct.pack(f"<{len(pointers)}I", *pointers))
    places = put(struct.pack(f"<{len(pointers)}H", *range(len(pointers))))
    codes = put(struct.pack(f"<{len(pointers)}I", *[base] * len(pointers)))
    count = len(pointers)
    export = put(
        struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, table, 1, count, count, codes, table, places)
    )
    directories = [(export if exports else 0, 40), (base, 20 * (len(imports) + 1))] + [(0, 0)] * 14
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0, 0, 0, 0, base)
    sizes = (0, 0x2000 + len(content) // 0x1000 * 0x1000, 0x400, 0, 3, 0x160)
    optional += struct.pack("<QII6HIIIIHH", 0x180000000, 0x1000, 0x200, 6, 0, 0, 0, 6, 0, *sizes)
    return _windows_file(machine, optional, directories, bytes(content))


def _windows_file(
    machine: int, optional: bytes, directories: Sequence[tuple[int, int]], content: bytes
) -> bytes:
    optional = optional.ljust(108, b"\0") + struct.pack("<I", len(directories))
    optional += b"".join(struct.pack("<II", *row) for row in directories)
    header = struct.pack("<HHIIIHH", machine, 1, 0, 0, 0, len(optional), 0x2022)
    size = len(content) + (-len(content) % 512)
    section = struct.pack(
        "<8sIIIIIIHHI", b".rdata", len(content), 0x1000, size, 0x400, 0, 0, 0, 0, 0x40000040
    )
    start = b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x80)
    whole = start.ljust(0x80, b"\0") + b"PE\0\0" + header + optional + section
    return whole.ljust(0x400, b"\0") + content.ljust(size, b"\0")


def mac_library(
    needed: Sequence[str], rpaths: Sequence[str] = (), *, cpu: int = 0x0100000C
) -> bytes:
    """A 64-bit dynamic library of macOS with only load commands."""
    commands = []
    for tag, head, names in ((0xC, 24, needed), (0x8000001C, 12, rpaths)):
        for name in names:
            text = name.encode() + b"\0"
            size = -(-(head + len(text)) // 8) * 8
            command = struct.pack("<III", tag, size, head).ljust(head, b"\0") + text
            commands.append(command.ljust(size, b"\0"))
    body = b"".join(commands)
    return struct.pack("<8I", 0xFEEDFACF, cpu, 0, 6, len(commands), len(body), 0, 0) + body


def small_elf(*, wide: bool, big: bool, machine: int, needed: Sequence[str]) -> bytes:
    """A shared object with nothing but a dynamic section that names these libraries."""
    order = ">" if big else "<"
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    word, head, part = ("Q", 64, 56) if wide else ("I", 52, 32)
    start = head + 2 * part
    table = start + 4 * struct.calcsize(word) * (len(needed) + 3)
    offsets = [strings.index(name.encode()) for name in needed]
    entries = [*((1, offset) for offset in offsets), (5, table), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack(f"{order}{word}{word}", *entry) for entry in entries)
    size = table + len(strings)
    ident = b"\x7fELF" + bytes([2 if wide else 1, 2 if big else 1, 1]).ljust(12, b"\0")
    fields = (3, machine, 1, 0, head, 0, 0, head, part, 2, 0, 0, 0)
    header = ident + struct.pack(f"{order}HHI{word * 3}IHHHHHH", *fields)
    parts = b""
    for kind, offset, length in ((1, 0, size), (2, start, len(dynamic))):
        if wide:
            row = (kind, 4, offset, offset, offset, length, length, 8)
            parts += struct.pack(f"{order}IIQQQQQQ", *row)
        else:
            row = (kind, offset, offset, offset, length, length, 4, 4)
            parts += struct.pack(f"{order}IIIIIIII", *row)
    return (header + parts + dynamic).ljust(table, b"\0") + strings
