# SPDX-License-Identifier: Apache-2.0
"""Checks of the system, of variables, of the interpreter and of what installs packages."""

from __future__ import annotations

import pytest
from helpers.judging import ids, judge, only, to_build
from helpers.machine_parts import no_driver, no_toolkit, no_torch, originals, use_python
from helpers.machines_base import laptop, linux, windows

from statescan.doctor.model import Severity


def with_variables(values, **variables):
    values["environment.variables"] |= variables
    return values


def test_a_mac_has_one_finding_for_the_originals_and_none_for_statescan():
    values = laptop()
    changes = {"system__os": "macos", "system__name": "macOS 15.3", "system__libc": None}
    row = only(values, "mamba-ssm", **changes)
    assert row.problem.slug == "macos-unsupported"
    assert "macOS 15.3" in row.summary
    assert ids(values, **changes) == []


def test_musl_with_a_torch_of_its_own_is_fine():
    values = laptop()
    libc = {"kind": "musl", "version": "1.2.5"}
    assert ids(values, system__libc=libc) == []
    no_torch(values)
    assert ids(values, system__libc=libc) == ["system-without-torch"]


@pytest.mark.parametrize(("version", "words"), [(1, "WSL 1 never"), (2, "/usr/lib/wsl/lib")])
def test_wsl_without_a_driver_says_which_wsl(version, words):
    values = linux()
    originals(values)
    no_driver(values)
    row = only(values, system__wsl=version)
    assert row.problem.slug == "wsl-driver-missing"
    assert words in row.summary


@pytest.mark.parametrize("value", ["1", "true", "True", "yes", "ON"])
def test_any_value_but_the_text_true_is_ignored(value):
    row = only(with_variables(to_build(), MAMBA_FORCE_BUILD=value), "mamba-ssm")
    assert row.problem.slug == "variable-ignored"
    assert row.severity is Severity.WARNING
    assert f"MAMBA_FORCE_BUILD={value}" in row.summary
    assert row.fix.commands[0].set == {"MAMBA_FORCE_BUILD": "TRUE"}


@pytest.mark.parametrize("value", ["TRUE", "FALSE", "0", "", "off", "no"])
def test_what_reads_as_it_is_meant_is_no_finding(value):
    assert ids(with_variables(to_build(), MAMBA_FORCE_BUILD=value), "mamba-ssm") == []


def test_the_switches_of_both_packages_are_one_finding():
    values = with_variables(to_build(), MAMBA_FORCE_BUILD="1", CAUSAL_CONV1D_FORCE_BUILD="1")
    row = only(values, "mamba-ssm")
    assert len(row.evidence) == 2
    assert "are ignored" in row.summary
    assert ids(values) == [], "for statescan the variables mean nothing"


def test_max_jobs_that_is_no_number_is_ignored_by_torch():
    assert ids(with_variables(to_build(), MAX_JOBS="4"), "mamba-ssm") == []
    row = only(with_variables(to_build(), MAX_JOBS="four"), "mamba-ssm")
    assert "MAX_JOBS=four" in row.summary


def test_the_skip_switch_is_an_error_before_an_install_and_a_warning_after_it():
    values = with_variables(to_build(), MAMBA_SKIP_CUDA_BUILD="TRUE")
    row = only(values, "mamba-ssm")
    assert (row.problem.slug, row.severity) == ("skip-build-set", Severity.ERROR)
    originals(values)
    assert only(values).severity is Severity.WARNING


def test_an_arch_list_matters_only_where_it_asks_for_what_is_not_built():
    assert (
        ids(with_variables(to_build(), TORCH_CUDA_ARCH_LIST="8.0;8.6 9.0+PTX"), "mamba-ssm") == []
    )
    assert ids(with_variables(to_build(), TORCH_CUDA_ARCH_LIST="Ampere"), "mamba-ssm") == []
    row = only(with_variables(to_build(), TORCH_CUDA_ARCH_LIST="6.1 9.0"), "mamba-ssm")
    assert row.problem.slug == "arch-list-ignored"
    assert "asks for 6.1," in row.summary
    assert "sm_61" in row.fix.commands[0].set["NVCC_APPEND_FLAGS"]


def test_a_runtime_of_the_same_major_version_on_the_library_path_is_fine():
    values = linux()
    originals(values)
    row = {"soname": "libcudart.so.12", "path": "/x/libcudart.so.12", "via": "LD_LIBRARY_PATH"}
    values["libraries.cudart"].insert(0, row)
    assert ids(values) == []
    values["libraries.cudart"][0] = {**row, "soname": "libcudart.so.13"}
    assert ids(values) == ["library-path-other-cuda"]
    values["libraries.cudart"][0]["via"] = "/etc/ld.so.conf"
    assert ids(values) == []


@pytest.mark.parametrize(
    ("encoding", "found"),
    [("cp936", True), ("cp932", True), ("cp1252", False), ("UTF-8", False)],
)
def test_encodings_of_several_bytes_stop_at_utf8(encoding, found):
    values = windows()
    row = {"preferred": encoding, "utf8_mode": False}
    assert ("locale-encoding" in ids(values, "causal-conv1d", system__encoding=row)) is found
    assert ids(values, "causal-conv1d", system__encoding={**row, "utf8_mode": True}) == []


def test_statescan_needs_python_3_10():
    values = laptop()
    use_python(values, "3.9.2")
    row = only(values)
    assert row.problem.slug == "python-version-unsupported"
    assert "3.9.2" in row.summary
    assert "3.10" in row.summary
    assert "3.10" in row.fix.text
    use_python(values, "3.10.0")
    assert ids(values) == []


def test_a_python_without_a_torch_is_the_cause_of_the_missing_torch():
    values = laptop()
    no_torch(values)
    use_python(values, "3.16.0")
    assert ids(values) == ["python-version-unsupported"]
    use_python(values, "3.13.1")
    assert ids(values) == ["torch-missing"]


def test_a_python_that_has_a_torch_is_new_enough_whatever_the_table_says():
    values = laptop()
    use_python(values, "3.16.0")
    assert ids(values) == []


def test_pip_or_uv_is_needed_for_an_install_only():
    values = to_build()
    assert ids(values, "mamba-ssm", python__pip=None) == ["installer-missing"]
    assert ids(values, python__pip=None) == []
    uv = {"version": "0.9.15", "path": "/usr/bin/uv"}
    assert ids(values, "mamba-ssm", python__pip=None, python__uv=uv) == []


def test_the_systems_python_is_closed_unless_that_is_switched_off():
    values = to_build()
    assert ids(values, "mamba-ssm", python__externally_managed=True) == ["externally-managed"]
    assert ids(values, python__externally_managed=True) == []
    with_variables(values, PIP_BREAK_SYSTEM_PACKAGES="1")
    assert ids(values, "mamba-ssm", python__externally_managed=True) == []


def test_a_machine_without_anything_of_cuda_has_one_finding():
    values = laptop()
    (row,) = judge(values, "mamba-ssm")
    assert row.problem.slug == "no-cuda-machine"
    assert "statescan" in row.fix.text
    # A GPU may be passed into a container later: there each thing that is missing is told.
    values = linux()
    no_driver(values)
    no_toolkit(values)
    found = ids(values, "mamba-ssm", system__container="docker")
    assert found == ["nvcc-missing", "gpu-missing"]
