# SPDX-License-Identifier: Apache-2.0
import os
import platform
import shutil
from pathlib import Path

import pytest
from helpers import binaries
from helpers.fake_machine import machine, program, write

from statescan.doctor.facts import system

UBUNTU = """\
PRETTY_NAME="Ubuntu 22.04.4 LTS"
NAME="Ubuntu"
VERSION_ID="22.04"
ID=ubuntu
ID_LIKE=debian
"""


@pytest.fixture
def here(tmp_path):
    return machine(tmp_path)


def test_the_distribution(here):
    assert system.distribution(here)["system.distribution"] is None
    write(here.path("/usr/lib/os-release"), 'ID=alpine\nNAME="Alpine Linux"\nVERSION_ID=3.20\n')
    assert system.distribution(here) == {
        "system.name": "Alpine Linux",
        "system.distribution": {"id": "alpine", "like": [], "version": "3.20"},
    }
    write(here.path("/etc/os-release"), UBUNTU)
    assert system.distribution(here) == {
        "system.name": "Ubuntu 22.04.4 LTS",
        "system.distribution": {"id": "ubuntu", "like": ["debian"], "version": "22.04"},
    }


def test_glibc_has_its_version_from_the_library_in_use(here, monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.35")
    assert system.libc(here) == {"kind": "glibc", "version": "2.35"}


def test_musl_says_its_version_when_its_loader_is_started(here):
    said = "musl libc (x86_64)\nVersion 1.2.5\nDynamic Program Loader\n"
    loader = "/lib/ld-musl-x86_64.so.1"
    program(here.path(loader), script=f"cat >&2 <<'END'\n{said}END\nexit 1\n")
    # That musl is installed beside glibc says nothing of this Python: its own loader does.
    assert system.libc(here)["kind"] == "glibc"
    named = f'.section .interp,"a"\n.asciz "{loader}"'
    here.executable = binaries.shared(here.path("/usr/bin/python3"), named)
    assert system.libc(here) == ({"kind": "musl", "version": "1.2.5"}, loader, "")


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("5.15.153.1-microsoft-standard-WSL2\n", 2),
        ("6.6.36.3-microsoft-standard\n", 2),
        ("4.19.104-microsoft-standard\n", 2),
        ("4.4.0-22621-Microsoft\n", 1),
        ("6.8.0-45-generic\n", 0),
    ],
)
def test_wsl(here, release, version):
    write(here.path("/proc/sys/kernel/osrelease"), release)
    assert system.wsl(here) == version


@pytest.mark.parametrize(
    ("file", "text", "environ", "kind"),
    [
        ("/etc/hostname", "", {}, None),
        ("/.dockerenv", "", {}, "docker"),
        ("/run/.containerenv", "", {}, "podman"),
        ("/.dockerenv", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ("/.dockerenv", "", {"APPTAINER_CONTAINER": "/x.sif"}, "singularity"),
        ("/etc/hostname", "", {"container": "lxc"}, "lxc"),
        ("/proc/1/cgroup", "12:memory:/docker/0123\n", {}, "docker"),
        ("/proc/1/cgroup", "0::/kubepods.slice/x\n", {}, "kubernetes"),
    ],
)
def test_containers(tmp_path, file, text, environ, kind):
    here = machine(tmp_path, environ=environ)
    write(here.path(file), text)
    assert system.container(here) == kind


def test_the_container_of_nvidia(tmp_path):
    assert system.ngc(machine(tmp_path, environ={"NVIDIA_PYTORCH_VERSION": "25.05"})) == "25.05"
    assert system.ngc(machine(tmp_path, environ={"NVIDIA_PYTORCH_VERSION": ""})) is None


MEMINFO = "MemTotal:       65536000 kB\nMemFree: 1048576 kB\nMemAvailable:   41943040 kB\n"
GB = 1 << 30


def test_memory_without_a_limit(here):
    write(here.path("/proc/meminfo"), MEMINFO)
    write(here.path("/proc/self/cgroup"), "0::/user.slice\n")
    write(here.path("/sys/fs/cgroup/user.slice/memory.max"), "max\n")
    assert system.memory(here) == {"total_gb": 62.5, "free_gb": 40.0, "limit_gb": None}


def test_the_least_limit_of_all_groups_above_counts(here):
    write(here.path("/proc/meminfo"), MEMINFO)
    write(here.path("/proc/self/cgroup"), "0::/a/b\n")
    base = here.path("/sys/fs/cgroup")
    write(base / "a/b/memory.max", f"{16 * GB}\n")
    write(base / "a/memory.max", f"{8 * GB}\n")
    write(base / "a/memory.current", f"{5 * GB}\n")
    write(base / "a/memory.stat", f"anon {GB}\ninactive_file {2 * GB}\n")
    assert system.memory(here) == {"total_gb": 62.5, "free_gb": 5.0, "limit_gb": 8.0}


def test_a_limit_of_the_first_kind_of_groups(here):
    write(here.path("/proc/meminfo"), MEMINFO)
    write(here.path("/proc/self/cgroup"), "9:cpu,cpuacct:/x\n4:memory:/docker/12\n0::/x\n")
    base = here.path("/sys/fs/cgroup/memory")
    write(base / "memory.limit_in_bytes", f"{4 * GB}\n")
    write(base / "memory.usage_in_bytes", f"{1 * GB}\n")
    assert system.memory(here) == {"total_gb": 62.5, "free_gb": 3.0, "limit_gb": 4.0}
    write(base / "memory.limit_in_bytes", "9223372036854771712\n")
    assert system.memory(here)["limit_gb"] is None


def test_memory_of_a_mac(tmp_path):
    pages = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
    pages += "Pages free:       65536.\nPages active:  9.\nPages inactive:   131072.\n"
    program(tmp_path / "bin/sysctl", str(16 * GB))
    program(tmp_path / "bin/vm_stat", pages)
    here = machine(tmp_path, "macos", environ={"PATH": str(tmp_path / "bin")})
    assert system.memory(here).value == {"total_gb": 16.0, "free_gb": 3.0, "limit_gb": None}


@pytest.mark.parametrize(
    ("release", "version", "name"),
    [
        ("10", "10.0.22631", "Windows 11 10.0.22631"),
        ("10", "10.0.19045", "Windows 10 10.0.19045"),
        ("2022Server", "10.0.20348", "Windows 2022Server 10.0.20348"),
    ],
)
def test_the_name_of_windows(tmp_path, monkeypatch, release, version, name):
    """Old versions of Python know no Windows 11; its build number does."""
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(platform, "version", lambda: version)
    assert system.distribution(machine(tmp_path, "windows"))["system.name"].value == name


def test_a_folder_that_may_not_be_looked_into_spoils_no_other_disk(tmp_path, monkeypatch):
    def usage(place):
        if Path(place).is_relative_to(tmp_path / "home"):
            raise PermissionError(place)
        return real(place)

    real = shutil.disk_usage
    write(tmp_path / "home/.cache/file")
    monkeypatch.setattr(shutil, "disk_usage", usage)
    found = system.disks(machine(tmp_path))
    assert found["cache"]["free_gb"] > 0 and found["site"]["free_gb"] > 0


def test_disks(tmp_path):
    here = machine(tmp_path, environ={"TMPDIR": str(tmp_path)})
    found = system.disks(here)
    assert {name: row["path"] for name, row in found.items()} == {
        "tmp": str(tmp_path),
        "cwd": str(here.cwd),
        # Not made yet: the disk of the folder above it.
        "cache": str(tmp_path / "home/.cache"),
        "site": str(here.site),
    }
    assert all(row["free_gb"] > 0 for row in found.values())


@pytest.mark.parametrize(
    ("environ", "shell"),
    [
        ({"PROMPT": "$P$G", "PSModulePath": "a;b"}, "cmd"),
        ({"PROMPT": "$P$G", "PSModulePath": "mine;a;b"}, "powershell"),
        ({"PSModulePath": "mine;a;b"}, "powershell"),
        ({}, "powershell"),
        ({"MSYSTEM": "MINGW64", "PSModulePath": "a;b"}, "bash"),
    ],
)
def test_the_shell_on_windows(tmp_path, environ, shell):
    assert system.shell(machine(tmp_path, "windows", environ=environ)) == shell


def test_every_other_shell_counts_as_bash(tmp_path):
    assert system.shell(machine(tmp_path, environ={"SHELL": "/bin/zsh"})) == "bash"


def test_cores_are_those_that_the_process_may_use(here, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7}, raising=False)
    assert system.cores(here) == 3
