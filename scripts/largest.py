# SPDX-License-Identifier: Apache-2.0
"""Prints the ten largest files and functions; fails beyond the hard limits of CONTRIBUTING.md.

No other rule about the code belongs here: ruff and the tests have those.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "scripts")
MODULE_LIMIT = 600
KERNEL_LIMIT = 500
FUNCTION_LIMIT = 80
KERNEL_SUFFIXES = {".c", ".h", ".cu", ".cuh"}


def sources() -> list[Path]:
    """Python and kernel sources of the repository."""
    return sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in KERNEL_SUFFIXES | {".py"} and path.is_file()
    )


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body; signature and docstring may be long for a public operation."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def functions(path: Path) -> list[tuple[int, str]]:
    """Size and place of every function of a Python file."""
    place = path.relative_to(ROOT).as_posix()
    return [
        (code_lines(node), f"{place}:{node.lineno} {node.name}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def main() -> int:
    """Print both lists and the offenders."""
    paths = sources()
    files = sorted(
        ((len(path.read_text(encoding="utf-8").splitlines()), path) for path in paths), reverse=True
    )
    found = sorted(
        (row for path in paths if path.suffix == ".py" for row in functions(path)), reverse=True
    )
    print("largest files (lines)")
    for lines, path in files[:10]:
        print(f"  {lines:5}  {path.relative_to(ROOT).as_posix()}")
    print("largest functions (lines of the body, without docstring)")
    for lines, name in found[:10]:
        print(f"  {lines:5}  {name}")
    over = [
        f"{path.relative_to(ROOT).as_posix()} has {lines} lines"
        for lines, path in files
        if lines > (KERNEL_LIMIT if path.suffix in KERNEL_SUFFIXES else MODULE_LIMIT)
    ]
    over += [f"{name} has {lines} lines" for lines, name in found if lines > FUNCTION_LIMIT]
    for line in over:
        print(f"too large: {line}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
