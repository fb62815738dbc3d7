# SPDX-License-Identifier: Apache-2.0
"""Machines that differ by GPU, driver, system or processor.

What must be found on each is said in ``test_machines.py``.
"""

from __future__ import annotations

import json

from helpers.machine_parts import (
    A100,
    CHECK_OLD,
    GTX_1080_TI,
    H100,
    MIDDLE_ARCHS,
    RTX_4070,
    RTX_5090,
    V100,
    Values,
    add_package,
    gpu,
    home,
    install,
    machine,
    no_driver,
    no_toolkit,
    originals,
    use_gcc,
    use_gpu,
    use_python,
    use_toolkit,
    use_torch,
)
from helpers.machines_base import laptop, linux


@machine
def torch_cpu_on_gpu() -> Values:
    values = linux()
    use_torch(values, "2.7.1+cpu", None, "3.3.1")
    values |= {"torch.cuda_available": False, "torch.devices": []}
    values["statescan.backends"][0] |= {"usable": False, "reason": "torch is built without CUDA"}
    return values


@machine
def laptop_with_cuda_torch() -> Values:
    """PyPI's torch for Linux is a CUDA build also where there is no GPU."""
    values = laptop()
    use_torch(values, "2.7.1+cu126", "12.6", "3.3.1")
    values["torch.arch_list"] = []
    return values


@machine
def v100_source_build() -> Values:
    """torch of CUDA 12.6 runs on it; the newest release no longer does."""
    values = linux()
    archs = ("sm_50", "sm_60", "sm_70", "sm_80", "sm_86", "sm_90")
    use_torch(values, "2.9.1+cu126", "12.6", "3.5.1", archs=archs)
    use_python(values, "3.14.0")
    use_toolkit(values, home("/usr/local/cuda", "12.6", ["/usr/local"]), "PATH")
    use_gpu(values, V100)
    return values


@machine
def rtx_5090_nvcc_124() -> Values:
    """torch knows the GPU, and the toolkit does not."""
    values = linux()
    use_python(values, "3.14.0")
    use_torch(values, "2.10.0+cu128", "12.8", "3.6.0")
    use_toolkit(values, home("/usr/local/cuda", "12.4", ["/usr/local"]), "PATH")
    use_gpu(values, RTX_5090)
    return values


@machine
def v100_on_new_build() -> Values:
    values = linux()
    use_torch(values, "2.7.1+cu126", "12.6", "3.3.1", archs=("sm_50", "sm_70", "sm_80", "sm_90"))
    use_gpu(values, V100)
    originals(values, archs=("75", "80", "87", "90"))
    add_package(values, "mamba_ssm", selective_scan="no kernel image is available")
    return values


@machine
def v100_on_new_torch() -> Values:
    values = linux()
    use_gpu(values, V100)
    return values


@machine
def rtx_5090_on_old_torch() -> Values:
    values = linux()
    use_torch(
        *(values, "2.5.1+cu124", "12.4", "3.1.0"),
        abi=False,
        archs=("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_90"),
    )
    use_gpu(values, RTX_5090)
    originals(values, "2.2.4", "1.5.0", archs=MIDDLE_ARCHS, asks=(CHECK_OLD,))
    return values


@machine
def gtx_1080_ti() -> Values:
    values = linux()
    archs = ("sm_50", "sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_90")
    use_torch(values, "2.7.1+cu126", "12.6", "3.3.1", archs=archs)
    use_toolkit(values, home("/usr/local/cuda", "12.6", ["/usr/local"]), "PATH")
    use_gpu(values, GTX_1080_TI)
    values["environment.variables"]["TORCH_CUDA_ARCH_LIST"] = "6.1"
    return values


def wsl(values: Values) -> None:
    values |= {"system.wsl": 2, "driver.library": "/usr/lib/wsl/lib/libcuda.so.1"}
    values["system.memory"] = {"total_gb": 31.2, "free_gb": 29.0, "limit_gb": None}
    values["system.cores"] = 12
    use_gpu(values, RTX_4070)


@machine
def wsl2_healthy() -> Values:
    values = linux()
    wsl(values)
    originals(values)
    return values


@machine
def wsl2_without_driver() -> Values:
    values = linux()
    wsl(values)
    no_driver(values)
    originals(values)
    return values


def amd(values: Values) -> None:
    no_driver(values)
    no_toolkit(values)
    values["driver.amd"] = {"rocm": "6.3.0", "gpus": ["gfx942"]}


@machine
def rocm() -> Values:
    values = linux()
    use_torch(values, "2.7.1+rocm6.3", None, None)
    install(values, **{"pytorch-triton-rocm": "3.3.1"})
    amd(values)
    values |= {"torch.hip": "6.3.42131", "torch.cuda_available": True}
    return values


@machine
def rocm_with_cuda_torch() -> Values:
    values = linux()
    amd(values)
    return values


@machine
def ngc_container() -> Values:
    values = linux()
    use_python(values, "3.12.3")
    values |= {
        "system.container": "docker",
        "system.ngc": "25.06",
        "system.cores": 64,
        "system.name": "Ubuntu 24.04.2 LTS",
        "python.externally_managed": True,
        "python.environment": {"kind": "system", "prefix": "/usr"},
        "system.memory": {"total_gb": 503.5, "free_gb": 460.0, "limit_gb": None},
    }
    values["system.distribution"]["version"] = "24.04"
    values["system.libc"]["version"] = "2.39"
    use_gcc(values, "13.3.0")
    use_gpu(values, *[H100] * 8)
    values |= {"driver.version": "575.57.08", "driver.cuda": "12.9"}
    use_torch(values, "2.8.0a0+5228986c39.nv25.06", "12.9", None)
    install(values, **{"pytorch-triton": "3.3.0+git96316ce52.nvinternal"})
    use_toolkit(values, home("/usr/local/cuda", "12.9", ["CUDA_HOME"]), "CUDA_HOME")
    values["environment.variables"] |= {
        "CUDA_HOME": "/usr/local/cuda",
        "NVIDIA_PRODUCT_NAME": "PyTorch",
        "TORCH_CUDA_ARCH_LIST": "7.5 8.0 8.6 9.0 10.0 12.0+PTX",
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "LD_LIBRARY_PATH": "/usr/local/cuda/compat/lib:/usr/local/nvidia/lib64",
    }
    values["libraries.libstdcxx"][0]["glibcxx"] = "3.4.33"
    return values


@machine
def gh200_aarch64() -> Values:
    values = linux()
    values |= {"system.machine": "aarch64", "system.cores": 72}
    values["system.memory"] = {"total_gb": 479.0, "free_gb": 430.5, "limit_gb": None}
    text = json.dumps(values).replace("x86_64-linux-gnu", "aarch64-linux-gnu")
    values = json.loads(text)
    values["statescan.native"]["isa"] = "neon"
    use_gpu(values, gpu("NVIDIA GH200 480GB", "9.0", 95.6))
    return values


@machine
def aarch64_with_x86_module() -> Values:
    values = gh200_aarch64()
    originals(values)
    for row in values["extensions.modules"].values():
        row |= {"importable": False, "error": "ModuleNotFoundError"}
    for package in ("mamba_ssm", "causal_conv1d"):
        add_package(values, package, error="ModuleNotFoundError: No module named")
    return values


@machine
def driver_too_old() -> Values:
    values = linux()
    values |= {"driver.version": "470.256.02", "driver.cuda": "11.4"}
    values |= {"torch.cuda_available": False, "torch.devices": []}
    use_gpu(values, A100)
    values["torch.devices"] = []
    values["statescan.backends"][0] |= {"usable": False, "reason": "the driver is too old"}
    originals(values)
    return values


@machine
def container_without_gpus() -> Values:
    values = linux()
    values["system.container"] = "docker"
    originals(values)
    no_driver(values)
    return values
