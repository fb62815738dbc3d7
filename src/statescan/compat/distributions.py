# SPDX-License-Identifier: Apache-2.0
"""Metadata of the distributions whose names are served, for ``importlib.metadata``.

Programs ask there for versions before they import; nothing is written to disk.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection, Iterator
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from statescan.compat import tree


class ServedDistribution(Distribution):
    """A distribution without files: a name, a version, and the modules that it brings."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """METADATA, top_level.txt and INSTALLER; None for the rest."""
        if filename in ("METADATA", "PKG-INFO"):
            return (
                "Metadata-Version: 2.1\n"
                f"Name: {self._name}\nVersion: {tree.VERSIONS[self._name]}\n"
                "Summary: served by statescan\n"
            )
        if filename == "top_level.txt":
            return "\n".join(tree.DISTRIBUTIONS[self._name]) + "\n"
        return "statescan\n" if filename == "INSTALLER" else None

    def locate_file(self, path: Any) -> Any:
        """Where a file would lie; there is none."""
        return Path(__file__).parent / str(path)


def served_distributions(
    modules: Collection[str], name: str | None
) -> Iterator[importlib.metadata.Distribution]:
    """Distributions of the served top-level ``modules``; only the one asked for if ``name``."""
    asked = None if name is None else re.sub(r"[-_.]+", "-", name).lower()
    for distribution, tops in tree.DISTRIBUTIONS.items():
        if asked in (None, distribution) and any(top in modules for top in tops):
            yield ServedDistribution(distribution)
