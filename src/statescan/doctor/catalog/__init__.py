# SPDX-License-Identifier: Apache-2.0
"""Reads the authored data of the doctor: problems, releases, toolchain bounds, patterns.

The data are the JSON files of this folder; no knowledge about installs is written here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from statescan.doctor.model import Command, Fix, Problem, Severity

FOLDER = Path(__file__).parent

LAYERS = (
    *("command", "network", "build-environment", "toolkit", "toolkit-version"),
    *("host-compiler", "headers", "code", "link", "resources", "load", "api", "run"),
)
"""The stages of an install in order: of two errors, that of the earlier layer is the cause."""

PLACEHOLDERS: Mapping[str, str] = {
    "package": "mamba-ssm",
    "force": "MAMBA_FORCE_BUILD",
    "python": "3.11",
    "torch": "2.7.1",
    "cuda": "12.8",
    "cuda_major": "12",
    "cuda_home": "/usr/local/cuda",
    "cuda_label": "nvidia/label/cuda-12.8.1",
    "torch_tag": "cu128",
    "libcuda": "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "sm": "61",
    "file": "FILE",
    "path": "PATH",
    "version": "VERSION",
    "needed": "NEEDED",
    "found": "FOUND",
}
"""What ``{name}`` in a problem's text reads when a page shows it without a machine."""


@cache
def load(name: str) -> Any:
    """The JSON document ``name`` (without suffix) of this folder."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@cache
def problems() -> dict[str, Problem]:
    """Every problem by slug, in the order of the codes."""
    rows = [
        _problem(row)
        for file in sorted((FOLDER / "problems").glob("*.json"))
        for row in json.loads(file.read_text(encoding="utf-8"))
    ]
    return {row.slug: row for row in sorted(rows, key=lambda row: row.code)}


def problem(name: str) -> Problem:
    """The problem of that slug or code; KeyError when there is none."""
    known = problems()
    if name in known:
        return known[name]
    for row in known.values():
        if row.code == name.upper():
            return row
    raise KeyError(name)


def fill(fix: Fix, values: Mapping[str, str]) -> Fix:
    """``fix`` with its ``{name}`` placeholders replaced, by defaults where ``values`` has none."""
    known = _known(values)
    commands = fill_commands(fix.commands, values)
    text, safety = _filled(fix.text, known), _filled(fix.safety, known)
    return replace(fix, text=text, safety=safety, commands=commands)


def fill_commands(commands: Iterable[Command], values: Mapping[str, str]) -> tuple[Command, ...]:
    """Commands with their placeholders replaced, as in ``fill``."""
    known = _known(values)

    def texts(pairs: Mapping[str, str]) -> dict[str, str]:
        return {_filled(name, known): _filled(value, known) for name, value in pairs.items()}

    return tuple(
        _without_other_switches(
            Command(
                tuple(_filled(word, known) for word in command.run),
                *(texts(command.env), texts(command.set), texts(command.prepend)),
                *(command.unset, _filled(command.note, known)),
            )
        )
        for command in commands
    )


def _known(values: Mapping[str, str]) -> dict[str, str]:
    given = {name: value for name, value in values.items() if value}
    return {**PLACEHOLDERS, **_of_cuda(given.get("cuda", "")), **given}


def _filled(line: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        line = line.replace(f"{{{name}}}", value)
    return line


def _without_other_switches(command: Command) -> Command:
    """``command`` without mamba-ssm's variables where it installs causal-conv1d."""
    if not any(word.startswith("causal-conv1d") for word in command.run):
        return command
    env = {name: value for name, value in command.env.items() if not name.startswith("MAMBA_")}
    return replace(command, env=env)


def _of_cuda(version: str) -> dict[str, str]:
    """The values that follow from a CUDA version; nothing for none."""
    if not version:
        return {}
    labels: Mapping[str, str] = load("images")["conda_labels"]
    return {
        "cuda_major": version.partition(".")[0],
        "cuda_label": labels.get(version, f"nvidia/label/cuda-{version}.0"),
        "torch_tag": f"cu{version.replace('.', '')}",
    }


def _problem(row: Mapping[str, Any]) -> Problem:
    fix = row["fix"]
    return Problem(
        code=row["code"],
        slug=row["slug"],
        title=row["title"],
        layer=row["layer"],
        severity=Severity(row["severity"]),
        what=row["what"],
        why=row["why"],
        example=tuple(row["example"]),
        fix=Fix(
            fix["text"],
            tuple(Command.from_json(command) for command in fix.get("commands", ())),
            fix["safe"],
            fix["safety"],
        ),
        looks_like=tuple(row.get("looks_like", ())),
        wrong_advice=tuple(row.get("wrong_advice", ())),
        references=tuple(row.get("references", ())),
        systems=tuple(row.get("systems", ())),
    )
