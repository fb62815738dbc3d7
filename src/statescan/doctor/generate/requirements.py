# SPDX-License-Identifier: Apache-2.0
"""Writes ``requirements.txt``: the least that must be pinned, for ``pip install -r``.

A whole environment is ``lockfile``'s matter.
"""

from __future__ import annotations

from statescan.doctor.generate import comments, steps
from statescan.doctor.generate.choices import Choices

FILE = "requirements.txt"

_PURPOSE = "Pinned requirements. In a file, no shell can take the > or [ of a line for its own."


def write(choices: Choices) -> str:
    """The file's text."""
    lines = [*comments.head("requirements", choices, _PURPOSE, FILE), ""]
    lines += [*index(choices), choices.torch, *choices.extras, *choices.build.tools]
    lines += second_step("requirements", choices)
    return "\n".join(lines) + "\n"


def index(choices: Choices) -> list[str]:
    """The option that adds torch's index, if it has one."""
    return [f"--extra-index-url {choices.index}"] if choices.index else []


def second_step(kind: str, choices: Choices) -> list[str]:
    """Why the originals are not among the lines, and what to type for them."""
    commands = steps.after(kind, choices)
    if not commands:
        return []
    text = (
        f"Second step, with nvcc {choices.target.cuda} in CUDA_HOME. The originals cannot stand "
        "among the lines above: their setup.py imports torch before pip has installed any, and in "
        "pip's isolated environment they are built against another torch. No line of a file can "
        "switch the isolation off."
    )
    return ["", *comments.comment(text), *comments.typed(commands)]
