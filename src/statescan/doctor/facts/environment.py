# SPDX-License-Identifier: Apache-2.0
"""Probes of variables, of PATH, and of the caches that builds and imports read.

The list of variables is closed: what is not on it never leaves this machine.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.probe import probe

VARIABLES = (
    *("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDACXX", "CUDAHOSTCXX", "CUDA_INC_PATH"),
    *("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "CUDA_CACHE_PATH", "CUDA_FORCE_PTX_JIT"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "INCLUDE", "LIB"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH"),
    *("TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "USE_NINJA", "TORCH_EXTENSIONS_DIR"),
    *("TORCH_NVCC_FLAGS", "TORCH_DONT_CHECK_COMPILER_ABI", "TORCH_HOME", "PYTORCH_NVCC"),
    *("MAMBA_FORCE_BUILD", "MAMBA_SKIP_CUDA_BUILD", "MAMBA_FORCE_CXX11_ABI"),
    *("MAMBA_KEEP_CUDA_BUILD", "CAUSAL_CONV1D_FORCE_BUILD", "CAUSAL_CONV1D_SKIP_CUDA_BUILD"),
    *("CAUSAL_CONV1D_FORCE_CXX11_ABI", "CAUSAL_CONV1D_KEEP_CUDA_BUILD"),
    *("MAMBA_LOCAL_VERSION", "CAUSAL_CONV1D_LOCAL_VERSION"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT"),
    *("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "PIP_REQUIREMENT", "PIP_NO_BUILD_ISOLATION"),
    *("PIP_NO_BINARY", "PIP_ONLY_BINARY", "PIP_NO_CACHE_DIR", "PIP_CACHE_DIR", "PIP_NO_DEPS"),
    *("PIP_BREAK_SYSTEM_PACKAGES", "PIP_REQUIRE_VIRTUALENV", "PIP_USER", "PIP_TARGET"),
    *("PIP_CONFIG_FILE", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_PRE"),
    *("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"),
    *("UV_TORCH_BACKEND", "UV_NO_BUILD_ISOLATION", "UV_NO_BUILD_ISOLATION_PACKAGE"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_CACHE_DIR", "UV_NO_CACHE", "UV_CONSTRAINT"),
    *("UV_OVERRIDE", "UV_PRERELEASE", "UV_PROJECT_ENVIRONMENT"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONUTF8", "PYTHONIOENCODING"),
    *("PYTHONSAFEPATH", "PYTHONUSERBASE", "SETUPTOOLS_USE_DISTUTILS"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_OVERRIDE_CUDA"),
    *("TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH", "TRITON_INTERPRET"),
    *("ROCM_HOME", "ROCM_PATH", "HIP_PATH", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("HSA_OVERRIDE_GFX_VERSION", "PYTORCH_ROCM_ARCH", "HIP_ARCHITECTURES"),
    *("DISTUTILS_USE_SDK", "MSSdk", "VSINSTALLDIR", "VCINSTALLDIR", "VCToolsVersion"),
    *("VSCMD_ARG_TGT_ARCH", "WindowsSdkDir", "WindowsSDKVersion"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"),
    *("no_proxy", "all_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("STATESCAN_BACKEND", "STATESCAN_CACHE_DIR", "STATESCAN_COMPAT", "STATESCAN_PURE"),
    *("STATESCAN_REQUIRE_NATIVE", "NVIDIA_PRODUCT_NAME", "NVIDIA_PYTORCH_VERSION"),
    *("WSL_DISTRO_NAME", "HOME", "XDG_CACHE_HOME", "TMPDIR", "TEMP", "TMP"),
    *("LANG", "LC_ALL", "LC_CTYPE"),
)
"""What an install, a build, an import or a run of the packages reads."""

CACHED = ("mamba_ssm", "causal_conv1d", "mamba", "selective_scan", "vmamba")
"""First parts of the names of wheels in pip's cache that are told."""

_MOST_FILES = 5_000


def without_password(text: str) -> str:
    """The same with user and password taken out of each address in it.

    A password may have an "@" of its own, and the address of a proxy may have no scheme.
    """
    return re.sub(r"(?<=://)[^/\s]*@|(?<!\S)[^/\s:@]+:[^/\s]*@", "", text)


@probe("environment.variables", source="environment variables")
def variables(machine: Machine) -> dict[str, str]:
    """Those of the list that are set; one that is set to nothing counts too."""
    found = {name: machine.value(name) for name in VARIABLES}
    return {name: without_password(value) for name, value in found.items() if value is not None}


@probe("environment.path", source="PATH")
def path(machine: Machine) -> list[str]:
    """Folders in which programs are looked for."""
    return [str(folder) for folder in machine.folders("PATH")]


@probe("caches.pip_wheels", source="pip's cache")
def pip_wheels(machine: Machine) -> list[dict[str, str]]:
    """Wheels of these packages that pip built here and would take again."""
    folder = _pip_cache(machine)
    if folder is None:
        return []
    found = (folder / "wheels").glob("*/*/*/*/*.whl")
    rows = [wheel for wheel in found if wheel.name.partition("-")[0].lower() in CACHED]
    return [{"file": wheel.name, "path": str(wheel)} for wheel in sorted(rows)]


def _pip_cache(machine: Machine) -> Path | None:
    if machine.variable("PIP_CACHE_DIR"):
        return Path(machine.variable("PIP_CACHE_DIR"))
    base = machine.cache_home()
    if base is None:
        return None
    return base / "pip" / "Cache" if machine.os == "windows" else base / "pip"


@probe("caches.folders", source="cache folders")
def folders(machine: Machine) -> list[dict[str, Any]]:
    """Caches that exist, with their sizes."""
    home, base = machine.home(), machine.cache_home()
    places = {
        "pip": _pip_cache(machine),
        "triton": _named(machine, "TRITON_CACHE_DIR", home, ".triton/cache"),
        "torch_extensions": _named(machine, "TORCH_EXTENSIONS_DIR", base, "torch_extensions"),
        "statescan": _named(machine, "STATESCAN_CACHE_DIR", base, "statescan"),
        "uv": _named(machine, "UV_CACHE_DIR", base, "uv"),
    }
    return [
        {"name": name, "path": str(place), "size_mb": _size(place)}
        for name, place in places.items()
        if place is not None and place.is_dir()
    ]


def _named(machine: Machine, variable: str, base: Path | None, below: str) -> Path | None:
    if machine.variable(variable):
        return Path(machine.variable(variable))
    return base / below if base else None


def _size(folder: Path) -> int | None:
    """Megabytes; None for a folder with too many files to count them all."""
    total = seen = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            seen += 1
            if seen > _MOST_FILES:
                return None
            try:
                total += Path(parent, name).lstat().st_size
            except OSError:
                continue
    return round(total / (1 << 20))
