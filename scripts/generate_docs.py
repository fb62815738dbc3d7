# SPDX-License-Identifier: Apache-2.0
"""Writes every page and list of the documentation that repeats what the code says.

Prose is written by hand and never here. ``--check`` compares instead of writing.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# The pages describe this checkout, whatever version is installed.
sys.path.insert(0, str(ROOT / "src"))

import generate_checks  # noqa: E402  (after the path above)
from markdown_parts import NOTE, table  # noqa: E402

from statescan import settings  # noqa: E402
from statescan.backends.base import ALL_OPS, OpRequest  # noqa: E402
from statescan.cli.main import build_parser  # noqa: E402
from statescan.dispatch import all_backends  # noqa: E402

ENVIRONMENT_LEAD = """
They are read at the moment of use, so a program may set them after the import. An argument in code
always wins over a variable.

"""
CLI_LEAD = """
Data goes to stdout, progress and messages to stderr. Exit status: 0 fine, 1 an error or a failed
verdict, 2 a mistake on the command line, 130 interrupted, 141 when the reader of the output has
gone. `python -m statescan` is the same program.

"""
BACKENDS_LEAD = """
`statescan backends` prints this for your machine, with the reason for each that cannot run, and
`statescan explain` does it for one call. How the choice is made is on the page
[dispatch](../concepts/dispatch.md).

"""
API_LEAD = """
Public functions and classes by module; `help(statescan.selective_scan)` shows the same text.
"""
CHECKS_SECTION = """
## Broken installs

Every problem that the doctor knows has a page: [problems by code](checks/README.md). What the web
recommends against them, and what is true of it: [advice](checks/advice.md).
"""
PUBLIC_MODULES = ("statescan", "statescan.nn", "statescan.models", "statescan.generation")


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring on one line."""
    paragraph = " ".join((docstring or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph + " ")[0].rstrip(". ")


def environment_page() -> str:
    """Every environment variable."""
    rows = [(f"`{v.name}`", f"`{v.values}`", v.effect) for v in settings.VARIABLES]
    listed = table(("variable", "values", "effect"), rows)
    return "# Environment variables\n\n" + NOTE + ENVIRONMENT_LEAD + listed


def commands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, help line and parser of every subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                yield name, helps.get(name, ""), sub


def option_rows(parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    """One row for each argument of a parser, in its order."""
    rows = []
    formatter = argparse.HelpFormatter(prog=parser.prog)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(
            action, argparse._HelpAction | argparse._SubParsersAction
        ):
            continue
        value = ""
        if action.nargs != 0:
            value = formatter._format_args(
                action, formatter._get_default_metavar_for_positional(action)
                if not action.option_strings
                else formatter._get_default_metavar_for_optional(action),
            )  # fmt: skip
        spelled = ", ".join(action.option_strings)
        rows.append(
            (
                f"`{f'{spelled} {value}'.strip()}`",
                formatter._expand_help(action) if action.help else "",
            )
        )
    return rows


def cli_page() -> str:
    """Every command with its options."""
    parser = build_parser()
    listed = list(commands(parser))
    linked = [(f"[`{name}`](#statescan-{name})", help_line) for name, help_line, _ in listed]
    parts = ["# Command line\n\n" + NOTE + CLI_LEAD + table(("command", "what for"), linked)]
    shared = option_rows(parser)
    if shared:
        parts.append("\n## For every command\n\n" + table(("option", "meaning"), shared))
    for name, help_line, sub in listed:
        text = inspect.cleandoc(sub.description or help_line)
        parts.append(f"\n## `statescan {name}`\n\n{text}\n")
        rows = [row for row in option_rows(sub) if row not in shared]
        if rows:
            parts.append("\n" + table(("argument", "meaning"), rows))
    return "".join(parts)


def answers(op: str, dtype: str) -> list[str]:
    """What each backend says about an operation on a CPU and on a GPU."""
    cells = []
    for backend in all_backends():
        asked = {d: backend.supports(OpRequest(op, d, {"x": dtype})) for d in ("cpu", "cuda")}
        homes = [device for device, support in asked.items() if support.ok]
        # A backend for one device refuses the other one; its own says what matters.
        own = asked[backend.name if backend.name in asked else "cpu"]
        if not homes:
            cells.append(f"no: {own.reason}")
            continue
        where = "" if len(homes) == len(asked) else f", {homes[0].upper()} tensors"
        cells.append(f"yes{where}" + ("" if backend.automatic else ", when forced"))
    return cells


def support_table() -> str:
    """Operations by backends."""
    names = (f"`{backend.name}`" for backend in all_backends())
    rows = [(f"`{op}`", *answers(op, "float32")) for op in ALL_OPS]
    return table(("operation", *names), rows)


def backends_page() -> str:
    """Which backends there are and what each can run."""
    listed = []
    for order, backend in enumerate(all_backends(), 1):
        chosen = f"{order}." if backend.automatic else "only when forced by name"
        listed.append((f"`{backend.name}`", chosen, first_sentence(type(backend).__doc__)))
    dtypes = ("float32", "bfloat16", "float16", "float64", "complex64")
    limits = [(dtype, *answers("selective_scan", dtype)) for dtype in dtypes]
    names = tuple(f"`{backend.name}`" for backend in all_backends())
    return (
        "# Backends\n\n"
        + NOTE
        + BACKENDS_LEAD
        + table(("backend", "automatic order", "what it is"), listed)
        + "\n## Operations\n\n"
        + support_table()
        + "\n## Dtypes of the scan\n\n"
        + table(("dtype", *names), limits)
    )


def api_page() -> str:
    """The public functions and classes with their docstrings."""
    parts = ["# Python API\n\n" + NOTE + API_LEAD]
    for module_name in PUBLIC_MODULES:
        module = import_module(module_name)
        parts.append(f"\n## {module_name}\n")
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if callable(value):
                parts.append(f"\n### `{name}`\n\n```text\n{described(name, value)}\n```\n")
    return "".join(parts)


def described(name: str, value: Callable[..., Any]) -> str:
    """Signature and docstring; for a class also its public methods."""
    text = (
        f"{name}{wrapped(str(inspect.signature(value)))}\n\n{inspect.getdoc(value) or ''}".rstrip()
    )
    if not inspect.isclass(value):
        return text
    for method_name, method in vars(value).items():
        if inspect.isfunction(method) and not method_name.startswith("_") and method.__doc__:
            lead = inspect.cleandoc(method.__doc__).split("\n\n")[0]
            signature = wrapped(str(inspect.signature(method)))
            text += f"\n\n.{method_name}{signature}\n{indent(lead, '    ')}"
    return text


def wrapped(signature: str) -> str:
    """A long signature with one argument on each line."""
    # Annotations are strings, and their quotes say nothing to a reader.
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature).replace("torch.Tensor", "Tensor")
    if len(signature) < 80:
        return signature
    arguments, _, answer = signature.rpartition(" -> ")
    inside = re.sub(r", (?=[\w*]+(?::|,|$| =))", ",\n    ", arguments[1:-1])
    return f"(\n    {inside},\n) -> {answer}"


def tree_map() -> str:
    """The folders and modules of the package with the first sentence of each docstring."""
    package = ROOT / "src" / "statescan"
    lines = ["```text", "src/statescan/"]
    for path in sorted(package.rglob("*.py"), key=lambda p: (p.parent.as_posix(), p.name)):
        inside = path.relative_to(package)
        about = first_sentence(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
        depth = len(inside.parts) - 1
        if path.name == "__init__.py":
            if depth:
                lines.append(f"{'  ' * depth}{path.parent.name}/  {about}".rstrip())
        elif depth < 2 and not path.name.startswith("_"):
            lines.append(f"{'  ' * (depth + 1)}{path.name}  {about}".rstrip())
    return "\n".join(lines) + "\n```\n"


def index_page(generated: dict[str, str]) -> str:
    """All pages with their first sentence; those in ``generated`` are not read from disk."""
    parts = ["# Documentation\n\n" + NOTE]
    for folder in ("guides", "concepts", "reference", "design", ""):
        paths = {page.relative_to(ROOT).as_posix() for page in (DOCS / folder).glob("*.md")}
        paths |= {path for path in generated if (ROOT / path).parent == DOCS / folder}
        rows = []
        for path in sorted(paths):
            page = ROOT / path
            if page.name in ("README.md", "TEMPLATE.md"):
                continue
            text = generated.get(path) or page.read_text(encoding="utf-8")
            heading, lead = heading_and_lead(text)
            rows.append((f"[{heading}]({page.relative_to(DOCS).as_posix()})", lead))
        if rows:
            title = folder.capitalize() or "More"
            parts.append(f"\n## {title}\n\n" + table(("page", "about"), rows))
    parts.append(CHECKS_SECTION)
    return "".join(parts)


def heading_and_lead(text: str) -> tuple[str, str]:
    """A page's title and the first sentence of prose below it."""
    blocks = [block.strip() for block in text.split("\n\n")]
    prose = (b for b in blocks[1:] if b and not b.startswith(("<", "|", "#", "- ", "```")))
    return blocks[0].lstrip("# "), first_sentence(next(prose, ""))


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/environment.md": environment_page,
    "docs/reference/cli.md": cli_page,
    "docs/reference/backends.md": backends_page,
    "docs/reference/api.md": api_page,
}
BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "support"): support_table,
    ("CONTRIBUTING.md", "tree"): tree_map,
}


def with_block(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced."""
    begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"no markers for the generated block {name!r}")
    return f"{before}{begin}{content}{end}{after}"


def expected_files() -> dict[str, str]:
    """The right content of every file with generated parts."""
    files = {path: write() for path, write in PAGES.items()} | generate_checks.files()
    files["docs/README.md"] = index_page(files)
    for (path, name), write in BLOCKS.items():
        files[path] = with_block((ROOT / path).read_text(encoding="utf-8"), name, write())
    return files


def main() -> int:
    """Write, or with --check compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args().check
    stale = []
    for path, text in expected_files().items():
        page = ROOT / path
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path}", file=sys.stderr)
    if check and stale:
        print("hint: run scripts/docs", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
