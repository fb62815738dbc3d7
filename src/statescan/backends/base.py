# SPDX-License-Identifier: Apache-2.0
"""What a backend must tell and offer: availability, support with a reason, and its functions.

No choosing between backends here (``dispatch``), and no kernels (``backends/<name>``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class OpRequest:
    """What one call asks for, without its tensors.

    Attributes:
        op: Name of the op, ``selective_scan`` for both of its directions.
        device: Device type, ``cpu`` or ``cuda``.
        dtypes: Names of the dtypes of the floating-point inputs, by argument name.
        dims: Sizes by canonical name (``batch``, ``dim``, ``seqlen``, ``dstate``, ...).
        flags: Names of the options that are in use, such as ``reverse`` or ``seq_idx``.
    """

    op: str
    device: str
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Support:
    """Answer to "can you?": yes, or no with one clause that says why.

    ``limit`` marks a refusal by a documented limit (float64, complex): it shows in ``explain``
    but is no cause for a warning, since nothing is broken.
    """

    ok: bool
    reason: str = ""
    limit: bool = False


YES = Support(True)


class Backend(ABC):
    """One way to run the ops.

    Attributes:
        name: The word for ``backend=`` and STATESCAN_BACKEND.
        automatic: Whether ``auto`` may choose it.
        modules: For each op, the module under ``statescan.backends.<name>`` with its functions.
    """

    name: str
    automatic: bool = True
    modules: Mapping[str, str]

    @abstractmethod
    def availability(self) -> Support:
        """Whether this backend can run anything on this machine, and why not."""

    def supports(self, request: OpRequest) -> Support:
        """Whether this backend can run the call described by ``request``, and why not."""
        if request.op not in self.modules:
            return Support(False, f"it does not offer {request.op}")
        return YES

    def function(self, op: str, direction: str) -> Callable[..., Any]:
        """The function that runs ``op`` in ``direction`` ("fwd", "bwd" or "" for updates)."""
        module = import_module(f"statescan.backends.{self.name}.{self.modules[op]}")
        entry = f"{op}_{direction}" if direction else op
        function: Callable[..., Any] = getattr(module, entry)
        return function

    def plan(self, op: str) -> Callable[..., Any] | None:
        """A function that makes a plan for calls of a decode op, where this backend has one.

        It takes what ``function(op, "")`` takes and returns a function of the tensors that were
        given, in the order of the op, that runs calls of the same form without looking at them
        again.
        """
        return None

    def preparing(self) -> AbstractContextManager[None]:
        """In this block and thread, calls load the code that they need and compute nothing.

        Where there is no code to load, as here, calls just run.
        """
        return nullcontext()


ALL_OPS = {
    "selective_scan": "selective_scan",
    "selective_state_update": "selective_state_update",
    "causal_conv1d": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d_update",
    "mamba_inner": "mamba_inner",
}
"""The ops of this version and their file stem, for backends that offer all of them."""
