# SPDX-License-Identifier: Apache-2.0
"""Every path, link, command, option and variable that a page names exists."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from statescan import settings
from statescan.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
FILE_SUFFIXES = (".py", ".md", ".toml", ".c", ".h", ".cu", ".cuh", ".txt")
MADE_BY_COMMANDS = {"dist/"}
"""Folders that a command of CONTRIBUTING.md makes; a clean checkout has none of them."""
PLACEHOLDER = re.compile(r"[<>*{]|\.\.\.|NNNN")


def subcommands() -> dict[str, argparse.ArgumentParser]:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def missing_paths(text_codes: list[str], page: Path) -> list[str]:
    """Pieces of inline code that look like a path of this repository and are none."""
    missing = []
    for code in text_codes:
        word = code.split()[0] if code.split() else ""
        is_file = word.endswith(FILE_SUFFIXES) and re.fullmatch(r"[\w.-]+(/[\w.-]+)*", word)
        is_folder = re.fullmatch(r"\.?[\w-][\w.-]*(/[\w.-]+)*/", word)
        is_script = word.startswith(("scripts/", ".ci/"))
        if PLACEHOLDER.search(word) or not (is_file or is_folder or is_script):
            continue
        if word in MADE_BY_COMMANDS:
            continue
        places = (ROOT, ROOT / "src" / "statescan", page.parent)
        if not any((place / word).exists() for place in places):
            missing.append(word)
    return missing


def broken_links(text: str, page: Path) -> list[str]:
    """Relative links without a file, or with an anchor that no heading has."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = file.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(text: str) -> Iterator[list[str]]:
    """Every use of the statescan program in blocks and inline code, as words."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = [body for language, body in fenced if language in ("sh", "")]
    inline = re.findall(r"`((?:python -m )?statescan [^`]+)`", text)
    for line in [line for block in blocks for line in block.splitlines()] + inline:
        for part in re.split(r"&&|\|\||;|\|", line.replace("\n", " ")):
            words = shlex.split(part, comments=True) if "statescan" in part else []
            words = words[2:] if words[:2] == ["python", "-m"] else words
            if words[:1] == ["statescan"] and len(words) > 1:
                yield words[1:]


def wrong_commands(text: str) -> list[str]:
    """Commands and options in ``text`` that the program does not have."""
    known = subcommands()
    wrong = []
    for words in command_lines(text):
        name = words[0]
        if name.startswith("-"):
            continue
        if name not in known:
            wrong.append(f"statescan {name}")
            continue
        options = {o for action in known[name]._actions for o in action.option_strings}
        options |= {o for action in build_parser()._actions for o in action.option_strings}
        used = {word.split("=")[0] for word in words[1:] if re.match(r"--?[a-zA-Z]", word)}
        wrong += [f"statescan {name} {option}" for option in sorted(used - options)]
    return wrong


def unknown_variables(text: str) -> list[str]:
    """STATESCAN_ variables that settings.py does not have; names of C constants do not count."""
    known = {variable.name for variable in settings.VARIABLES}
    used = set(re.findall(r"\bSTATESCAN_[A-Z_]+\b", text))
    header = (ROOT / "src/statescan/kernels/cpu/abi.h").read_text()
    return sorted(name for name in used - known if not re.search(rf"\b{name}\b", header))


def test_every_path_exists(pages):
    assert {p.name: m for p in pages if (m := missing_paths(p.inline_code, p.path))} == {}


def test_every_relative_link_resolves(pages):
    assert {p.name: b for p in pages if (b := broken_links(p.prose, p.path))} == {}


def test_every_command_and_option_exists(pages):
    assert {p.name: w for p in pages if (w := wrong_commands(p.text))} == {}


def test_every_environment_variable_exists(pages):
    assert {p.name: u for p in pages if (u := unknown_variables(p.text))} == {}


def test_options_in_the_readme_belong_to_quickstart(pages):
    """The README names options of its first command without repeating the command."""
    readme = next(page for page in pages if page.name == "README.md")
    options = {o for action in subcommands()["quickstart"]._actions for o in action.option_strings}
    named = {code.split()[0] for code in readme.inline_code if code.startswith("--")}
    assert named
    assert named <= options


@pytest.mark.parametrize(
    "found",
    [
        missing_paths(["src/statescan/nothing.py"], ROOT / "README.md"),
        missing_paths(["docs/nowhere/"], ROOT / "README.md"),
        missing_paths(["scripts/nothing --now"], ROOT / "README.md"),
        broken_links("[x](docs/nothing.md)", ROOT / "README.md"),
        broken_links("[x](README.md#no-such-heading)", ROOT / "README.md"),
        unknown_variables("set STATESCAN_NOTHING=1"),
        wrong_commands("```sh\npip install x && statescan nothing\n```"),
        wrong_commands("`statescan backends --nothing`"),
    ],
)
def test_the_checks_can_fail(found):
    assert found != []


def test_the_checks_leave_other_code_alone():
    codes = [
        "torch.nn",
        "a / b",
        "<op>.py",
        "(batch, dim)",
        "tests/packaging/test_wheel.py",
        "docs/",
    ]
    assert missing_paths(codes, ROOT / "README.md") == []
    assert wrong_commands("`statescan.explain` and `statescan --help`") == []
