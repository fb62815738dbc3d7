# SPDX-License-Identifier: Apache-2.0
import subprocess
import sysconfig
from pathlib import Path

import pytest
from helpers import binaries
from helpers.fake_machine import machine, program, write

from statescan.doctor.facts import nvidia

NVML = """\
import types
def nvmlInit(): {start}
def nvmlSystemGetCudaDriverVersion_v2(): return 12080
def nvmlSystemGetDriverVersion(): return b"570.133.07"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetCudaComputeCapability(device): return (8, 6)
def nvmlDeviceGetName(device): return "NVIDIA GeForce RTX 3090"
def nvmlDeviceGetMemoryInfo(device): return types.SimpleNamespace(total=25447170048)
"""
CARD = {"name": "NVIDIA GeForce RTX 3090", "capability": "8.6", "memory_gb": 23.7}
LIBCUDA = """
#include <string.h>
int cuDriverGetVersion(int *v) { *v = 12040; return 0; }
int cuInit(unsigned f) { return START; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strcpy(s, "Tesla V100"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 7 : 0; return 0; }
int cuDeviceTotalMem_v2(unsigned long *n, int d) { *n = 34089730048UL; return 0; }
"""
KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
)
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.07  Release Build\n"


def library(folder: Path, start: int = 0) -> Path:
    """A driver's library that answers, or does not start."""
    source = write(folder / "cuda.c", LIBCUDA.replace("START", str(start)))
    target = folder / "libcuda.so.1"
    subprocess.run([binaries.gcc(), "-shared", "-fPIC", "-o", target, source], check=True)
    return target


@pytest.fixture
def here(tmp_path):
    (tmp_path / "driver").mkdir()
    found = machine(tmp_path, environ={"LD_LIBRARY_PATH": str(tmp_path / "driver"), "PATH": ""})
    stdlib = sysconfig.get_path("stdlib")
    found.search_path = (found.site, Path(stdlib), Path(stdlib) / "lib-dynload")
    return found


def values(here):
    return {name: getattr(row, "value", row) for name, row in nvidia.gpus(here).items()}


def test_no_driver(here):
    assert values(here) == {"driver.version": None, "driver.cuda": None, "driver.gpus": []}
    assert nvidia.library(here) is None
    assert nvidia.link_name(here) is False
    assert nvidia.amd(here) is None


def test_by_nvml(here):
    library(here.root / "driver", 999)
    write(here.site / "pynvml.py", NVML.format(start="pass"))
    assert values(here) == {
        "driver.version": "570.133.07",
        "driver.cuda": "12.8",
        "driver.gpus": [CARD, CARD],
    }
    assert nvidia.gpus(here)["driver.gpus"].source == "NVML"


def test_gpus_that_variables_hide_are_there_all_the_same(here):
    library(here.root / "driver")
    here.environ = {**here.environ, "CUDA_VISIBLE_DEVICES": ""}
    hidden = "import os; assert 'CUDA_VISIBLE_DEVICES' not in os.environ"
    write(here.site / "pynvml.py", NVML.format(start=hidden))
    assert len(values(here)["driver.gpus"]) == 2


def test_without_nvml_by_the_driver_itself_and_the_kernel(here):
    library(here.root / "driver")
    write(here.path("/proc/driver/nvidia/version"), KERNEL_MODULE)
    found = nvidia.gpus(here)
    assert values(here) == {
        "driver.version": "550.54.15",
        "driver.cuda": "12.4",
        "driver.gpus": [{"name": "Tesla V100", "capability": "7.0", "memory_gb": 31.7}],
    }
    assert found["driver.gpus"].source == "libcuda"
    assert found["driver.version"].source == "/proc/driver/nvidia/version"


def test_a_driver_without_a_gpu_answers_that_there_is_none(here):
    library(here.root / "driver", 100)
    found = nvidia.gpus(here)["driver.gpus"]
    assert (found.value, found.problem) == ([], "")


def test_a_driver_that_does_not_start_is_a_problem(here):
    library(here.root / "driver", 999)
    found = nvidia.gpus(here)["driver.gpus"]
    assert found.value is None
    assert found.problem.endswith("cuInit ends with error 999")


@pytest.mark.parametrize(
    ("text", "version"), [(KERNEL_MODULE, "550.54.15"), (OPEN_MODULE, "570.133.07")]
)
def test_a_kernel_module_alone_tells_its_version(here, text, version):
    write(here.path("/proc/driver/nvidia/version"), text)
    found = nvidia.gpus(here)
    assert found["driver.version"].value == version
    assert found["driver.gpus"].value is None
    assert "libcuda" in found["driver.gpus"].problem


def test_a_container_without_gpus_sees_the_kernel_of_its_host(here):
    write(here.path("/proc/driver/nvidia/version"), KERNEL_MODULE)
    write(here.path("/.dockerenv"))
    assert values(here) == {"driver.version": None, "driver.cuda": None, "driver.gpus": []}


def test_nvidia_smi_where_nothing_else_answers(here, tmp_path):
    listed = "NVIDIA GeForce RTX 3090, 8.6, 24268, 551.61"
    whole = "| NVIDIA-SMI 551.61    Driver Version: 551.61    CUDA Version: 12.4     |"
    script = f"case $1 in --query*) echo '{listed}';; *) echo '{whole}';; esac\n"
    program(tmp_path / "bin/nvidia-smi", script=script)
    here.environ = {**here.environ, "PATH": str(tmp_path / "bin")}
    found = values(here)
    assert found == {"driver.version": "551.61", "driver.cuda": "12.4", "driver.gpus": [CARD]}


def test_the_library_and_the_name_that_the_linker_wants(here):
    path = library(here.root / "driver")
    assert nvidia.library(here) == str(path)
    assert nvidia.link_name(here) is False
    path.with_name("libcuda.so").symlink_to(path)
    assert nvidia.link_name(here) is True


def test_the_library_of_wsl(here):
    path = write(here.path("/usr/lib/wsl/lib/libcuda.so.1"), "-")
    assert nvidia.library(here) == str(path)


def test_the_library_on_windows(tmp_path):
    path = write(tmp_path / "Windows/System32/nvcuda.dll", "-")
    here = machine(tmp_path, "windows", environ={"SystemRoot": str(tmp_path / "Windows")})
    assert nvidia.library(here) == str(path)
    assert nvidia.link_name(here) is None


def test_a_mac_has_none(tmp_path):
    here = machine(tmp_path, "macos")
    assert values(here) == {"driver.version": None, "driver.cuda": None, "driver.gpus": []}
    assert (nvidia.library(here), nvidia.link_name(here), nvidia.amd(here)) == (None, None, None)


@pytest.mark.parametrize(
    ("number", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (100300, "gfx1030")],
)
def test_gpus_of_amd(here, number, name):
    nodes = here.path("/sys/class/kfd/kfd/topology/nodes")
    write(nodes / "0/properties", "cpu_cores_count 64\ngfx_target_version 0\n")
    write(nodes / "1/properties", f"simd_count 304\ngfx_target_version {number}\n")
    assert nvidia.amd(here) == {"rocm": None, "gpus": [name]}
    write(here.path("/opt/rocm/.info/version"), "6.2.4-120\n")
    assert nvidia.amd(here) == {"rocm": "6.2.4", "gpus": [name]}


def test_a_driver_that_hangs_does_not_hold_the_doctor(here, monkeypatch):
    monkeypatch.setattr(nvidia.children, "DRIVER_SECONDS", 0.5)
    write(here.site / "pynvml.py", NVML.format(start="import time; time.sleep(60)"))
    write(here.path("/proc/driver/nvidia/version"), KERNEL_MODULE)
    found = nvidia.gpus(here)
    assert found["driver.version"].value == "550.54.15"
    assert found["driver.gpus"].value is None
