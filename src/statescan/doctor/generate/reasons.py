# SPDX-License-Identifier: Apache-2.0
"""Says what does not fit with what in a target for which nothing exists.

Only words: that nothing exists was found by ``matrix``.
"""

from __future__ import annotations

from collections.abc import Collection

from statescan.doctor.generate import pairs, table
from statescan.doctor.generate.choice import number
from statescan.doctor.generate.target import Target

Reason = tuple[str, str]
"""What does not fit, and what is needed."""


def reason(package: str, target: Target) -> Reason:
    """The plainest of the conflicts."""
    torch = table.row(target.torch)[0] if target.torch else ""
    return (
        _too_old(package, torch, target.python)
        or _without_cuda(package, target.cuda)
        or _python_of_torch(torch, target.python)
        or _cuda_of_torch(torch, target.cuda)
        or _gpu(target)
        or _python_and_cuda(target.python, target.cuda)
        or _release(package, target)
    )


def _too_old(package: str, torch: str, python: str) -> Reason | None:
    least_torch, least_python = table.LEAST.get(package, ("0", "0"))
    if torch and number(torch) < number(least_torch):
        return f"{package} does not run with torch {torch}.", f"It needs torch {least_torch} on."
    if python and number(python) < number(least_python):
        return f"{package} does not run with Python {python}.", f"It needs {least_python} on."
    if torch and not table.row(torch)[1]:
        known = _torches(table.known_torch())
        return f"torch {torch} is not in the table of builds.", f"It begins with {known}."
    return None


def _without_cuda(package: str, cuda: str) -> Reason | None:
    if package == "statescan" or not (cuda == "none" or cuda.startswith("rocm")):
        return None
    build = "the CPU" if cuda == "none" else cuda
    return (
        f"{package} has CUDA kernels only, which a torch for {build} cannot load.",
        "It needs an NVIDIA GPU and a CUDA build of torch; statescan needs neither.",
    )


def _python_of_torch(torch: str, python: str) -> Reason | None:
    if not torch or not python or python in table.pythons(torch):
        return None
    having = [known for known in table.known_torch() if python in table.pythons(known)]
    return (
        f"torch {torch} has no wheels for Python {python}.",
        f"It has Python {_span(table.pythons(torch))}; Python {python} has {_torches(having)}.",
    )


def _cuda_of_torch(torch: str, cuda: str) -> Reason | None:
    if not cuda[:1].isdigit():
        return None
    if cuda not in table.all_cudas():
        builds = ", ".join(table.all_cudas()[1:])
        return f"No torch is built for CUDA {cuda}.", f"There are builds for CUDA {builds}."
    if not torch or cuda in table.row(torch)[1]["cuda"]:
        return None
    return (
        f"torch {torch} was never built for CUDA {cuda}.",
        f"It has CUDA {', '.join(table.row(torch)[1]['cuda'])}; "
        f"CUDA {cuda} has {_torches(_with_cuda(cuda))}.",
    )


def _gpu(target: Target) -> Reason | None:
    bounds = table.gpu_bounds(target.cuda)
    if bounds is None or table.gpus_served(target.cuda, target.gpus):
        return None
    gpus = ", ".join(target.gpus)
    return (
        f"torch's builds for CUDA {target.cuda} do not run on compute capability {gpus}.",
        f"They run from {bounds[0]} to {bounds[1]}.",
    )


def _python_and_cuda(python: str, cuda: str) -> Reason | None:
    if not python or not cuda[:1].isdigit():
        return None
    with_python = [known for known in table.known_torch() if python in table.pythons(known)]
    if set(with_python) & set(_with_cuda(cuda)):
        return None
    having = f"Python {python} has {_torches(with_python)}"
    return (
        f"No torch has both Python {python} and CUDA {cuda}.",
        f"{having}, CUDA {cuda} has {_torches(_with_cuda(cuda))}.",
    )


def _release(package: str, target: Target) -> Reason:
    needed = "The GPU must be one that a build of this torch serves."
    if package != "statescan":
        least = pairs.least_python(package)
        needed = f"Those that can be built need Python {least} or newer, and an nvcc with the GPU."
    return f"No release of {package} fits {target.text() or 'this machine'}.", needed


def _with_cuda(cuda: str) -> list[str]:
    return [known for known, entry in table.known_torch().items() if cuda in entry["cuda"]]


def _torches(having: Collection[str]) -> str:
    return f"torch {_span(having)}" if having else "no torch"


def _span(entries: Collection[str]) -> str:
    ordered = sorted(entries, key=number)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
