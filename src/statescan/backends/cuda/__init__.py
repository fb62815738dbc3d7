# SPDX-License-Identifier: Apache-2.0
"""The cuda backend: kernels for NVIDIA GPUs, compiled beforehand and launched through the driver.

Only the description of the backend is here; the ops are in the modules beside it, their kernels in
``kernels/cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib import import_module
from typing import Any

from statescan.backends.base import ALL_OPS, YES, Backend, OpRequest, Support
from statescan.backends.cuda import cubins, driver, nvrtc
from statescan.backends.cuda.tables.selective_state_update import MOST_STATES

_DTYPES = frozenset(("float32", "bfloat16", "float16"))
_OLDEST = (7, 0)
_PLANNED = frozenset(("selective_state_update", "causal_conv1d_update", "mamba_step"))


class CudaBackend(Backend):
    """Runs real-valued calls on NVIDIA GPUs in float32, bfloat16 and float16."""

    name = "cuda"
    modules: Mapping[str, str] = ALL_OPS
    _code: Support | None = None

    def availability(self) -> Support:
        """Whether torch and the driver see a GPU; if not, why. Initialises nothing."""
        if driver.forked():
            return Support(False, driver.FORKED)
        return _machine()

    def supports(self, request: OpRequest) -> Support:
        """Whether the kernels offer the device, the dtypes and the kind of numbers."""
        if request.device != "cuda":
            return _elsewhere(request.device)
        if "complex" in request.flags:
            return Support(False, "its kernels have no complex states", limit=True)
        for name, dtype in request.dtypes.items():
            if dtype not in _DTYPES:
                return Support(
                    False, f"its kernels compute in float32, and {name} is {dtype}", True
                )
        if request.op == "selective_state_update" and request.dims.get("dstate", 0) > MOST_STATES:
            return Support(False, f"its kernel takes dstate up to {MOST_STATES}", limit=True)
        if self._code is None or not self._code.ok:
            self._code = _code_for_devices()
        return super().supports(request) if self._code.ok else self._code

    def plan(self, op: str) -> Callable[..., Any] | None:
        """The decode ops have one, and so has a mixer's step."""
        if op not in _PLANNED:
            return None
        module = import_module(f"statescan.backends.{self.name}.{op}")
        found: Callable[..., Any] = getattr(module, f"{op}_plan")
        return found

    def preparing(self) -> AbstractContextManager[None]:
        """Launches in this block load their instances and do nothing more."""
        prepare = import_module("statescan.backends.cuda.prepare")
        block: AbstractContextManager[None] = prepare.preparing()
        return block


@lru_cache(maxsize=16)
def _elsewhere(device: str) -> Support:
    """The answer to calls on other devices, of which there are many."""
    return Support(False, f"it runs on CUDA tensors, these are on {device}", limit=True)


@lru_cache(maxsize=1)
def _machine() -> Support:
    """What does not change while the process runs. No GPU is no fault, so nobody is warned."""
    import torch

    if torch.version.cuda is None:
        return Support(False, "this torch is built without CUDA", limit=True)
    if not driver.is_installed():
        return Support(False, "there is no NVIDIA driver on this machine", limit=True)
    # Asks NVML, so that a process which forks later may still do so.
    if torch.cuda.device_count() == 0:
        return Support(False, "torch sees no CUDA device", limit=True)
    return YES


def _code_for_devices() -> Support:
    """Whether any GPU of this machine can be served; launches on another one raise."""
    import torch

    # `explain` may ask about calls that nobody makes; a call with CUDA tensors has initialised it.
    if not torch.cuda.is_initialized():
        return YES
    devices = range(torch.cuda.device_count())
    answers = [_code_for(torch.cuda.get_device_capability(index)) for index in devices]
    return next((answer for answer in answers if answer.ok), answers[0])


@lru_cache(maxsize=16)
def _code_for(capability: tuple[int, int]) -> Support:
    """Whether there is code for such a GPU, or something to make it with."""
    major, minor = capability
    if capability < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        reason = f"its kernels need compute capability {oldest}, this GPU has {major}.{minor}"
        return Support(False, reason, limit=True)
    if cubins.serves(capability):
        return YES
    compiler = nvrtc.status()
    if compiler.compiler is not None:
        return YES
    return Support(
        False,
        f"this install has no kernels for compute capability {major}.{minor} in {cubins.FOLDER}, "
        f"and {compiler.reason}",
    )
