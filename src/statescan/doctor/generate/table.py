# SPDX-License-Identifier: Apache-2.0
"""The table of torch's builds, ``catalog/pins.json``, as questions: which Python, CUDA and GPU.

What fits what for a package is ``matrix``'s matter.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from statescan.doctor import catalog, releases
from statescan.doctor.generate.choice import number

LEAST = {"statescan": ("2.4", "3.10")}
"""The oldest torch and Python of a package that says so itself."""


def known_torch() -> dict[str, dict[str, Any]]:
    """Torch minors to their last patch release and the CUDA of their builds, oldest first."""
    known: dict[str, dict[str, Any]] = catalog.load("pins")["torch"]
    return known


def row(torch: str) -> tuple[str, dict[str, Any], bool]:
    """The row for a torch: its minor, what is known, and whether it is newer than all that is."""
    known = known_torch()
    minor = ".".join(torch.split(".")[:2])
    newest = max(known, key=number)
    if number(minor) > number(newest):
        return minor, {**known[newest], "patch": f"{minor}.0"}, True
    return minor, known.get(minor, {}), False


@cache
def pythons(torch: str) -> tuple[str, ...]:
    """Python minors that a torch has wheels for, oldest first."""
    return tuple(releases.torch_pythons(torch))


@cache
def all_pythons() -> tuple[str, ...]:
    """Python minors that any torch of the table has wheels for."""
    return tuple(sorted({one for torch in known_torch() for one in pythons(torch)}, key=number))


@cache
def all_cudas() -> tuple[str, ...]:
    """Every CUDA that torch was built for, oldest first, after "none"."""
    every = {cuda for entry in known_torch().values() for cuda in entry["cuda"]}
    return ("none", *sorted(every, key=number))


def gpu_bounds(cuda: str) -> tuple[str, str] | None:
    """The least and greatest compute capability of torch's builds; None where unknown."""
    bounds = catalog.load("pins")["torch_gpus"].get(cuda)
    return None if bounds is None else (bounds[0], bounds[1])


def gpus_served(cuda: str, gpus: tuple[str, ...]) -> bool:
    """Whether torch's builds for a CUDA run on the GPUs; unknown builds are not judged."""
    bounds = gpu_bounds(cuda)
    if bounds is None:
        return True
    return all(number(bounds[0]) <= number(gpu) <= number(bounds[1]) for gpu in gpus)
