# SPDX-License-Identifier: Apache-2.0
"""The machines that all others are made of by a change or two.

Nothing is wrong with any of them.
"""

from __future__ import annotations

import json

from helpers.machine_parts import (
    RTX_3090,
    RTX_4070,
    Values,
    home,
    install,
    no_driver,
    no_gcc,
    no_toolkit,
    remove,
    use_gcc,
    use_gpu,
    use_toolkit,
    use_torch,
)


def _statescan(site: str) -> Values:
    """A whole statescan in that folder, every backend usable."""
    return {
        "statescan.version": "0.1.0",
        "statescan.native": {"path": f"{site}/statescan/_cpu.so", "isa": "avx2"},
        "statescan.backends": [
            {"name": "cuda", "usable": True, "reason": ""},
            {"name": "cpu", "usable": True, "reason": ""},
            {"name": "torch", "usable": True, "reason": ""},
            {"name": "reference", "usable": True, "reason": ""},
        ],
        "statescan.smoke": {"ok": True, "error": "", "seconds": 3.1},
    }


def linux() -> Values:
    """A workstation with an RTX 3090, torch for CUDA 12.8, its toolkit, and nothing wrong."""
    site = "/home/user/venv/lib/python3.11/site-packages"
    disk = {"path": "/home/user", "free_gb": 412.3}
    values: Values = {
        "system.os": "linux",
        "system.name": "Ubuntu 22.04.5 LTS",
        "system.distribution": {"id": "ubuntu", "like": ["debian"], "version": "22.04"},
        "system.machine": "x86_64",
        "system.libc": {"kind": "glibc", "version": "2.35"},
        "system.wsl": 0,
        "system.container": None,
        "system.ngc": None,
        "system.cores": 16,
        "system.memory": {"total_gb": 62.7, "free_gb": 51.2, "limit_gb": None},
        "system.disks": {
            "tmp": {"path": "/tmp", "free_gb": 412.3},
            "cwd": disk,
            "cache": {"path": "/home/user/.cache", "free_gb": 412.3},
            "site": {"path": site, "free_gb": 412.3},
        },
        "system.encoding": {"preferred": "UTF-8", "utf8_mode": False},
        "system.shell": "bash",
        "python.version": "3.11.9",
        "python.executable": "/home/user/venv/bin/python",
        "python.implementation": "cpython",
        "python.tag": "cp311",
        "python.environment": {"kind": "venv", "prefix": "/home/user/venv"},
        "python.externally_managed": False,
        "python.headers": {"folder": "/usr/include/python3.11", "present": True},
        "python.pip": {"version": "25.1"},
        "python.uv": None,
        "python.conda": None,
        "packages.installed": {},
        "packages.invalid": [],
        "torch.hip": None,
        "torch.location": f"{site}/torch",
        "torch.libraries": {
            name: f"{site}/torch/lib/{name}"
            for name in ("libc10.so", "libc10_cuda.so", "libtorch.so", "libtorch_cpu.so")
        },
        "torch.import": {"ok": True, "error": "", "seconds": 2.4},
        "torch.cuda_available": True,
        "driver.version": "570.133.07",
        "driver.cuda": "12.8",
        "driver.library": "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "driver.link_name": True,
        "driver.amd": None,
        "compiler.msvc": None,
        "compiler.ninja": {"path": "/home/user/venv/bin/ninja", "version": "1.13.0"},
        "compiler.make": {"path": "/usr/bin/make"},
        "libraries.libstdcxx": [
            {
                "path": "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
                "glibcxx": "3.4.30",
                "cxxabi": "1.3.13",
                "via": "system",
            }
        ],
        "libraries.cudart": [],
        "extensions.modules": {},
        "extensions.python": {},
        "extensions.shadows": [],
        "environment.variables": {"HOME": "/home/user", "LANG": "en_US.UTF-8"},
        "environment.path": ["/home/user/venv/bin", "/usr/local/cuda/bin", "/usr/bin", "/bin"],
        "caches.pip_wheels": [],
        "caches.folders": [],
        **_statescan(site),
    }
    install(values, pip="25.1", setuptools="80.9.0", wheel="0.45.1", packaging="25.0")
    install(values, ninja="1.13.0", numpy="2.2.6", statescan="0.1.0")
    use_gpu(values, RTX_3090)
    use_torch(values, "2.7.1+cu128", "12.8", "3.3.1")
    use_toolkit(values, home("/usr/local/cuda", "12.8", ["/usr/local"]), "PATH")
    use_gcc(values, "11.4.0")
    return values


def laptop() -> Values:
    """No NVIDIA GPU, torch for the CPU, no compiler: all that statescan needs."""
    values = linux()
    values |= {"system.name": "Fedora Linux 42", "system.cores": 8}
    values["system.distribution"] = {"id": "fedora", "like": [], "version": "42"}
    values["system.libc"] = {"kind": "glibc", "version": "2.41"}
    values["system.memory"] = {"total_gb": 15.4, "free_gb": 9.8, "limit_gb": None}
    remove(values, "ninja", "wheel", "setuptools", "packaging")
    use_torch(values, "2.7.1+cpu", None, None)
    no_driver(values)
    no_toolkit(values)
    no_gcc(values)
    values |= {"compiler.ninja": None, "compiler.make": None}
    values["python.headers"]["present"] = False
    return values


def conda(values: Values) -> None:
    text = json.dumps(values).replace("/home/user/venv", "/home/user/miniconda3/envs/mamba")
    values |= json.loads(text)
    prefix = "/home/user/miniconda3/envs/mamba"
    values |= {
        "python.environment": {"kind": "conda", "prefix": prefix},
        "python.conda": {
            "version": "24.11.3",
            "path": "/home/user/miniconda3/bin/conda",
            "prefix": prefix,
        },
        "python.headers": {"folder": f"{prefix}/include/python3.11", "present": True},
    }
    values["environment.variables"]["CONDA_PREFIX"] = prefix


def windows() -> Values:
    """Windows 11 with an RTX 4070, CUDA 12.4 and Visual C++ of its time."""
    values = linux()
    site = "C:\\Users\\user\\venv\\Lib\\site-packages"
    text = json.dumps(values).replace(
        "/home/user/venv/lib/python3.11/site-packages", json.dumps(site)[1:-1]
    )
    values = json.loads(text)
    toolkit = "C:\\Program Files\\NVIDIA GPU Computing Toolkit\\CUDA\\v12.4"
    values |= {
        "system.os": "windows",
        "system.name": "Windows 11 23H2",
        "system.shell": "powershell",
        "system.distribution": None,
        "system.machine": "amd64",
        "system.libc": None,
        "system.disks": {
            "tmp": {"path": "C:\\Users\\user\\AppData\\Local\\Temp", "free_gb": 210.4},
            "cwd": {"path": "C:\\Users\\user", "free_gb": 210.4},
            "cache": {"path": "C:\\Users\\user\\AppData\\Local", "free_gb": 210.4},
            "site": {"path": site, "free_gb": 210.4},
        },
        "system.encoding": {"preferred": "cp1252", "utf8_mode": False},
        "python.executable": "C:\\Users\\user\\venv\\Scripts\\python.exe",
        "python.environment": {"kind": "venv", "prefix": "C:\\Users\\user\\venv"},
        "python.headers": {
            "folder": "C:\\Users\\user\\AppData\\Local\\Programs\\Python\\Python311\\include",
            "present": True,
        },
        "driver.library": "C:\\Windows\\System32\\nvcuda.dll",
        "driver.link_name": None,
        "compiler.make": None,
        "compiler.msvc": {
            "version": "19.38",
            "path": "C:\\Program Files\\Microsoft Visual Studio\\2022\\VC\\bin\\cl.exe",
            "sdk": True,
            "prompt": True,
        },
        "libraries.libstdcxx": [],
        "libraries.cudart": [],
        "environment.variables": {"CUDA_PATH": toolkit},
        "environment.path": [f"{toolkit}\\bin", "C:\\Windows\\system32"],
        "torch.libraries": {"c10.dll": f"{site}\\torch\\lib\\c10.dll"},
    }
    values["statescan.native"] = {"path": f"{site}\\statescan\\_cpu.dll", "isa": "avx2"}
    values["torch.location"] = f"{site}\\torch"
    no_gcc(values)
    use_gpu(values, RTX_4070)
    use_torch(values, "2.6.0+cu124", "12.4", None)
    values["libraries.cudart"] = []
    one = home(toolkit, "12.4", ["CUDA_PATH"])
    one["libraries"]["cudart"] = f"{toolkit}\\lib\\x64\\cudart.lib"
    use_toolkit(values, one, "CUDA_PATH")
    values["toolkit.build"]["nvcc"] = f"{toolkit}\\bin\\nvcc.exe"
    return values
