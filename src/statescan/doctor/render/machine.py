# SPDX-License-Identifier: Apache-2.0
"""What facts read as in a line: the system, and for each area of the doctor what was seen there.

Nothing is judged: these lines are the same whether or not something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statescan.doctor.model import Facts

_TOLD = (
    *("CUDA_", "NVCC_", "TORCH_", "MAMBA_", "CAUSAL_", "MAX_JOBS", "LD_", "CC", "CXX"),
    *("STATESCAN_", "TRITON_", "PYTHONPATH", "ROCM_", "HIP_"),
)
"""First letters of the variables that are named; the others are counted."""
_SHOWN = ("torch", "triton", "mamba-ssm", "causal-conv1d", "transformers")


def system(facts: Facts) -> str:
    """The machine in one sentence."""
    parts = [str(facts.get("system.name", facts.get("system.os", "unknown system")))]
    parts.append(str(facts.get("system.machine", "")))
    libc = facts.get("system.libc")
    if libc:
        parts.append(f"{libc['kind']} {libc['version']}")
    if facts.get("system.wsl"):
        parts.append(f"WSL {facts.get('system.wsl')}")
    if facts.get("system.ngc"):
        parts.append(f"NVIDIA's PyTorch container {facts.get('system.ngc')}")
    elif facts.get("system.container"):
        parts.append(f"in a container ({facts.get('system.container')})")
    return ", ".join(part for part in parts if part)


def area(name: str, facts: Facts) -> str:
    """What was seen in an area; empty where its description says as much."""
    write = {
        "environment": _environment,
        "python": _python,
        "packages": _packages,
        "own": _own,
        "abi": _abi,
        "api": _api,
        "gpu": _gpu,
        "triton": _triton,
        "toolkit": _toolkit,
        "compiler": _compiler,
        "resources": _resources,
    }[name]
    return write(facts)


def _environment(facts: Facts) -> str:
    names = sorted(facts.get("environment.variables", {}))
    told = [name for name in names if name.startswith(_TOLD)]
    if not told:
        return "no variable is set that matters to a build"
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    return f"set: {', '.join(told[:5])}{more}"


def _python(facts: Facts) -> str:
    environment = facts.get("python.environment") or {}
    parts = [f"Python {facts.get('python.version', '?')}"]
    if environment.get("kind"):
        parts[0] += f" ({environment['kind']})"
    for tool in ("pip", "uv", "conda"):
        row = facts.get(f"python.{tool}")
        parts += [f"{tool} {row.get('version', '')}".strip()] if row else []
    return ", ".join(parts)


def _packages(facts: Facts) -> str:
    installed = facts.get("packages.installed", {})
    rows = {name: str(installed[name].get("version")) for name in _SHOWN if name in installed}
    version = facts.get("torch.version")
    if version:
        rows["torch"] = str(version)
    if not version:
        rows.pop("torch", None)
    shown = [f"{name} {rows[name]}" for name in _SHOWN if name in rows]
    return ", ".join(shown if version else ["no torch", *shown])


def _own(facts: Facts) -> str:
    parts = [f"statescan {facts.get('statescan.version', '')}".strip()]
    native = facts.get("statescan.native") or {}
    if native.get("isa"):
        parts.append(f"C library for {native['isa']}")
    usable = [row["name"] for row in facts.get("statescan.backends", []) if row.get("usable")]
    if usable:
        parts.append(f"backends {', '.join(usable)}")
    smoke = facts.get("statescan.smoke") or {}
    parts.append("test computation passed" if smoke.get("ok") else _not_run(smoke))
    return ", ".join(parts)


def _not_run(smoke: Mapping[str, Any]) -> str:
    return "test computation failed" if smoke.get("ok") is False else "test computation not run"


def _abi(facts: Facts) -> str:
    modules = facts.get("extensions.modules", {})
    names = [name for name, row in modules.items() if row.get("files")]
    abi = facts.get("torch.cxx11_abi")
    parts = [", ".join(names) or "no compiled module"]
    if abi is not None:
        parts.append(f"torch's C++11 ABI is {str(abi).upper()}")
    first = next(iter(facts.get("libraries.libstdcxx", [])), None)
    if first:
        parts.append(f"libstdc++ up to GLIBCXX_{first.get('glibcxx')}")
    return "; ".join(parts)


def _api(facts: Facts) -> str:
    installed = facts.get("packages.installed", {})
    names = [name for name in ("mamba-ssm", "causal-conv1d", "transformers") if name in installed]
    return ", ".join(f"{name} {installed[name].get('version')}" for name in names)


def _gpu(facts: Facts) -> str:
    gpus = facts.get("driver.gpus") or facts.get("torch.devices") or []
    amd = facts.get("driver.amd") or {}
    if not gpus and amd.get("gpus"):
        return f"AMD {', '.join(amd['gpus'])}, ROCm {amd.get('rocm') or 'unknown'}"
    if not gpus:
        return "no NVIDIA GPU"
    names: dict[str, int] = {}
    for gpu in gpus:
        text = f"{gpu['name']} (compute capability {gpu['capability']})"
        names[text] = names.get(text, 0) + 1
    shown = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
    driver = facts.get("driver.version")
    serves = f" for CUDA up to {facts.get('driver.cuda')}" if facts.get("driver.cuda") else ""
    return f"{shown}; driver {driver}{serves}" if driver else shown


def _triton(facts: Facts) -> str:
    installed = facts.get("packages.installed", {})
    names = [name for name in installed if name.removeprefix("pytorch-").startswith("triton")]
    version = f"Triton {installed[names[0]].get('version')}" if names else "no Triton"
    return f"{version}, C compiler {_program(facts.get('compiler.c'))}"


def _toolkit(facts: Facts) -> str:
    build = facts.get("toolkit.build") or {}
    if build.get("nvcc"):
        return f"nvcc {build.get('version')} of {build['path']} (by {build.get('via')})"
    homes = [str(home["path"]) for home in facts.get("toolkit.homes", [])]
    return f"no nvcc in use; toolkits: {', '.join(homes)}" if homes else "no toolkit"


def _compiler(facts: Facts) -> str:
    if facts.get("system.os") == "windows":
        row = facts.get("compiler.msvc")
        return f"Visual C++ {row['version']}" if row else "no Visual C++"
    headers = facts.get("python.headers") or {}
    ninja = "with ninja" if facts.get("compiler.ninja") else "no ninja"
    python_h = "Python.h is there" if headers.get("present") else "no Python.h"
    return f"C++ compiler {_program(facts.get('compiler.cxx'))}, {ninja}, {python_h}"


def _program(row: Mapping[str, Any] | None) -> str:
    if not row or not row.get("path"):
        return "none"
    return f"{row['command']} {row.get('version') or ''}".strip()


def _resources(facts: Facts) -> str:
    memory = facts.get("system.memory") or {}
    disks = facts.get("system.disks") or {}
    parts = [f"{facts.get('system.cores')} cores"] if facts.get("system.cores") else []
    if memory.get("free_gb") is not None:
        parts.append(f"{memory['free_gb']} of {memory.get('total_gb')} GB of memory free")
    tmp = disks.get("tmp") or {}
    if tmp.get("free_gb") is not None:
        parts.append(f"{tmp['free_gb']} GB free in {tmp['path']}")
    return ", ".join(parts)
