# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every source file: licence line, module docstring, no foreign headers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPDX = "SPDX-License-Identifier: Apache-2.0"
FOLDERS = ("src", "tests", "benchmarks", "scripts", ".ci")
TEXT_FILES = ("pyproject.toml", "CMakeLists.txt")
SUFFIXES = {".py", ".c", ".h", ".cu", ".cuh", ".sh", ".toml", ""}
C_HEADERS = {"<stddef.h>", "<stdint.h>", "<immintrin.h>", "<intrin.h>", "<arm_neon.h>"}
"""Headers that need no C library to link with."""


def source_files() -> list[Path]:
    files = [ROOT / name for name in TEXT_FILES]
    for folder in FOLDERS:
        files += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file()
            and path.suffix in SUFFIXES
            and "__pycache__" not in path.parts
            and "data" not in path.parts
            and not any(part.endswith("_cache") for part in path.parts)
        ]
    return sorted(files)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_source_file_starts_with_its_licence():
    without = []
    for path in source_files():
        # A script's first line is its interpreter.
        head = path.read_text(encoding="utf-8").split("\n")[:2]
        if SPDX not in "\n".join(head):
            without.append(relative(path))
    assert without == []


def test_every_module_says_what_it_is_for():
    """Tests are exempt: their names say it."""
    without = [
        relative(path)
        for path in source_files()
        if path.suffix == ".py"
        and not relative(path).startswith("tests/")
        and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert without == []


def test_kernels_include_no_header_that_must_be_linked():
    kernels = ROOT / "src" / "statescan" / "kernels"
    found = []
    for path in sorted(kernels.rglob("*.[ch]*")):
        if ".cubin" in path.name:
            continue
        for header in re.findall(r"^\s*#\s*include\s+(\S+)", path.read_text(), re.MULTILINE):
            own = header.startswith('"') and (path.parent / header.strip('"')).is_file()
            if path.suffix in (".cu", ".cuh") or not (own or header in C_HEADERS):
                found.append(f"{relative(path)}: {header}")
    assert found == []


@pytest.mark.parametrize("folder", ["tests", "tests/packaging", "tests/docs"])
def test_test_folders_are_not_packages(folder):
    """Test modules are imported by path: a package here would make two files of one name clash."""
    assert not (ROOT / folder / "__init__.py").exists()
