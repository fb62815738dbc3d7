# SPDX-License-Identifier: Apache-2.0
"""The variables of a build: what it sets, what of the user's it keeps, which toolkit it takes."""

from __future__ import annotations

import pytest

from statescan.doctor.builder import environment
from statescan.doctor.model import Fact, Facts

MEMORY = {"total_gb": 64.0, "free_gb": 40.0, "limit_gb": None}


def home(path, version="12.8", *, headers=True, nvcc=True):
    return {
        "path": path, "version": version, "via": [], "nvcc": nvcc,
        "headers": {"cuda_runtime.h": headers}, "libraries": {"cudart": "x"},
    }  # fmt: skip


def taken(path, version="12.8", via="PATH", nvcc=True):
    found = f"{path}/bin/nvcc" if nvcc else None
    return {"path": path, "via": via, "exists": True, "nvcc": found, "version": version}


def facts(variables=(), *, build=None, homes=(), cuda="12.8", memory=MEMORY, cores=16):
    values = {
        "environment.variables": dict(variables), "toolkit.build": build or taken("/opt/cuda"),
        "toolkit.homes": list(homes), "torch.cuda": cuda, "system.memory": memory,
        "system.cores": cores,
    }  # fmt: skip
    return Facts({name: Fact(name, value, "test") for name, value in values.items()})


def decided(package="mamba-ssm", **options):
    found = environment.decide(package, facts(**options), "/b/nvcc", "/env/bin")
    return found.set, found.kept, "\n".join(found.notes)


def test_what_a_build_sets():
    made, kept, _ = decided()
    assert made["CUDA_HOME"] == "/opt/cuda"
    assert made["PATH"] == "/opt/cuda/bin:/env/bin"
    assert made["MAMBA_FORCE_BUILD"] == made["MAMBA_KEEP_CUDA_BUILD"] == "TRUE"
    assert made["PYTORCH_NVCC"] == "/b/nvcc"
    assert kept == {}


def test_the_abi_bit_is_left_to_torch():
    """Their setup takes torch's own; the variable could only break it."""
    assert not [name for name in decided()[0] if "ABI" in name]
    _, kept, _ = decided(variables={"MAMBA_FORCE_CXX11_ABI": "TRUE"})
    assert kept == {"MAMBA_FORCE_CXX11_ABI": "TRUE"}


def test_causal_conv1d_has_its_own_switches():
    made, _, _ = decided("causal-conv1d")
    assert made["CAUSAL_CONV1D_FORCE_BUILD"] == "TRUE"
    assert not [name for name in made if name.startswith("MAMBA")]


def test_what_the_user_set_stays():
    given = {"MAX_JOBS": "7", "CC": "gcc-11", "NVCC_APPEND_FLAGS": "-lineinfo"}
    given |= {"MAMBA_LOCAL_VERSION": "mine", "UNRELATED": "x"}
    made, kept, notes = decided(variables=given)
    given.pop("UNRELATED")
    assert kept == given
    assert "MAX_JOBS" not in made
    assert "MAX_JOBS=7 is yours" in notes


def test_the_users_own_nvcc_command_is_called_by_the_wrapper():
    made, kept, notes = decided(variables={"PYTORCH_NVCC": "ccache nvcc"})
    assert made["PYTORCH_NVCC"] == "/b/nvcc"
    assert kept == {"PYTORCH_NVCC": "ccache nvcc"}
    assert "the wrapper calls it" in notes


def test_a_switch_that_would_be_ignored_becomes_true_and_a_no_stays_no():
    made, _, notes = decided(variables={"MAMBA_FORCE_BUILD": "1"})
    assert made["MAMBA_FORCE_BUILD"] == "TRUE"
    assert "MAMBA_FORCE_BUILD=1 would be ignored" in notes
    made, kept, notes = decided(variables={"MAMBA_FORCE_BUILD": "FALSE"})
    assert "MAMBA_FORCE_BUILD" not in made
    assert kept["MAMBA_FORCE_BUILD"] == "FALSE"
    assert "a published wheel may be taken" in notes


@pytest.mark.parametrize(
    ("free", "limit", "cores", "package", "targets", "jobs", "threads"),
    [
        (40.0, None, 16, "mamba-ssm", 1, "10", None),
        (40.0, None, 4, "mamba-ssm", 1, "4", None),
        (40.0, None, 16, "causal-conv1d", 1, "3", None),
        (6.0, None, 16, "mamba-ssm", 1, "5", None),
        (40.0, 8.0, 16, "mamba-ssm", 1, "6", None),
        (4.0, None, 16, "causal-conv1d", 1, "1", None),
        (1.0, None, 16, "mamba-ssm", 1, "1", None),
        # Four kinds of code at a time in each compiler.
        (40.0, None, 16, "mamba-ssm", 9, "8", None),
        (15.0, None, 16, "causal-conv1d", 9, "1", None),
        (8.0, None, 16, "causal-conv1d", 9, "1", 2),
        (3.0, None, 16, "causal-conv1d", 9, "1", 1),
    ],
)
def test_jobs_by_memory_cores_and_files(free, limit, cores, package, targets, jobs, threads):
    memory = {"total_gb": 64.0, "free_gb": free, "limit_gb": limit}
    given = facts(memory=memory, cores=cores)
    found = environment.decide(package, given, "/b/nvcc", "/env/bin", targets)
    assert found.set["MAX_JOBS"] == jobs
    assert found.threads == threads


def test_jobs_that_the_user_set_leave_the_threads_alone():
    given = facts({"MAX_JOBS": "2"}, memory={"total_gb": 8.0, "free_gb": 3.0, "limit_gb": None})
    assert environment.decide("causal-conv1d", given, "n", "s", 9).threads is None


def test_unknown_memory_means_one_job():
    assert decided(memory=None)[0]["MAX_JOBS"] == "1"


@pytest.mark.parametrize(
    ("build", "homes", "path"),
    [
        # What a build would take, when nothing speaks against it.
        (taken("/usr/local/cuda"), [home("/opt/a")], "/usr/local/cuda"),
        # Another CUDA than torch's, no nvcc, or no headers.
        (taken("/usr", "11.5"), [home("/usr", "11.5"), home("/opt/a")], "/opt/a"),
        (taken("/usr", nvcc=False), [home("/opt/a")], "/opt/a"),
        (taken("/usr"), [home("/usr", headers=False), home("/opt/a")], "/opt/a"),
        # Nothing better is there.
        (taken("/usr", "11.5"), [home("/opt/a", "13.0")], "/usr"),
        (taken("/usr", "11.5"), [home("/opt/a", nvcc=False)], "/usr"),
        # The user's word counts, right or wrong.
        (taken("/x", "11.5", "CUDA_HOME"), [home("/opt/a")], "/x"),
        (taken("/x", None, "CUDA_PATH", nvcc=False), [home("/opt/a")], "/x"),
    ],
)
def test_which_toolkit_is_taken(build, homes, path):
    changed = environment.with_toolkit(facts(build=build, homes=homes))
    assert changed.get("toolkit.build")["path"] == path


def test_the_child_has_the_outer_path_behind():
    found = environment.decide("mamba-ssm", facts(), "/b/nvcc", "/env/bin")
    child = environment.of_child(found, {"PATH": "/usr/bin", "HOME": "/home/user"})
    assert child["PATH"] == "/opt/cuda/bin:/env/bin:/usr/bin"
    assert child["HOME"] == "/home/user"
