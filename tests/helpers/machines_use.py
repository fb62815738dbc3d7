# SPDX-License-Identifier: Apache-2.0
"""Machines with both originals installed, whole or broken, and with a broken statescan or torch.

What must be found on each is said in ``test_machines.py``.
"""

from __future__ import annotations

from helpers.machine_parts import (
    CHECK_NEW,
    CHECK_OLD,
    MIDDLE_ARCHS,
    NEW_ARCHS,
    SET_DEVICE_INT,
    Values,
    add_module,
    add_package,
    binary,
    break_modules,
    install,
    machine,
    no_toolkit,
    originals,
    remove,
    use_torch,
)
from helpers.machines_base import conda, laptop, linux
from helpers.machines_build import slim_container


@machine
def healthy_gpu() -> Values:
    values = linux()
    originals(values)
    return values


@machine
def healthy_cpu_laptop() -> Values:
    return laptop()


@machine
def torch_upgraded() -> Values:
    """Built for torch 2.2, and torch is 2.7 now."""
    values = linux()
    no_toolkit(values)
    originals(
        *(values, "2.2.2", "1.4.0"),
        archs=MIDDLE_ARCHS,
        asks=(),
        lacks=(SET_DEVICE_INT,),
    )
    install(values, transformers="4.44.2")
    break_modules(values, f"undefined symbol: {SET_DEVICE_INT}")
    return values


@machine
def cxx11_abi_old_torch() -> Values:
    values = linux()
    use_torch(values, "2.5.1+cu124", "12.4", "3.1.0", abi=False, archs=("sm_80", "sm_90"))
    originals(values, "2.2.4", "1.5.0", archs=MIDDLE_ARCHS, asks=(), lacks=(CHECK_NEW,))
    break_modules(values, f"undefined symbol: {CHECK_NEW}")
    return values


@machine
def slim_container_running() -> Values:
    """The same with both originals copied in as wheels: they load, and Triton finds no gcc."""
    values = slim_container()
    originals(values)
    add_package(values, "mamba_ssm", selective_scan="ok", layer_norm="Failed to find C compiler")
    return values


@machine
def libstdcxx_old_in_conda() -> Values:
    values = linux()
    conda(values)
    originals(values, glibcxx="3.4.32")
    path = f"{values['python.environment']['prefix']}/lib/libstdc++.so.6"
    first = {"path": path, "glibcxx": "3.4.29", "cxxabi": "1.3.13", "via": "conda"}
    values["libraries.libstdcxx"].insert(0, first)
    break_modules(values, f"{path}: version `GLIBCXX_3.4.32' not found")
    return values


@machine
def glibc_too_old() -> Values:
    values = linux()
    values["system.name"] = "Ubuntu 20.04.6 LTS"
    values["system.libc"]["version"] = "2.31"
    originals(values)
    break_modules(values, "version `GLIBC_2.32' not found")
    return values


@machine
def conv_too_old_for_mamba() -> Values:
    values = linux()
    originals(values, "2.2.6", "1.4.0")
    add_package(values, "mamba_ssm", selective_scan="ok", mamba_inner="'NoneType' is not callable")
    return values


@machine
def conv_missing() -> Values:
    values = linux()
    originals(values)
    remove(values, "causal-conv1d")
    del values["extensions.modules"]["causal_conv1d_cuda"]
    del values["extensions.python"]["causal_conv1d"]
    return values


@machine
def transformers_5() -> Values:
    values = linux()
    use_torch(values, "2.5.1+cu124", "12.4", "3.1.0", abi=False, archs=("sm_80", "sm_86", "sm_90"))
    originals(values, "2.2.4", "1.5.0", archs=MIDDLE_ARCHS, asks=(CHECK_OLD,))
    install(values, transformers="5.0.0")
    error = "ImportError: cannot import name 'GreedySearchDecoderOnlyOutput'"
    add_package(values, "mamba_ssm", error=error)
    return values


@machine
def module_left_out() -> Values:
    """Installed while the skip switch was set: the package is there and its module is not."""
    values = linux()
    originals(values)
    values["extensions.modules"]["selective_scan_cuda"] = {
        "files": [],
        "importable": False,
        "error": "ModuleNotFoundError",
    }
    add_package(values, "mamba_ssm", error="No module named 'selective_scan_cuda'")
    return values


@machine
def shadowing_clone() -> Values:
    values = linux()
    originals(values)
    path = "/home/user/mamba/mamba_ssm"
    values["extensions.shadows"] = [{"module": "mamba_ssm", "path": path}]
    add_package(values, "mamba_ssm", error="No module named 'selective_scan_cuda'")
    return values


@machine
def half_removed_torch() -> Values:
    values = linux()
    values["packages.invalid"] = ["~orch", "~orch-2.6.0.dist-info"]
    error = "ImportError: libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent"
    values["torch.import"] = {"ok": False, "error": error, "seconds": 0.3}
    for name in ("torch.arch_list", "torch.devices", "torch.cuda_available"):
        values[name] = None
    values |= {"statescan.backends": None, "statescan.smoke": None}
    return values


@machine
def torch_import_fails() -> Values:
    values = linux()
    error = "ImportError: libcudnn.so.9: cannot open shared object file"
    values["torch.import"] = {"ok": False, "error": error, "seconds": 0.3}
    for name in ("torch.arch_list", "torch.devices", "torch.cuda_available"):
        values[name] = None
    values |= {"statescan.backends": None}
    values["statescan.smoke"] = {"ok": False, "error": error, "seconds": 0.4}
    return values


@machine
def library_path_cuda_11() -> Values:
    values = linux()
    originals(values)
    values["environment.variables"]["LD_LIBRARY_PATH"] = "/usr/local/cuda-11.8/lib64"
    path = "/usr/local/cuda-11.8/lib64/libcudart.so.11.0"
    row = {"soname": "libcudart.so.11.0", "path": path, "via": "LD_LIBRARY_PATH"}
    values["libraries.cudart"].insert(0, row)
    return values


@machine
def cudart_11_module() -> Values:
    values = linux()
    originals(values, "2.2.2", "1.4.0", archs=MIDDLE_ARCHS, cudart="11.0")
    for row in values["extensions.modules"].values():
        row["files"][0]["binary"]["cudart"] = "11"
    break_modules(values, "libcudart.so.11.0: cannot open shared object file")
    install(values, transformers="4.44.2")
    return values


@machine
def no_python_headers() -> Values:
    values = linux()
    originals(values)
    values["python.headers"]["present"] = False
    return values


@machine
def old_triton_without_libcuda_link() -> Values:
    values = linux()
    use_torch(values, "2.4.1+cu124", "12.4", "3.0.0", abi=False, archs=("sm_80", "sm_86", "sm_90"))
    originals(values, "2.2.4", "1.5.0", archs=MIDDLE_ARCHS, asks=(CHECK_OLD,))
    values["driver.link_name"] = False
    add_package(values, "mamba_ssm", selective_scan="ok", layer_norm="cannot find -lcuda")
    return values


@machine
def vmamba_modules() -> Values:
    """Another project's module beside healthy ones."""
    values = linux()
    originals(values)
    module = "selective_scan_cuda_core"
    add_module(values, module, binary(module, values, archs=NEW_ARCHS))
    return values


@machine
def native_library_damaged() -> Values:
    values = laptop()
    values["statescan.native"] = {"error": "_cpu.so does not load: invalid ELF header"}
    values["statescan.backends"][1] |= {"usable": False, "reason": "invalid ELF header"}
    return values


@machine
def pure_install() -> Values:
    values = laptop()
    reason = "_cpu.so was not built with this install (looked in /home/user/venv)"
    values["statescan.native"] = {"error": reason}
    values["statescan.backends"][1] |= {"usable": False, "reason": reason}
    return values


@machine
def backend_forced() -> Values:
    values = laptop()
    values["environment.variables"]["STATESCAN_BACKEND"] = "cuda"
    values["statescan.smoke"] = {"ok": False, "error": "BackendUnavailableError", "seconds": 1.0}
    return values


@machine
def smoke_test_fails() -> Values:
    values = laptop()
    error = "AssertionError: selective_scan: cpu differs from the reference by 0.3"
    values["statescan.smoke"] = {"ok": False, "error": error, "seconds": 2.0}
    return values
