# SPDX-License-Identifier: Apache-2.0
"""Writes ``environment.yml``: an environment for conda or mamba, in two steps for the originals.

PyTorch itself comes through pip: its conda channel ended with torch 2.5.
"""

from __future__ import annotations

from statescan.doctor import catalog
from statescan.doctor.generate import comments, requirements
from statescan.doctor.generate.choices import Choices

FILE = "environment.yml"

_PIP = "PyTorch's own conda channel ended with torch 2.5, so torch comes from its pip index."
_TOOLKIT = "nvcc, headers and libraries of torch's CUDA; torch's wheels bring only what runs."
_COMPILER = "A host compiler that this nvcc accepts; without a version conda takes the newest."
_DEFAULTS = "Without nodefaults conda may mix in packages that another compiler built."


def write(choices: Choices) -> str:
    """The file's text."""
    lines = comments.head("conda", choices, "Environment for conda, mamba or micromamba.", FILE)
    lines += ["", f"name: {choices.name}", "channels:", *_channels(choices)]
    lines += ["dependencies:", f"  - python={choices.target.python}", "  - pip"]
    if choices.sources:
        lines += _toolchain(choices)
    lines += [*comments.comment(_PIP, "  "), "  - pip:"]
    pip = [
        *requirements.index(choices),
        *(choices.torch, *choices.extras, *choices.build.tools),
    ]
    lines += [f"      - {line}" for line in pip]
    lines += requirements.second_step("conda", choices)
    return "\n".join(lines) + "\n"


def _label(choices: Choices) -> str:
    known = catalog.load("images")["conda_labels"]
    return str(known.get(choices.target.cuda, f"nvidia/label/cuda-{choices.target.cuda}.0"))


def _channels(choices: Choices) -> list[str]:
    toolkit = [f"  - {_label(choices)}"] if choices.sources else []
    return [*toolkit, "  - conda-forge", *comments.comment(_DEFAULTS, "  "), "  - nodefaults"]


def _toolchain(choices: Choices) -> list[str]:
    system = "linux-aarch64" if choices.target.machine == "aarch64" else "linux-64"
    return [
        *comments.comment(_TOOLKIT, "  "),
        f"  - {_label(choices)}::cuda-toolkit",
        *comments.comment(_COMPILER, "  "),
        f"  - gxx_{system}={choices.build.gcc}",
    ]
