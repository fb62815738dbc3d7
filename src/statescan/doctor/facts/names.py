# SPDX-License-Identifier: Apache-2.0
"""The list of facts: every name that a probe may set and a check may read, with its form.

Probes are in the other modules of this folder. A value that does not exist (no GPU, no nvcc) is an
empty list or None; a value that could not be found out is a fact with ``problem`` set.
"""

from __future__ import annotations

NAMES: dict[str, str] = {
    # The machine.
    "system.os": '"linux", "windows" or "macos"',
    "system.name": 'for people: "Ubuntu 22.04.4 LTS", "Windows 11 23H2", "macOS 14.5"',
    "system.distribution": '{"id": "ubuntu", "like": ["debian"], "version": "22.04"} or None',
    "system.machine": '"x86_64", "aarch64", "arm64", ... as platform.machine() in lower case',
    "system.libc": '{"kind": "glibc" or "musl", "version": "2.35"} or None',
    "system.wsl": "0, 1 or 2",
    "system.container": 'None, "docker", "podman", "kubernetes", "lxc", "singularity", ...',
    "system.ngc": 'version of an NVIDIA PyTorch container, "25.05", or None',
    "system.cores": "CPUs that this process may use",
    "system.memory": '{"total_gb": 31.2, "free_gb": 20.1, "limit_gb": None}; limit of the cgroup',
    "system.disks": (
        '{"tmp": {"path": "/tmp", "free_gb": 9.1}, "cwd": ..., "cache": ..., "site": ...}'
    ),
    "system.encoding": '{"preferred": "UTF-8", "utf8_mode": False}',
    "system.shell": (
        '"bash", "powershell" or "cmd": the family of the shell in use; zsh counts as bash'
    ),
    # The interpreter.
    "python.version": '"3.11.7"',
    "python.executable": "path",
    "python.implementation": '"cpython", "pypy", ...',
    "python.tag": '"cp311", "cp313t" for free threading',
    "python.environment": '{"kind": "venv", "conda", "system", "uv" or "pixi", "prefix": path}',
    "python.externally_managed": "True where pip refuses to install (PEP 668)",
    "python.headers": '{"folder": path, "present": True}: Python.h of this interpreter',
    "python.pip": '{"version": "24.0"} or None',
    "python.uv": '{"version": "0.5.1", "path": path} or None',
    "python.conda": '{"version": "24.1.2", "path": path, "prefix": active prefix} or None',
    # Distributions of this environment, read from their metadata.
    "packages.installed": (
        'names in normal form to {"version": "2.2.2", "location": folder, "installer": "pip", '
        '"wheel_tags": ["cp310-cp310-linux_x86_64"], "editable": False, "direct_url": url or None}'
    ),
    "packages.invalid": 'left-over folders of half-removed packages, such as "~orch"',
    # torch, read from its files; what only an import shows is None without --import-torch.
    "torch.version": '"2.7.0+cu128", with the local part',
    "torch.cuda": '"12.8", or None for a build without CUDA',
    "torch.hip": '"6.2.4", or None',
    "torch.cxx11_abi": "True or False",
    "torch.location": "folder of the package",
    "torch.libraries": '{"libc10.so": path, "libtorch_cpu.so": path, ...}',
    "torch.import": '{"ok": True, "error": "", "seconds": 2.1}, from a child process',
    "torch.arch_list": '["sm_80", "sm_90", "compute_90"] as torch.cuda.get_arch_list()',
    "torch.devices": '[{"name": "NVIDIA H200", "capability": "9.0", "memory_gb": 139.8}]',
    "torch.cuda_available": "True or False, from the child process",
    # The driver and the GPUs, read without torch.
    "driver.version": '"550.54.15"',
    "driver.cuda": '"12.4": the newest CUDA that this driver serves',
    "driver.library": "path of libcuda.so.1 or nvcuda.dll",
    "driver.link_name": "True when the linker finds libcuda.so, which old Triton needs",
    "driver.gpus": '[{"name": "NVIDIA GeForce RTX 3090", "capability": "8.6", "memory_gb": 23.7}]',
    "driver.amd": '{"rocm": "6.2.4", "gpus": ["gfx1100"]} or None',
    # CUDA toolkits.
    "toolkit.nvcc_on_path": (
        '[{"path": "/usr/bin/nvcc", "version": "11.5", "real": path}] in PATH order'
    ),
    "toolkit.homes": (
        '[{"path": "/usr/local/cuda-12.4", "version": "12.4", "via": ["CUDA_HOME", "/usr/local"], '
        '"nvcc": True, "headers": {"cuda_runtime.h": True, ...}, "libraries": {"cudart": path}}]'
    ),
    "toolkit.build": (
        'the toolkit that a build takes by torch\'s rules: {"path": folder, "via": "CUDA_HOME", '
        '"exists": True, "nvcc": path or None, "version": "12.4" or None}, None when there is none'
    ),
    # Host compilers.
    "compiler.c": '{"command": "gcc", "path": path or None, "family": "gcc", "version": "11.4.0"}',
    "compiler.cxx": "the same for C++: what CXX names, else c++ or g++",
    "compiler.cuda_host": (
        "the same for what nvcc would call: by NVCC_APPEND_FLAGS, CC (from torch), "
        "NVCC_PREPEND_FLAGS or NVCC_CCBIN, else gcc"
    ),
    "compiler.available": (
        "a list of the same: every gcc, g++, clang++ on PATH, versioned names too"
    ),
    "compiler.msvc": '{"version": "19.38", "path": path, "sdk": True, "prompt": True} or None',
    "compiler.ninja": '{"path": path, "version": "1.11.1"} or None',
    "compiler.make": '{"path": path} or None',
    # Libraries that extensions are bound to.
    "libraries.libstdcxx": (
        '[{"path": path, "glibcxx": "3.4.30", "cxxabi": "1.3.13", "via": "system"}] in the order '
        "that the loader takes them for this interpreter"
    ),
    "libraries.cudart": '[{"soname": "libcudart.so.12", "path": path, "via": "torch wheel"}]',
    # The originals' extension modules.
    "extensions.modules": (
        "module name (selective_scan_cuda, causal_conv1d_cuda, selective_scan_cuda_core, ...) to "
        '{"files": [{"path": path, "binary": report of symbols, "in_site_packages": True}], '
        '"importable": True, False or None, "error": text}'
    ),
    "extensions.python": (
        'mamba_ssm and causal_conv1d: {"importable": True, False or None, "error": text, '
        '"file": path, "usable": {"selective_scan": "ok" or reason, ...}}'
    ),
    "extensions.shadows": '[{"module": "mamba_ssm", "path": path}] that hide installed packages',
    # The environment, caches, and statescan itself.
    "environment.variables": "names to values, of the variables that a build or an import reads",
    "environment.path": "the folders of PATH in order",
    "caches.pip_wheels": '[{"file": "mamba_ssm-2.2.2-cp310-cp310-linux_x86_64.whl", "path": path}]',
    "caches.folders": '[{"name": "triton", "path": path, "size_mb": 12}]',
    "statescan.version": '"0.1.0"',
    "statescan.native": '{"path": path, "isa": "avx2"} or {"error": reason}',
    "statescan.backends": '[{"name": "cpu", "usable": True, "reason": ""}], from a child process',
    "statescan.smoke": '{"ok": True, "error": "", "seconds": 3.0}: one op against its reference',
}
"""Names, and the form of their values by example."""
