# SPDX-License-Identifier: Apache-2.0
"""The ordered list of backends; the first that can run a call runs it.

A new backend is one line here and one folder in ``statescan.backends``. No choosing here.
"""

from __future__ import annotations

from statescan.backends.base import Backend
from statescan.backends.cpu import CpuBackend
from statescan.backends.cuda import CudaBackend
from statescan.backends.reference import ReferenceBackend
from statescan.backends.torch import TorchBackend
from statescan.errors import ArgumentError

_BACKENDS: tuple[Backend, ...] = (
    CpuBackend(),
    CudaBackend(),
    TorchBackend(),
    ReferenceBackend(),
)


def all_backends() -> tuple[Backend, ...]:
    """Every backend, in the order in which ``auto`` asks them."""
    return _BACKENDS


def backend_named(name: str, source: str = "") -> Backend:
    """The backend of that name.

    Args:
        name: Its name.
        source: Who asked for it, for the message.

    Raises:
        ArgumentError: there is none; the message names those that there are.
    """
    for backend in all_backends():
        if backend.name == name:
            return backend
    known = ", ".join(backend.name for backend in all_backends())
    asked = f", asked for by {source}," if source else ""
    raise ArgumentError(
        f"backend {name!r}{asked} is not known.\n"
        f"It must be 'auto' or one of: {known}.\n"
        "`statescan backends` lists them and says which can run here."
    )
