# SPDX-License-Identifier: Apache-2.0
"""What to type with each written file, as commands: to install from it, and to build after it.

The files show these as comments and the command prints them; no text is laid out here.
"""

from __future__ import annotations

from statescan.doctor.generate.choices import Choices
from statescan.doctor.model import Command


def use(kind: str, choices: Choices, file: str) -> list[Command]:
    """The first step: how the file is used."""
    name = choices.name
    gpus = ("--gpus", "all") if choices.gpu else ()
    first = {
        "lock": [Command(("pip", "install", "-c", file, *_constrained(choices)))],
        "requirements": [Command(("pip", "install", "-r", file))],
        "conda": [
            Command(("conda", "env", "create", "--file", file)),
            Command(("conda", "activate", name)),
        ],
        "dockerfile": [
            Command(("docker", "build", "--tag", name, "--file", file, ".")),
            Command(("docker", "run", "--rm", *gpus, name)),
        ],
        "compose": [Command(("docker", "compose", "--file", file, "run", "--rm", "app"))],
        "ci": [],
    }
    return first[kind]


def after(kind: str, choices: Choices) -> list[Command]:
    """The second step, where one file cannot do all: the builds of the originals."""
    if kind not in ("lock", "requirements", "conda") or not choices.sources:
        return []
    builds = [source.command for source in choices.sources]
    if kind == "conda":
        # conda's compiler sets CC and CXX itself when the environment is activated; its linker
        # looks into lib, where the toolkit's own would be lib64.
        toolkit = Command(
            set={"CUDA_HOME": "$CONDA_PREFIX"}, prepend={"LIBRARY_PATH": "$CONDA_PREFIX/lib"}
        )
        return [toolkit, *builds]
    # torch's build helper hands CC on to nvcc as its host compiler.
    gcc = choices.build.gcc
    return [Command(set={"CC": f"gcc-{gcc}", "CXX": f"g++-{gcc}"}), *builds]


def _constrained(choices: Choices) -> list[str]:
    names = ["torch", *(requirement.split("==")[0] for requirement in choices.extras)]
    return [*names, *(requirement.split("==")[0] for requirement in choices.build.tools)]
