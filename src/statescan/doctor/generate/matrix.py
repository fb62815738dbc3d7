# SPDX-License-Identifier: Apache-2.0
"""Which torch, Python and CUDA exist together for a package: the best fit, or why there is none.

The table is ``catalog/pins.json``; the originals' releases are asked through ``pairs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statescan.doctor import releases
from statescan.doctor.generate import pairs, reasons, table
from statescan.doctor.generate.choice import number
from statescan.doctor.generate.target import Target
from statescan.errors import ArgumentError

USUAL_CUDA = ("12.8", "12.6", "12.4", "12.1")
"""CUDA 12 before 13, because more drivers serve it; the newest first."""


@dataclass(frozen=True)
class Fit:
    """A torch, a Python and a CUDA that exist together; CUDA is "none" on the CPU."""

    torch: str
    python: str
    cuda: str


class ImpossibleTarget(ArgumentError):  # noqa: N818  (the command's verdict, not a mistake in it)
    """No such environment exists; ``needed`` says what is, ``nearest`` is a target that exists."""

    def __init__(self, reason: str, needed: str, nearest: str) -> None:
        self.reason, self.needed, self.nearest = reason, needed, nearest
        hint = f'Nearest possible: --target "{nearest}"' if nearest else "Nothing near it exists."
        super().__init__(f"{reason}\n{needed}\n{hint}")


def fit(package: str, target: Target) -> Fit:
    """The best existing environment for what is known.

    Raises:
        ImpossibleTarget: What is known does not exist together.
    """
    fits = list(_fits(package, target))
    if not fits:
        raise _impossible(package, target)
    return min(fits, key=lambda found: _preference(package, found, target))


def nearest(package: str, target: Target) -> Fit | None:
    """An existing environment that differs in as few fields and as little as possible."""
    every = list(_fits(package, Target(gpus=target.gpus))) or list(_fits(package, Target()))
    if package != "statescan" and not target.cuda[:1].isdigit():
        # No CUDA is nearer to the CPU than another.
        target = replace(target, cuda="")
    return min(every, key=lambda found: _distance(package, found, target), default=None)


def nearest_text(package: str, target: Target, os: str = "", machine: str = "") -> str:
    """``--target`` text of ``nearest``, on another system if one is named."""
    found = nearest(package, target)
    if found is None:
        return ""
    return Target(
        os=os or target.os,
        machine=machine or target.machine,
        python=found.python,
        torch=found.torch,
        cuda=found.cuda,
        gpus=target.gpus if table.gpus_served(found.cuda, target.gpus) else (),
    ).text()


def _fits(package: str, target: Target) -> Iterator[Fit]:
    minors = [table.row(target.torch)[0]] if target.torch else list(table.known_torch())
    for minor in minors:
        _, entry, _ = table.row(minor)
        pythons = [target.python] if target.python else table.pythons(minor)
        cudas = [target.cuda] if target.cuda else ["none", *entry.get("cuda", [])]
        for python in pythons:
            for cuda in cudas:
                found = Fit(minor, python, cuda)
                if _exists(package, found, target):
                    yield found


def _exists(package: str, found: Fit, target: Target) -> bool:
    _, entry, newer = table.row(found.torch)
    if not entry or not (newer or found.python in table.pythons(found.torch)):
        return False
    least_torch, least_python = table.LEAST.get(package, ("0", "0"))
    old = number(found.torch) < number(least_torch) or number(found.python) < number(least_python)
    if old:
        return False
    if found.cuda == "none" or found.cuda.startswith("rocm"):
        return package == "statescan"
    if not (newer or found.cuda in entry["cuda"]):
        return False
    if not table.gpus_served(found.cuda, target.gpus):
        return False
    return package == "statescan" or bool(
        pairs.choose(package, found.torch, found.python, found.cuda, target.gpus)
    )


def _preference(package: str, found: Fit, target: Target) -> tuple[Any, ...]:
    """Smaller is better: near the recommended torch and Python, a CUDA that the driver serves."""
    best = releases.matrix()[package]
    python = abs(number(found.python)[1] - number(best["python"][1])[1])
    newer = number(found.torch) > number(best["torch"][1])
    torch = tuple(part if newer else -part for part in number(found.torch))
    return (newer, torch, _cuda_rank(found.cuda, target), python)


def _cuda_rank(cuda: str, target: Target) -> tuple[int, int]:
    numbered = cuda != "none" and not cuda.startswith("rocm")
    wants_gpu = bool(target.gpus or target.driver_cuda)
    if not numbered:
        return (2 if wants_gpu else 0, 0)
    if target.driver_cuda and number(cuda) > number(target.driver_cuda):
        # The same major still runs by minor version compatibility; a newer major does not.
        same = number(cuda)[0] == number(target.driver_cuda)[0]
        return (1 if same else 3, number(cuda)[0] * 100 + number(cuda)[1])
    if target.driver_cuda:
        return (0, -(number(cuda)[0] * 100 + number(cuda)[1]))
    usual = USUAL_CUDA.index(cuda) if cuda in USUAL_CUDA else len(USUAL_CUDA)
    return (0 if wants_gpu else 1, usual)


def _distance(package: str, found: Fit, target: Target) -> tuple[Any, ...]:
    steps = (
        _steps(
            tuple(table.known_torch()), target.torch and table.row(target.torch)[0], found.torch
        ),
        _steps(table.all_pythons(), target.python, found.python),
        _steps(table.all_cudas(), target.cuda, found.cuda),
    )
    changed = sum(step > 0 for step in steps)
    return (changed, sum(steps), *_preference(package, found, target))


def _steps(order: Sequence[str], given: str, taken: str) -> int:
    """How far apart two entries of an ordered list are; something outside lies beyond its ends."""
    if not given or given == taken:
        return 0
    if given in order:
        return abs(order.index(given) - order.index(taken))
    before = sum(number(entry) < number(given) for entry in order)
    return abs(before - order.index(taken)) + 1


def _impossible(package: str, target: Target) -> ImpossibleTarget:
    reason, needed = reasons.reason(package, target)
    return ImpossibleTarget(reason, needed, nearest_text(package, target))
