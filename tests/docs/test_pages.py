# SPDX-License-Identifier: Apache-2.0
"""The examples of the pages run, generated pages are current, and nothing is left undocumented."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import statescan
from statescan import settings
from statescan.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
RUNNABLE = ("README.md", "docs/guides/*.md", "docs/concepts/*.md")
EXAMPLES = sorted(
    page
    for pattern in RUNNABLE
    for page in ROOT.glob(pattern)
    if "```python\n" in page.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_examples_run(page, pages, tmp_path, monkeypatch, capsys):
    """The blocks of a page run in order in one namespace, and every printed truth is True."""
    monkeypatch.chdir(tmp_path)
    blocks = list(next(p for p in pages if p.path == page).blocks("python"))
    if any("compat.install()" in block for block in blocks):
        printed = run_alone("\n".join(blocks), tmp_path)
    else:
        torch.manual_seed(0)
        namespace: dict[str, object] = {"__name__": "__example__"}
        for block in blocks:
            exec(compile(block, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
    assert printed, "an example shows something"
    assert "False" not in printed


def run_alone(code: str, folder: Path) -> str:
    """What the code prints in an interpreter of its own: serving names is for a whole process."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_example_is_short():
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 16


def test_readme_has_the_two_commands_each_in_a_block_of_its_own(pages):
    readme = next(page for page in pages if page.name == "README.md")
    assert [block.strip() for block in readme.blocks("sh")] == [
        'pip install ".[models]" && statescan quickstart',
        'pip install ".[test]" && pytest',
    ]


def test_ci_takes_the_test_command_from_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    command = re.search(r"readme_command\(\) \{.*?^\}", script, re.MULTILINE | re.DOTALL)
    assert command is not None
    done = subprocess.run(
        ["bash", "-c", f"{command.group()}\nreadme_command"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == 'pip install ".[test]" && pytest', done.stderr


def test_generated_pages_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_every_command_is_documented():
    page = (ROOT / "docs/reference/cli.md").read_text()
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                assert f"## `statescan {name}`\n" in page
                for option in (o for a in parser._actions for o in a.option_strings):
                    assert option in page or option in ("-h", "--help"), f"{name} {option}"


def test_every_variable_and_public_function_is_documented():
    environment = (ROOT / "docs/reference/environment.md").read_text()
    api = (ROOT / "docs/reference/api.md").read_text()
    assert all(variable.name in environment for variable in settings.VARIABLES)
    functions = [n for n in statescan.__all__ if callable(getattr(statescan, n))]
    assert functions
    assert all(f"### `{name}`\n" in api for name in functions)


def test_every_page_is_two_steps_from_the_readme(pages):
    by_name = {page.name: page for page in pages}

    def linked(page) -> set[str]:
        targets = re.findall(r"\]\(([^)#\s]+)", page.prose)
        files = {(page.path.parent / t).resolve() for t in targets if "://" not in t}
        return {f.relative_to(ROOT).as_posix() for f in files if f.suffix == ".md"}

    first = linked(by_name["README.md"])
    second = {name for start in first for name in linked(by_name[start])}
    unreached = set(by_name) - first - second - {"README.md", "docs/design/TEMPLATE.md"}
    assert {name for name in unreached if not name.startswith("changelog.d/")} == set()


def test_design_records_follow_the_template():
    headings = re.findall(r"^## .+$", (ROOT / "docs/design/TEMPLATE.md").read_text(), re.MULTILINE)
    assert headings
    for record in sorted((ROOT / "docs/design").glob("[0-9]*.md")):
        text = record.read_text()
        assert re.match(rf"# {record.name[:4]}: \S", text), record.name
        assert "- Status: " in text
        assert re.findall(r"^## .+$", text, re.MULTILINE) == headings, record.name


def test_changelog_fragments_are_named_by_issue_and_kind():
    for fragment in (ROOT / "changelog.d").iterdir():
        if fragment.name != "README.md":
            assert re.fullmatch(r"\d+\.(added|changed|fixed|removed)\.md", fragment.name)
            assert fragment.read_text().startswith("- ")


def test_glossary_names_the_arguments_of_the_public_functions():
    """Every argument has a row or is explained by its own docstring section in the API page."""
    glossary = (ROOT / "docs/glossary.md").read_text()
    for name in ("batch", "dim", "seqlen", "dstate", "ngroups", "width", "state_len", "num_seqs"):
        assert f"`{name}`" in glossary
    for name in ("x", "dt", "A", "B", "C", "D", "z", "seq_idx", "cu_seqlens", "initial_states"):
        assert f"`{name}`" in glossary
