# SPDX-License-Identifier: Apache-2.0
"""Writes ``constraints.txt``: a version for every package that is known, for ``pip install -c``.

Installs nothing by itself, and holds no hash: nothing is downloaded to compute one.
"""

from __future__ import annotations

import re

from statescan.doctor.generate import comments, requirements
from statescan.doctor.generate.choices import Choices

FILE = "constraints.txt"

_PURPOSE = "Lock: exact versions for pip's -c. It installs nothing; it holds installs to these."
_HASHES = (
    "No hashes: a hash belongs to a file, and no file was downloaded to write this. With network: "
    "uv pip compile --generate-hashes requirements.txt -c constraints.txt"
)
_WHOLE = "Every distribution of the environment has a line."
_PART = (
    "Only the packages that decide whether the install works are known without network; what they "
    "pull in is not. To lock all: install once, then write the lock on that machine."
)
_INSTALLERS = frozenset(("pip", "uv"))


def write(choices: Choices) -> str:
    """The file's text."""
    scope = _WHOLE if choices.target.installed else _PART
    lines = comments.head("lock", choices, _PURPOSE, FILE)
    lines += ["#", *comments.comment(_HASHES), "#", *comments.comment(scope), ""]
    lines += requirements.index(choices)
    chosen = _chosen(choices)
    lines += [f"{name}=={version}" for name, version in sorted(chosen.items())]
    rest = _rest(choices, chosen)
    if rest:
        lines += ["", *comments.comment("The rest of the environment, as it is installed:"), *rest]
    lines += requirements.second_step("lock", choices)
    return "\n".join(lines) + "\n"


def _chosen(choices: Choices) -> dict[str, str]:
    every = [choices.torch, *choices.extras, *choices.build.tools]
    pins = dict(requirement.split("==") for requirement in every)
    return pins | {source.package: source.version for source in choices.sources}


def _rest(choices: Choices, chosen: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for name, version in sorted(choices.target.installed.items()):
        normal = re.sub(r"[-_.]+", "-", name).lower()
        if normal in chosen or normal in _INSTALLERS:
            continue
        if version is None:
            why = "is installed from a folder or a URL, which no index serves, so it has no pin"
            lines += comments.comment(f"{name} {why}.")
        else:
            lines.append(f"{name}=={version}")
    return lines
