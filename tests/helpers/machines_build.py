# SPDX-License-Identifier: Apache-2.0
"""Machines on which one of the originals is to be built or installed.

What must be found on each is said in ``test_machines.py``.
"""

from __future__ import annotations

import json

from helpers.machine_parts import (
    Values,
    compiler,
    home,
    machine,
    no_gcc,
    no_toolkit,
    no_torch,
    remove,
    use_gcc,
    use_python,
    use_toolkit,
    use_torch,
)
from helpers.machines_base import conda, laptop, linux, windows


@machine
def nvcc_missing() -> Values:
    values = linux()
    no_toolkit(values)
    return values


@machine
def nvcc_off_path() -> Values:
    values = linux()
    no_toolkit(values)
    values["toolkit.homes"] = [home("/opt/cuda-12.8", "12.8", ["/opt"])]
    return values


@machine
def cuda_home_list() -> Values:
    values = linux()
    path = "/usr/local/cuda-12.8:/usr/local/cuda-11.8"
    values["environment.variables"]["CUDA_HOME"] = path
    homes = [home("/usr/local/cuda-11.8", "11.8", ["/usr/local"])]
    homes.append(home("/usr/local/cuda-12.8", "12.8", ["/usr/local"]))
    use_toolkit(values, homes[0], "PATH", homes[1])
    values["toolkit.build"] = {
        "path": path,
        "via": "CUDA_HOME",
        "exists": False,
        "nvcc": None,
        "version": None,
    }
    return values


@machine
def nvcc_10_of_distribution() -> Values:
    values = linux()
    values["system.name"] = "Ubuntu 20.04.6 LTS"
    values["system.distribution"]["version"] = "20.04"
    values["system.libc"]["version"] = "2.31"
    use_gcc(values, "9.4.0")
    one = home("/usr", "10.1", ["/usr"])
    one["headers"]["cuda_bf16.h"] = False
    use_toolkit(values, one, "PATH")
    return values


@machine
def conda_nvcc_without_headers() -> Values:
    values = linux()
    conda(values)
    use_torch(values, "2.5.1+cu124", "12.4", "3.1.0", abi=False, archs=("sm_80", "sm_86", "sm_90"))
    prefix = values["python.environment"]["prefix"]
    use_toolkit(values, home(prefix, "12.8", ["conda"], headers=False), "PATH")
    return values


@machine
def windows_without_msvc() -> Values:
    values = windows()
    values["compiler.msvc"] = None
    return values


@machine
def windows_msvc_too_new() -> Values:
    values = windows()
    toolkit = "C:\\Program Files\\NVIDIA GPU Computing Toolkit\\CUDA\\v12.1"
    use_torch(values, "2.5.1+cu121", "12.1", None, abi=False)
    values["libraries.cudart"] = []
    one = home(toolkit, "12.1", ["CUDA_PATH"])
    use_toolkit(values, one, "CUDA_PATH")
    values["environment.variables"]["CUDA_PATH"] = toolkit
    values["compiler.msvc"] |= {"version": "19.43"}
    values["system.encoding"]["preferred"] = "cp936"
    return values


@machine
def mac_arm64() -> Values:
    values = laptop()
    text = json.dumps(values).replace("/home/user", "/Users/user").replace("_cpu.so", "_cpu.dylib")
    values = json.loads(text)
    clang = compiler("clang", "16.0.0", family="clang")
    values |= {
        "system.os": "macos",
        "system.name": "macOS 15.3",
        "system.machine": "arm64",
        "system.distribution": None,
        "system.libc": None,
        "driver.link_name": None,
        "compiler.c": clang,
        "compiler.cxx": {**clang, "command": "clang++"},
        "libraries.libstdcxx": [],
        "compiler.available": [clang],
        "torch.libraries": {
            "libc10.dylib": "/Users/user/venv/lib/python3.11/site-packages/torch/lib/libc10.dylib"
        },
    }
    use_torch(values, "2.7.1", None, None)
    values["statescan.native"]["isa"] = "neon"
    return values


@machine
def slim_container() -> Values:
    """python:3.11-slim with the GPU passed in, a CUDA torch, and no compiler of any kind."""
    values = linux()
    values |= {"system.container": "docker", "system.name": "Debian GNU/Linux 12 (bookworm)"}
    values["system.distribution"] = {"id": "debian", "like": [], "version": "12"}
    values["system.libc"]["version"] = "2.36"
    values["python.environment"] = {"kind": "system", "prefix": "/usr/local"}
    values["python.headers"]["folder"] = "/usr/local/include/python3.11"
    no_toolkit(values)
    no_gcc(values)
    remove(values, "ninja")
    values |= {"compiler.ninja": None, "compiler.make": None}
    return values


@machine
def musl_alpine() -> Values:
    values = laptop()
    values |= {"system.name": "Alpine Linux v3.21", "system.container": "docker"}
    values["system.distribution"] = {"id": "alpine", "like": [], "version": "3.21.3"}
    values["system.libc"] = {"kind": "musl", "version": "1.2.5"}
    values["libraries.libstdcxx"] = []
    no_torch(values)
    return values


@machine
def python_314() -> Values:
    """A new Python, for which torch is published and no wheel of the originals."""
    values = linux()
    use_python(values, "3.14.0")
    use_torch(values, "2.10.0+cu128", "12.8", "3.6.0")
    return values


@machine
def python_39() -> Values:
    values = linux()
    use_python(values, "3.9.21")
    return values


@machine
def python_315_without_torch() -> Values:
    values = linux()
    use_python(values, "3.15.0")
    no_torch(values)
    return values


@machine
def bare_venv() -> Values:
    values = linux()
    no_torch(values)
    return values


@machine
def two_cudas_wrong_first() -> Values:
    values = linux()
    wrong = home("/usr/local/cuda-11.8", "11.8", ["PATH"])
    use_toolkit(values, wrong, "PATH", home("/usr/local/cuda-12.8", "12.8", ["/usr/local"]))
    right = "/usr/local/cuda-12.8/bin/nvcc"
    values["toolkit.nvcc_on_path"].append({"path": right, "version": "12.8", "real": right})
    use_python(values, "3.14.0")
    use_torch(values, "2.10.0+cu128", "12.8", "3.6.0")
    return values


@machine
def no_disk() -> Values:
    values = python_314()
    values["system.disks"]["tmp"]["free_gb"] = 0.3
    return values


@machine
def little_memory() -> Values:
    values = python_314()
    values["system.memory"] = {"total_gb": 15.5, "free_gb": 11.0, "limit_gb": None}
    return values


@machine
def tiny_memory_container() -> Values:
    values = python_314()
    values["system.container"] = "kubernetes"
    values["system.memory"]["limit_gb"] = 2.0
    return values


@machine
def gcc_14_nvcc_121() -> Values:
    values = linux()
    use_python(values, "3.14.0")
    use_torch(values, "2.5.1+cu121", "12.1", "3.1.0", abi=False, archs=("sm_80", "sm_90"))
    use_toolkit(values, home("/usr/local/cuda", "12.1", ["/usr/local"]), "PATH")
    use_gcc(values, "14.2.0")
    values["compiler.available"].append(compiler("g++-12", "12.4.0"))
    return values


@machine
def centos7_gcc48() -> Values:
    """torch 2.4 of the time of CentOS 7, with the system's compiler."""
    values = linux()
    values |= {"system.name": "CentOS Linux 7 (Core)"}
    values["system.distribution"] = {"id": "centos", "like": ["rhel", "fedora"], "version": "7"}
    values["system.libc"]["version"] = "2.17"
    values["libraries.libstdcxx"][0] |= {"glibcxx": "3.4.19", "path": "/lib64/libstdc++.so.6"}
    use_gcc(values, "4.8.5")
    values["system.machine"] = "x86_64"
    use_torch(values, "2.4.1+cu124", "12.4", "3.0.0", abi=False, archs=("sm_80", "sm_86", "sm_90"))
    use_toolkit(values, home("/usr/local/cuda", "12.4", ["/usr/local"]), "PATH")
    return values


@machine
def skip_build_set() -> Values:
    values = linux()
    values["environment.variables"]["MAMBA_SKIP_CUDA_BUILD"] = "TRUE"
    return values


@machine
def switch_is_1() -> Values:
    values = linux()
    values["environment.variables"] |= {"MAMBA_FORCE_BUILD": "1", "MAMBA_SKIP_CUDA_BUILD": "0"}
    return values


@machine
def stale_wheel_cache() -> Values:
    values = linux()
    file = "mamba_ssm-2.2.2-cp311-cp311-linux_x86_64.whl"
    path = f"/home/user/.cache/pip/wheels/1f/{file}"
    values["caches.pip_wheels"] = [{"file": file, "path": path}]
    return values


@machine
def debian_system_python() -> Values:
    values = linux()
    values |= {
        "python.externally_managed": True,
        "python.executable": "/usr/bin/python3",
        "python.environment": {"kind": "system", "prefix": "/usr"},
    }
    return values


@machine
def uv_venv_without_tools() -> Values:
    values = linux()
    remove(values, "pip", "setuptools", "wheel", "packaging", "ninja")
    values |= {"python.pip": None, "compiler.ninja": None}
    values["python.uv"] = {"version": "0.9.15", "path": "/home/user/.local/bin/uv"}
    values["python.environment"]["kind"] = "uv"
    return values
