# SPDX-License-Identifier: Apache-2.0
"""A program for a process of its own: imports what may fail, hang or crash, and tells each step.

Started by ``children`` with its text, never imported: the process has no statescan in it unless a
step asks for it. Each line of its output is a JSON list: ["begin", step] or [step, result].
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

_MOST_TEXT = 4000


def main() -> None:
    """Run the steps that the first argument lists, with the ``sys.path`` of the second."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    steps, folders = json.loads(sys.argv[-2]), json.loads(sys.argv[-1])
    sys.path[:] = folders
    for step in steps:
        answers.write(json.dumps(["begin", step]) + "\n")
        answers.flush()
        kind, _, name = step.partition(":")
        try:
            result = STEPS[kind](name)
        except BaseException as error:  # noqa: BLE001  (an import may even exit)
            result = {"ok": False, "error": _said(error)}
        answers.write(json.dumps([step, result]) + "\n")
        answers.flush()
    answers.flush()
    # Some libraries crash while they are unloaded, after everything was told.
    os._exit(0)


def _said(error: BaseException) -> str:
    """The exception as Python prints it, after the last line of code that was reached."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = [f"{frame.filename}:{frame.lineno}" for frame in last]
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return "\n".join([*where, text])[-_MOST_TEXT:]


def torch_import(_: str) -> dict[str, Any]:
    """``import torch``, timed."""
    start = time.perf_counter()
    importlib.import_module("torch")
    return {"ok": True, "error": "", "seconds": round(time.perf_counter() - start, 2)}


def torch_devices(_: str) -> dict[str, Any]:
    """What torch says about its GPU code and the GPUs."""
    torch = importlib.import_module("torch")
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    answer: dict[str, Any] = {
        "version": torch.__version__,
        "archs": (flags() or "").split() if flags is not None else [],
        "available": bool(torch.cuda.is_available()),
        "devices": [],
        "gfx": [],
        "problem": "",
    }
    try:
        for index in range(torch.cuda.device_count() if answer["available"] else 0):
            found = torch.cuda.get_device_properties(index)
            if torch.version.hip:
                answer["gfx"].append(str(found.gcnArchName).partition(":")[0])
                continue
            row = {"name": found.name, "capability": f"{found.major}.{found.minor}"}
            answer["devices"].append({**row, "memory_gb": round(found.total_memory / 2**30, 1)})
    except Exception as error:  # noqa: BLE001  (the rest of the answer is of use)
        answer["problem"] = _said(error)
    return answer


def import_module(name: str) -> dict[str, Any]:
    """Import one module; its file tells which one it was."""
    module = importlib.import_module(name)
    return {"ok": True, "error": "", "file": getattr(module, "__file__", None)}


def use_scan(_: str) -> dict[str, str]:
    """A small scan of mamba-ssm against its own reference."""
    torch = importlib.import_module("torch")
    scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    torch.manual_seed(0)
    u, delta = torch.randn(2, 64, 128, device="cuda"), torch.rand(2, 64, 128, device="cuda")
    state = -torch.rand(64, 16, device="cuda")
    b, c = torch.randn(2, 16, 128, device="cuda"), torch.randn(2, 16, 128, device="cuda")
    wanted = scan.selective_scan_ref(u, delta, state, b, c)
    torch.testing.assert_close(
        scan.selective_scan_fn(u, delta, state, b, c), wanted, rtol=1e-3, atol=2e-3
    )
    return {"outcome": "ok"}


def use_conv(_: str) -> dict[str, str]:
    """A small convolution of causal-conv1d against torch's."""
    torch = importlib.import_module("torch")
    conv = importlib.import_module("causal_conv1d")
    torch.manual_seed(0)
    x = torch.randn(2, 64, 128, device="cuda")
    weight, bias = torch.randn(64, 4, device="cuda"), torch.randn(64, device="cuda")
    # In float64, because cuDNN may compute float32 with fewer bits.
    padded = torch.nn.functional.pad(x.double(), (3, 0))
    wanted = torch.nn.functional.conv1d(
        padded, weight.double()[:, None], bias.double(), groups=64
    ).float()
    found = conv.causal_conv1d_fn(x, weight, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)
    return {"outcome": "ok"}


def own_native(_: str) -> dict[str, Any]:
    """statescan's C library, which needs no torch."""
    status = importlib.import_module("statescan.backends.native").status()
    if status.library is None:
        return {"error": status.reason}
    return {"path": str(status.library.path), "isa": status.library.isa}


def own_backends(_: str) -> dict[str, Any]:
    """Which backends can run here, and why the others cannot."""
    rows = []
    for backend in importlib.import_module("statescan.dispatch").all_backends():
        support = backend.availability()
        rows.append({"name": backend.name, "usable": support.ok, "reason": support.reason})
    return {"rows": rows}


def own_smoke(_: str) -> dict[str, Any]:
    """A scan and its gradient against the reference, on the device that would be used."""
    start = time.perf_counter()
    torch = importlib.import_module("torch")
    statescan = importlib.import_module("statescan")
    reference = importlib.import_module("statescan.reference")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(2, 16, 32, device=device, requires_grad=True)
    dt, a = torch.rand(2, 16, 32, device=device), -torch.rand(16, 8, device=device)
    b, c = torch.randn(2, 8, 32, device=device), torch.randn(2, 8, 32, device=device)
    found = statescan.selective_scan(x, dt, a, b, c)
    wanted = reference.selective_scan_ref(x, dt, a, b, c)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)
    gradients = [torch.autograd.grad(one.square().sum(), x)[0] for one in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)
    return {"ok": True, "error": "", "seconds": round(time.perf_counter() - start, 2)}


def nvml(_: str) -> dict[str, Any]:
    """The driver by NVIDIA's management library, whatever programs may see of its GPUs."""
    library = importlib.import_module("pynvml")
    library.nvmlInit()
    cuda = library.nvmlSystemGetCudaDriverVersion_v2()
    rows = []
    for index in range(library.nvmlDeviceGetCount()):
        device = library.nvmlDeviceGetHandleByIndex(index)
        major, minor = library.nvmlDeviceGetCudaComputeCapability(device)
        name = library.nvmlDeviceGetName(device)
        size = library.nvmlDeviceGetMemoryInfo(device).total
        row = {"name": _text(name), "capability": f"{major}.{minor}"}
        rows.append({**row, "memory_gb": round(size / 2**30, 1)})
    version = _text(library.nvmlSystemGetDriverVersion())
    return {"ok": True, "version": version, "cuda": _cuda(cuda), "gpus": rows}


def driver(_: str) -> dict[str, Any]:
    """The driver by the library that programs use; it does not tell its own version."""
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    number = ctypes.c_int()
    _call(library.cuDriverGetVersion, ctypes.byref(number))
    cuda = _cuda(number.value)
    code = library.cuInit(0)
    if code == 100:  # CUDA_ERROR_NO_DEVICE
        return {"ok": True, "version": None, "cuda": cuda, "gpus": []}
    if code:
        return {"ok": False, "error": f"cuInit ends with error {code}", "cuda": cuda}
    _call(library.cuDeviceGetCount, ctypes.byref(number))
    rows = [_device(library, index) for index in range(number.value)]
    return {"ok": True, "version": None, "cuda": cuda, "gpus": rows}


def _device(library: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, part, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    _call(library.cuDeviceGet, ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    _call(library.cuDeviceGetName, name, 256, device)
    numbers = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        _call(library.cuDeviceGetAttribute, ctypes.byref(part), attribute, device)
        numbers.append(str(part.value))
    _call(library.cuDeviceTotalMem_v2, ctypes.byref(size), device)
    row = {"name": _text(name.value), "capability": ".".join(numbers)}
    return {**row, "memory_gb": round(size.value / 2**30, 1)}


def _call(function: Callable[..., int], *arguments: Any) -> None:
    code = function(*arguments)
    if code:
        raise OSError(f"a call of the driver ends with error {code}")


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


STEPS: dict[str, Callable[[str], dict[str, Any]]] = {
    "torch": torch_import,
    "devices": torch_devices,
    "import": import_module,
    "scan": use_scan,
    "conv": use_conv,
    "native": own_native,
    "backends": own_backends,
    "smoke": own_smoke,
    "nvml": nvml,
    "driver": driver,
}

if __name__ == "__main__":
    main()
