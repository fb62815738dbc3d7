# SPDX-License-Identifier: Apache-2.0
"""The cpu backend: kernels in C with AVX-512, AVX2, NEON or plain vectors, on torch's threads.

Only the description of the backend is here; the ops are in the modules beside it, their kernels in
``kernels/cpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from statescan import settings
from statescan.backends import native
from statescan.backends.base import ALL_OPS, YES, Backend, OpRequest, Support

_PLANNED = frozenset(
    (
        *("selective_state_update", "causal_conv1d_update"),
        *("mamba_step", "mamba_stack", "vector_linear"),
    )
)
_DTYPES = frozenset(("float32", "bfloat16", "float16"))


class CpuBackend(Backend):
    """Runs real-valued calls on CPU tensors in float32, bfloat16 and float16."""

    name = "cpu"
    modules: Mapping[str, str] = ALL_OPS

    def availability(self) -> Support:
        """Whether the C library is there; if not, why."""
        found = native.status()
        if found.library is not None:
            return YES
        # Whoever sets STATESCAN_PURE knows; any other loss of the library is worth a warning.
        return Support(False, found.reason, limit=settings.pure())

    def supports(self, request: OpRequest) -> Support:
        """Whether the kernels offer the device, the dtypes and the kind of numbers."""
        if request.device != "cpu":
            reason = f"it runs on CPU tensors, these are on {request.device}"
            return Support(False, reason, limit=True)
        if "complex" in request.flags:
            return Support(False, "its kernels have no complex states", limit=True)
        for name, dtype in request.dtypes.items():
            if dtype not in _DTYPES:
                return Support(
                    False, f"its kernels compute in float32, and {name} is {dtype}", True
                )
        return super().supports(request)

    def plan(self, op: str) -> Callable[..., Any] | None:
        """The decode ops have one, and so have a mixer, a stack of them and a linear layer."""
        if op not in _PLANNED:
            return None
        module = import_module(f"statescan.backends.{self.name}.{op}")
        found: Callable[..., Any] = getattr(module, f"{op}_plan")
        return found
