# SPDX-License-Identifier: Apache-2.0
"""Plans: which ways are open on which machine, their order, and what the steps say."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from statescan.doctor import checks
from statescan.doctor.model import Fact, Facts
from statescan.doctor.plan import planner, source
from statescan.doctor.render import plan as text
from statescan.doctor.shells import SHELLS, lines
from statescan.errors import ArgumentError

SCHEMA = Path(planner.__file__).parents[1] / "schemas" / "plan.schema.json"

MACHINE = {
    "system.os": "linux",
    "system.machine": "x86_64",
    "system.libc": {"kind": "glibc", "version": "2.35"},
    "system.cores": 16,
    "system.memory": {"total_gb": 64.0, "free_gb": 22.0, "limit_gb": None},
    "python.version": "3.11.7",
    "python.tag": "cp311",
    "python.headers": {"folder": "/usr/include/python3.11", "present": True},
    "torch.version": "2.8.0+cu128",
    "torch.cuda": "12.8",
    "torch.cxx11_abi": True,
    "driver.gpus": [{"name": "NVIDIA H100", "capability": "9.0", "memory_gb": 80.0}],
    "driver.cuda": "12.8",
    "toolkit.build": {
        "path": "/opt/cuda-12.8", "via": "CUDA_HOME", "exists": True,
        "nvcc": "/opt/cuda-12.8/bin/nvcc", "version": "12.8",
    },
}  # fmt: skip


def machine(**changes):
    values = {**MACHINE, **{name.replace("__", "."): value for name, value in changes.items()}}
    return Facts({name: Fact(name, value, "test") for name, value in values.items()})


def planned(package="mamba-ssm", **changes):
    facts = machine(**changes)
    return planner.make(package, facts, checks.run(facts, package))


def names(plan):
    return [way.name for way in plan.ways]


def way(plan, name):
    return next(row for row in plan.ways if row.name == name)


def closed(plan, name):
    return next(row.closed for row in plan.closed if row.name == name)


def typed(found, shell="bash"):
    return "\n".join(
        line for step in found.steps for one in step.commands for line in lines(one, shell)
    )


def test_a_good_machine_has_statescan_wheel_source_and_container_in_this_order():
    plan = planned()
    assert names(plan) == ["statescan", "wheel", "source", "container"]
    assert closed(plan, "wsl2") == "this is not Windows"


def test_the_wheels_are_named_as_the_originals_name_them_and_fit_each_other():
    commands = typed(way(planned(), "wheel"))
    assert "mamba_ssm-2.3.1+cu12torch2.8cxx11abiTRUE-cp311-cp311-linux_x86_64.whl" in commands
    assert "causal_conv1d-1.6.2.post1+cu12torch2.8cxx11abiTRUE-cp311" in commands
    assert commands.index("causal_conv1d") < commands.index("mamba_ssm")
    # 2.3.2 needs a newer Triton than torch 2.8 brings.
    assert "2.3.2" not in commands


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"system__libc": {"kind": "glibc", "version": "2.31"}}, "need glibc 2.35"),
        ({"system__libc": {"kind": "musl", "version": "1.2"}}, "musl"),
        ({"torch__version": "2.11.0+cu128"}, "none is known for torch 2.11"),
        ({"python__tag": "cp314"}, "none is known"),
        ({"torch__cuda": None, "torch__version": "2.8.0+cpu"}, "without CUDA"),
        (
            {"driver__gpus": [{"name": "GTX 1080 Ti", "capability": "6.1"}]},
            "no code for this GPU (sm_61)",
        ),
        ({"system__ngc": "25.05"}, "NGC"),
        ({"torch__hip": "6.2", "torch__cuda": None, "torch__version": "2.8.0+rocm6.3"}, "ROCm"),
        ({"system__os": "windows"}, "Linux only"),
    ],
)
def test_why_no_wheel_fits(changes, reason):
    assert reason in closed(planned(**changes), "wheel")


def test_a_wheel_of_which_nothing_is_known_says_so():
    plan = planned(
        "causal-conv1d", torch__version="2.5.1+cu124", torch__cuda="12.4", torch__cxx11_abi=False
    )
    found = [row for row in plan.ways if row.name == "wheel"]
    assert not found or "not known" in typed(found[0])


def test_the_source_build_keeps_torch_and_sets_its_environment():
    commands = typed(way(planned(), "source"))
    for line in (
        "export CUDA_HOME=/opt/cuda-12.8",
        "export PATH=$CUDA_HOME/bin${PATH:+:$PATH}",
        "export MAX_JOBS=4",
        "CAUSAL_CONV1D_FORCE_BUILD=TRUE python -m pip install --no-build-isolation --no-deps "
        "--no-cache-dir causal-conv1d==1.7.0",
        "python -m pip install einops transformers",
    ):
        assert line in commands
    assert commands.index("causal-conv1d==") < commands.index("mamba-ssm==")
    assert "MAMBA_KEEP_CUDA_BUILD=TRUE" in commands


def test_a_gpu_that_the_release_lacks_is_added_to_the_build():
    plan = planned(driver__gpus=[{"name": "GTX 1080 Ti", "capability": "6.1"}])
    assert "NVCC_APPEND_FLAGS='-gencode arch=compute_61,code=sm_61'" in typed(way(plan, "source"))


def test_fixes_of_findings_come_before_the_build_without_their_own_install():
    plan = planned(
        toolkit__build=None,
        **{"toolkit.nvcc_on_path": [], "toolkit.homes": []},
    )
    source = way(plan, "source")
    assert "nvcc" in source.steps[0].title
    assert not source.steps[0].safe
    assert not source.safe
    first = "\n".join(line for one in source.steps[0].commands for line in lines(one, "bash"))
    assert "pip install" not in first


def test_a_toolkit_that_fits_is_set_instead_of_complained_of():
    """Where another one comes first on PATH, the plan must not set that one again."""
    wrong = {**MACHINE["toolkit.build"], "path": "/usr", "via": "PATH", "version": "11.5"}
    right = {
        "path": "/opt/cuda-12.8", "version": "12.8", "via": ["/opt"], "nvcc": True, "headers": {},
    }  # fmt: skip
    found = way(planned(toolkit__build=wrong, toolkit__homes=[right]), "source")
    assert "Set the environment" in found.steps[0].title
    assert "export CUDA_HOME=/opt/cuda-12.8" in typed(found)
    assert "=/usr\n" not in typed(found)


def test_little_memory_means_one_gpu_at_a_time_in_each_compiler():
    little = {"total_gb": 16.0, "free_gb": 11.0, "limit_gb": None}
    assert "NVCC_APPEND_FLAGS='--threads 1'" in typed(way(planned(system__memory=little), "source"))
    assert "--threads" not in typed(way(planned(), "source"))


def test_an_old_torch_gets_build_tools_of_its_time():
    plan = planned(torch__version="2.2.2+cu121", torch__cuda="12.1", torch__cxx11_abi=False)
    assert "setuptools==69" in typed(way(plan, "source"))
    assert "install setuptools wheel" in typed(way(planned(), "source"))


def test_a_wheel_that_pip_would_not_ask_for_is_named_as_it_is_published():
    plan = planned(system__machine="aarch64")
    commands = typed(way(plan, "wheel"))
    assert "mamba_ssm-2.3.1+cu12torch2.8cxx11abiTRUE-cp311-cp311-linux_aarch64.whl" in commands
    assert "pip by itself would take one for another machine" in commands
    assert "another machine" not in typed(way(planned(), "wheel"))


def test_a_package_that_works_is_said_to_work():
    folder = Path(__file__).parent / "machines"
    for name, works in (("healthy-gpu", True), ("torch-upgraded", False), ("nvcc-missing", False)):
        facts = Facts.read(folder / f"{name}.json")
        plan = planner.make("mamba-ssm", facts, checks.run(facts, "mamba-ssm"))
        assert plan.summary.startswith("mamba-ssm 2.3.1 works here already") is works


def test_each_step_is_marked_and_an_unsafe_one_says_what_it_may_break():
    plan = planned(system__os="windows", system__shell="powershell", system__machine="amd64")
    written = text.lines(plan, "powershell", 80)
    assert "   a) [safe] Install it; nothing is compiled and torch stays as it is" in written
    unsafe = next(n for n, line in enumerate(written) if line.startswith("   a) [unsafe] Set up"))
    assert any("care: needs administrator rights" in line for line in written[unsafe:])
    assert "in a container or under WSL2 only" in plan.summary


def test_a_mac_gets_statescan_and_the_reasons():
    plan = planned(
        system__os="macos",
        system__machine="arm64",
        torch__cuda=None,
        torch__version="2.8.0",
        toolkit__build=None,
        driver__gpus=[],
    )
    assert names(plan) == ["statescan"]
    assert closed(plan, "source") == "macOS has no CUDA"
    assert "cannot be had here" in plan.summary


def test_windows_gets_wsl2_which_is_marked_unsafe():
    plan = planned(system__os="windows", system__shell="powershell", system__machine="amd64")
    assert names(plan) == ["statescan", "container", "wsl2"]
    assert not way(plan, "wsl2").safe
    assert "administrator" in way(plan, "wsl2").steps[0].safety


def test_statescan_needs_its_least_python_and_torch():
    plan = planned(python__version="3.9.1", python__tag="cp39")
    assert "needs Python 3.10" in closed(plan, "statescan")
    assert planned("statescan", torch__version="2.1.2+cu121").ways == ()


def test_memory_decides_on_the_number_of_compilers():
    assert source.jobs(machine()) == 4
    assert (
        source.jobs(machine(system__memory={"total_gb": 4.0, "free_gb": 1.0, "limit_gb": None}))
        == 1
    )
    limited = {"total_gb": 64.0, "free_gb": 60.0, "limit_gb": 11.0}
    assert source.jobs(machine(system__memory=limited)) == 2


def test_another_package_is_refused():
    with pytest.raises(ArgumentError, match="'mamba' is no package that this plans for"):
        planner.make("mamba", machine())


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "machines").glob("*.json")), ids=lambda p: p.stem
)
@pytest.mark.parametrize("package", planner.PACKAGES)
def test_every_recorded_machine_has_a_plan_in_three_shells(path, package):
    facts = Facts.read(path)
    plan = planner.make(package, facts, checks.run(facts, package))
    content = {
        "schema_version": 1,
        "command": "plan",
        "facts_from": None,
        "shell": "bash",
        **plan.to_json(),
    }
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    for shell in SHELLS:
        written = text.lines(plan, shell, 80)
        assert written[-1].endswith("agree.")
        prose = [line for line in written if not line.startswith("        ")]
        assert max(map(len, prose)) <= 80
