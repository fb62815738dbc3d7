# SPDX-License-Identifier: Apache-2.0
"""Reads the pages once for the tests of this folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Page:
    """One Markdown file: its place, its text, and its code."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def blocks(self, *languages: str) -> list[str]:
        """Contents of the fenced blocks in one of ``languages``."""
        found = re.findall(r"^```(\w*)\n(.*?)^```", self.text, re.MULTILINE | re.DOTALL)
        return [body for language, body in found if language in languages]

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return re.sub(r"^```.*?^```\n", "", self.text, flags=re.MULTILINE | re.DOTALL)

    @property
    def inline_code(self) -> list[str]:
        return [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", self.prose)]


def all_pages() -> list[Page]:
    patterns = ("*.md", "docs/**/*.md", "changelog.d/*.md", "benchmarks/*.md")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return [Page(path, path.read_text(encoding="utf-8")) for path in sorted(paths)]


@pytest.fixture(scope="session")
def pages() -> list[Page]:
    found = all_pages()
    assert {"README.md", "CONTRIBUTING.md", "docs/glossary.md"} <= {page.name for page in found}
    return found
