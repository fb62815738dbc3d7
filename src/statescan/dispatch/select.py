# SPDX-License-Identifier: Apache-2.0
"""Chooses a call's backend: argument, ``use_backend``, STATESCAN_BACKEND, then the order of asking.

Only "auto" may move on to the next backend; a forced one that cannot run raises with its reason.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from statescan import settings
from statescan.backends.base import Backend, OpRequest, Support
from statescan.dispatch import registry
from statescan.errors import ArgumentError, BackendUnavailableError

AUTO = "auto"

_log = logging.getLogger("statescan.dispatch")
_forced: ContextVar[str] = ContextVar("statescan_backend", default=AUTO)
_lock = threading.Lock()
_told: set[tuple[str, ...]] = set()


class BackendFallbackWarning(UserWarning):
    """A faster backend that is normally present cannot run; the message says why."""


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op in this block (and thread) on one backend, unless a call names another.

    Args:
        name: "auto" or the name of a backend, see ``statescan backends``.

    Raises:
        ArgumentError: no backend has that name.
    """
    if name != AUTO:
        registry.backend_named(name, "statescan.use_backend")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_name() -> str:
    """The backend that ``use_backend`` asks for in this context, or "auto"."""
    return _forced.get()


def wanted(argument: str) -> tuple[str, str]:
    """The backend asked for and who asked: ("auto", "") when nobody did."""
    if not isinstance(argument, str):
        raise ArgumentError(
            f"backend is {argument!r}.\nIt must be a name such as 'auto' or 'torch'.\n"
            "`statescan backends` lists the names."
        )
    if argument != AUTO:
        return argument, "the argument backend="
    forced = _forced.get()
    if forced != AUTO:
        return forced, "statescan.use_backend"
    return settings.backend(), "the environment variable STATESCAN_BACKEND"


def answer(backend: Backend, request: OpRequest) -> Support:
    """Availability first, then support: the one answer of a backend to a request."""
    available = backend.availability()
    return available if not available.ok else backend.supports(request)


Refusals = list[tuple[str, Support]]
"""Names and answers of the faster backends that cannot run a call."""


def select(argument: str, request: OpRequest) -> Backend:
    """The backend that is about to run ``request``; logs and warns about the choice.

    Args:
        argument: The call's ``backend=``.
        request: The call without its tensors.

    Raises:
        BackendUnavailableError: a forced backend, or every backend, refuses; with the reasons.
        ArgumentError: no backend has that name.
    """
    backend, refused = choose(argument, request)
    _tell(backend, request, refused)
    return backend


def choose(argument: str, request: OpRequest) -> tuple[Backend, Refusals]:
    """What ``select`` would answer, without a word to anybody."""
    name, source = wanted(argument)
    if name != AUTO:
        return _forced_backend(name, source, request), []
    refused: Refusals = []
    for backend in registry.all_backends():
        if not backend.automatic:
            continue
        support = answer(backend, request)
        if support.ok:
            return backend, refused
        refused.append((backend.name, support))
    reasons = "\n".join(f"  {name}: {support.reason}" for name, support in refused[:4])
    raise BackendUnavailableError(
        f"{request.op}: no backend can run this call.\n{reasons}\n"
        "Change the call so that one of them can, or force backend='reference'."
    )


def _forced_backend(name: str, source: str, request: OpRequest) -> Backend:
    backend = registry.backend_named(name, source)
    support = answer(backend, request)
    if not support.ok:
        raise BackendUnavailableError(
            f"{request.op}: backend '{name}' was asked for by {source}, and cannot run this call:\n"
            f"{support.reason}.\n"
            "Choose another backend (`statescan backends`) or leave the choice to 'auto'."
        )
    return backend


def _tell(backend: Backend, request: OpRequest, refused: Refusals) -> None:
    """Log a decision the first time it is taken; warn once for each broken faster backend."""
    decision = (request.op, request.device, backend.name, *sorted(request.flags))
    if decision not in _told:
        with _lock:
            _told.add(decision)
        _log.info("%s on %s runs on backend %s", request.op, request.device, backend.name)
    for name, support in refused:
        key = ("warned", name, support.reason)
        if support.limit or key in _told:
            continue
        with _lock:
            _told.add(key)
        warnings.warn(
            f"statescan: {request.op} runs on the slower backend '{backend.name}', "
            f"because '{name}' cannot: {support.reason}",
            BackendFallbackWarning,
            stacklevel=2,
        )
