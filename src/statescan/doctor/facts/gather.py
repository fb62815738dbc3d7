# SPDX-License-Identifier: Apache-2.0
"""Runs every probe and returns the facts of this machine, one for each name of the contract.

No probe is here, and nothing that is found stops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from statescan.doctor.facts import (
    children,
    compiler,
    environment,
    extensions,
    interpreter,
    libraries,
    nvidia,
    own,
    packages,
    probe,
    pytorch,
    system,
    toolkits,
)
from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.names import NAMES
from statescan.doctor.model import Fact, Facts

AREAS = (
    *(system, interpreter, packages, pytorch, nvidia, toolkits, compiler, libraries),
    *(extensions, environment, own),
)
"""The modules whose import registers their probes."""


def gather(import_torch: bool = True, smoke: bool = True) -> Facts:
    """Every fact of this machine.

    Args:
        import_torch: Import torch, the originals and statescan's backends, in child processes.
        smoke: Also compute something in them.
    """
    return look(Machine.here(), import_torch, smoke)


def gather_static() -> Facts:
    """What files and tools tell, without the child processes that import torch."""
    return look(Machine.here(), import_torch=False, smoke=False)


def look(machine: Machine, import_torch: bool, smoke: bool) -> Facts:
    """The same of a given machine."""
    if not import_torch:
        return _whole(probe.run(probe.PROBES, machine), "not tried")
    has_torch = pytorch.folder(machine) is not None
    with ThreadPoolExecutor(2, "statescan-child") as pool:
        own_answer = pool.submit(children.own, machine, smoke, has_torch)
        # Without any torch its import tells nothing that the files do not.
        answer = pool.submit(children.torch_and_originals, machine, smoke) if has_torch else None
        found = probe.run(probe.PROBES, machine)
        found |= _told(own_answer.result, "statescan.native")
        if answer is not None:
            ready, seen = answer, dict(found)
            found |= _told(lambda: children.with_answers(seen, ready.result()), "torch.import")
    return _whole(found, "not tried" if has_torch else "not tried without torch")


def _told(read: Callable[[], dict[str, Fact]], name: str) -> dict[str, Fact]:
    """What a child told; what goes wrong in reading it stays in one fact."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  (whatever it is, the other facts are of use)
        return {name: Fact(name, None, "a child process", f"{type(error).__name__}: {error}")}


def _whole(found: Mapping[str, Fact], reason: str) -> Facts:
    """Every name of the contract, whether or not something looked for it."""
    rest = [name for name in NAMES if name not in found]
    return Facts({**found, **children.unseen(rest, reason)})
