# SPDX-License-Identifier: Apache-2.0
"""Parts of recorded machines: torch, toolkits, compilers, modules, by their facts.

Whole machines are in ``machines_base`` and the modules of its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from statescan.doctor.facts.names import NAMES
from statescan.doctor.symbols import generation, lookup, report

Values = dict[str, Any]

CHECK_NEW = (
    "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
)
CHECK_OLD = "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"
SET_DEVICE_INT = "_ZN3c104cuda9SetDeviceEi"
SET_DEVICE_CHAR = "_ZN3c104cuda9SetDeviceEa"

NEW_ARCHS = ("75", "80", "87", "90", "100", "120")
MIDDLE_ARCHS = ("53", "62", "70", "72", "80", "87", "90")


def gpu(name: str, capability: str, memory_gb: float) -> Values:
    return {"name": name, "capability": capability, "memory_gb": memory_gb}


H100 = gpu("NVIDIA H100 80GB HBM3", "9.0", 79.6)
A100 = gpu("NVIDIA A100-SXM4-40GB", "8.0", 39.4)
RTX_3090 = gpu("NVIDIA GeForce RTX 3090", "8.6", 23.7)
RTX_4070 = gpu("NVIDIA GeForce RTX 4070 Laptop GPU", "8.9", 8.0)
RTX_5090 = gpu("NVIDIA GeForce RTX 5090", "12.0", 31.4)
V100 = gpu("Tesla V100-SXM2-32GB", "7.0", 31.7)
GTX_1080_TI = gpu("NVIDIA GeForce GTX 1080 Ti", "6.1", 10.9)


def compiler(command: str, version: str, folder: str = "/usr/bin", family: str = "gcc") -> Values:
    path = f"{folder}/{command}"
    return {"command": command, "path": path, "family": family, "version": version}


def missing(command: str) -> Values:
    return {"command": command, "path": None, "family": None, "version": None}


def home(path: str, version: str, via: Sequence[str], *, headers: bool = True) -> Values:
    names = ("cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h", "cusparse.h")
    names += ("cublas_v2.h", "cusolverDn.h")
    cudart = f"{path}/lib64/libcudart.so" if headers else None
    return {
        "path": path,
        "version": version,
        "via": list(via),
        "nvcc": True,
        "headers": dict.fromkeys(names, headers),
        "libraries": {"cudart": cudart},
    }


def use_toolkit(values: Values, one: Values, via: str, *others: Values) -> None:
    """A build takes that toolkit; the others are there as well."""
    nvcc = f"{one['path']}/bin/nvcc"
    values["toolkit.homes"] = [one, *others]
    values["toolkit.nvcc_on_path"] = [{"path": nvcc, "version": one["version"], "real": nvcc}]
    values["toolkit.build"] = {
        "path": one["path"],
        "via": via,
        "exists": True,
        "nvcc": nvcc,
        "version": one["version"],
    }


def no_toolkit(values: Values) -> None:
    values["toolkit.homes"], values["toolkit.nvcc_on_path"] = [], []
    values["toolkit.build"] = None


def use_gcc(values: Values, version: str, folder: str = "/usr/bin") -> None:
    c, cxx = compiler("gcc", version, folder), compiler("g++", version, folder)
    values["compiler.c"], values["compiler.cxx"] = c, {**cxx, "command": "c++"}
    values["compiler.cuda_host"], values["compiler.available"] = cxx, [c, cxx]


def no_gcc(values: Values) -> None:
    values["compiler.c"], values["compiler.cxx"] = missing("gcc"), missing("c++")
    values["compiler.cuda_host"], values["compiler.available"] = missing("g++"), []


def distribution(version: str, values: Values, **more: Any) -> Values:
    site = values["system.disks"]["site"]["path"]
    return {
        "version": version,
        "location": site,
        "installer": "pip",
        "wheel_tags": ["py3-none-any"],
        "editable": False,
        "direct_url": None,
        **more,
    }


def install(values: Values, **versions: str) -> None:
    for name, version in versions.items():
        values["packages.installed"][name.replace("_", "-")] = distribution(version, values)


def remove(values: Values, *names: str) -> None:
    for name in names:
        values["packages.installed"].pop(name, None)


def binary(
    module: str,
    values: Values,
    *,
    archs: Sequence[str],
    asks: Sequence[str] = (CHECK_NEW,),
    lacks: Sequence[str] = (),
    cudart: str = "12",
    glibc: str = "2.32",
    glibcxx: str = "3.4.30",
    machine: str = "x86_64",
) -> Values:
    """The report of an extension module that lies in site-packages."""
    tag = values["python.tag"].removeprefix("cp")
    name = f"{module}.cpython-{tag}-{machine}-linux-gnu.so"
    path = f"{values['system.disks']['site']['path']}/{name}"
    symbols = [*asks, *lacks]
    needed = [f"libcudart.so.{cudart}", "libc10.so", "libtorch.so", "libtorch_cpu.so"]
    needed += ["libtorch_python.so", "libc10_cuda.so", "libstdc++.so.6", "libc.so.6"]
    seen = [row["soname"] for row in values["libraries.cudart"]]
    return {
        **report.damaged(Path(path), ""),
        "format": "elf",
        "kind": "shared object",
        "machine": machine,
        "bits": 64,
        "byte_order": "little",
        "needed": needed,
        "undefined_torch": symbols,
        "version_needs": {
            "libc.so.6": ["GLIBC_2.2.5", f"GLIBC_{glibc}"],
            "libstdc++.so.6": ["GLIBCXX_3.4", f"GLIBCXX_{glibcxx}"],
        },
        "undefined_count": 120 + len(symbols),
        "links_torch": True,
        "cudart": cudart,
        "cxx11_abi": generation.cxx11_abi(symbols),
        "torch_generation": generation.generation(symbols),
        "cuda_archs": {"cubin": [f"sm_{arch}" for arch in archs], "ptx": []},
        "libraries": [
            {
                "name": one,
                "needed_by": "",
                "via": "",
                "path": "",
                "status": "missing"
                if one.startswith("libcudart") and one not in seen
                else "after-torch",
            }
            for one in needed
        ],
        "missing": {
            "torch": lookup.described(lacks),
            "other": [],
            "searched_torch": True,
            "complete": True,
        },
        "versions_missing": None,
    }


def add_module(values: Values, module: str, found: Values, error: str = "") -> None:
    """An extension module on disk, and what its import in a child process gave."""
    file = {"path": found["path"], "binary": found, "in_site_packages": True}
    row = {"files": [file], "importable": not error, "error": error}
    values["extensions.modules"][module] = row


def add_package(values: Values, module: str, error: str = "", **usable: str) -> None:
    site = values["system.disks"]["site"]["path"]
    values["extensions.python"][module] = {
        "importable": not error,
        "error": error,
        "file": f"{site}/{module}/__init__.py",
        "usable": usable,
    }


def originals(
    values: Values,
    mamba: str = "2.3.1",
    conv: str = "1.6.1",
    *,
    archs: Sequence[str] = NEW_ARCHS,
    **built: Any,
) -> None:
    """Both originals, installed and, unless ``built`` says otherwise, working."""
    tag = f"{values['python.tag']}-{values['python.tag']}-linux_x86_64"
    for name, version, module, package, op in (
        ("mamba-ssm", mamba, "selective_scan_cuda", "mamba_ssm", "selective_scan"),
        ("causal-conv1d", conv, "causal_conv1d_cuda", "causal_conv1d", "causal_conv1d"),
    ):
        row = distribution(version, values, wheel_tags=[tag])
        values["packages.installed"][name] = row
        add_module(values, module, binary(module, values, archs=archs, **built))
        add_package(values, package, **{op: "ok"})
    install(values, einops="0.8.1", transformers="4.57.1")


def break_modules(values: Values, error: str) -> None:
    """Imports of both modules fail, and with them those of their packages."""
    for module, row in values["extensions.modules"].items():
        row |= {"importable": False, "error": f"ImportError: {row['files'][0]['path']}: {error}"}
        package = {"selective_scan_cuda": "mamba_ssm", "causal_conv1d_cuda": "causal_conv1d"}
        add_package(values, package[module], error=row["error"])


def no_driver(values: Values) -> None:
    values |= {
        "driver.version": None,
        "driver.cuda": None,
        "driver.library": None,
        "driver.link_name": False,
        "driver.gpus": [],
        "torch.devices": [],
        "torch.cuda_available": False,
    }
    values["statescan.backends"][0] |= {"usable": False, "reason": "there is no CUDA driver"}


def use_gpu(values: Values, *gpus: Values) -> None:
    values["driver.gpus"], values["torch.devices"] = list(gpus), [dict(one) for one in gpus]


def use_torch(
    values: Values,
    version: str,
    cuda: str | None,
    triton: str | None,
    *,
    abi: bool = True,
    archs: Sequence[str] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
) -> None:
    site = values["system.disks"]["site"]["path"]
    values |= {
        "torch.version": version,
        "torch.cuda": cuda,
        "torch.cxx11_abi": abi,
        "torch.arch_list": list(archs) if cuda else [],
    }
    remove(values, "triton")
    install(values, torch=version, **({"triton": triton} if triton else {}))
    major = cuda.split(".")[0] if cuda else None
    path = f"{site}/nvidia/cuda_runtime/lib/libcudart.so.{major}"
    soname = {"11": "libcudart.so.11.0"}.get(str(major), f"libcudart.so.{major}")
    row = {"soname": soname, "path": path, "via": "torch wheel"}
    values["libraries.cudart"] = [row] if cuda else []


def no_torch(values: Values) -> None:
    remove(values, "torch", "triton", "numpy")
    for name in NAMES:
        if name.startswith("torch."):
            values[name] = None
    values |= {"libraries.cudart": [], "torch.devices": [], "torch.arch_list": []}
    values |= {"torch.libraries": {}, "statescan.backends": None, "statescan.smoke": None}


def use_python(values: Values, version: str) -> None:
    short = ".".join(version.split(".")[:2])
    old = values["system.disks"]["site"]["path"]
    new = old.replace("python3.11", f"python{short}")
    text = json.dumps(values).replace(old, new)
    values |= json.loads(text)
    values |= {"python.version": version, "python.tag": f"cp{short.replace('.', '')}"}
    folder = values["python.headers"]["folder"].replace("python3.11", f"python{short}")
    values["python.headers"] = {"folder": folder, "present": True}


MACHINES: dict[str, Callable[[], Values]] = {}


def machine(build: Callable[[], Values]) -> Callable[[], Values]:
    """Register a machine under the name of its function."""
    MACHINES[build.__name__.replace("_", "-")] = build
    return build
