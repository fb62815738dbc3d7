# SPDX-License-Identifier: Apache-2.0
"""Makes the catalogue's fixes exact for a machine: its installer, and a pair that fits.

Values of placeholders are filled in by ``base.finding``; no fix is invented here.
"""

from __future__ import annotations

from dataclasses import replace

from statescan.doctor import releases
from statescan.doctor.checks.base import CONV, Question
from statescan.doctor.model import Command, Fix
from statescan.doctor.releases import Release

_PIP = ("python", "-m", "pip")
_NO_OPTION_OF_UV = ("-y", "-f", "-v")


def for_installer(fix: Fix, question: Question) -> Fix:
    """The same with uv's commands, where there is uv and no pip."""
    facts = question.facts
    if facts.get("python.pip") or not facts.get("python.uv"):
        return fix
    return replace(fix, commands=tuple(map(_with_uv, fix.commands)))


def _with_uv(command: Command) -> Command:
    if command.run[:3] != _PIP:
        return command
    words = [word for word in command.run[3:] if word not in _NO_OPTION_OF_UV]
    if words[:2] == ["cache", "remove"]:
        return replace(command, run=("uv", "cache", "clean", *words[2:]))
    return replace(command, run=("uv", "pip", *words))


def convolution_for(mamba: Release, fix: Fix) -> Fix:
    """The install of the newest causal-conv1d that this mamba-ssm calls rightly.

    Args:
        mamba: The installed release.
        fix: Of the catalogue, which has a line for each generation.
    """
    fitting = [
        release
        for release in releases.releases(CONV)
        if release.conv_generation == mamba.conv_generation
    ]
    newest = fitting[-1]
    options = ("--no-build-isolation", "--no-cache-dir", "--no-deps", "--force-reinstall")
    source = f"{CONV}=={newest.version}"
    note = f"takes the {mamba.conv_generation} arguments that mamba-ssm {mamba.version} passes"
    if not newest.sdist_has_sources:
        # Of these only wheels can be installed by name; a build needs the clone.
        address = f"git+https://github.com/Dao-AILab/causal-conv1d@v{newest.version}"
        source = f"{CONV} @ {address}"
    return replace(
        fix,
        text=f"Install causal-conv1d {newest.version}, the newest that fits this mamba-ssm, "
        "and leave torch as it is.",
        commands=(Command((*_PIP, "install", *options, source), note=note),),
    )
