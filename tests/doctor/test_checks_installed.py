# SPDX-License-Identifier: Apache-2.0
"""Checks of installed originals: their modules, each other, what they import, Triton, GPUs."""

from __future__ import annotations

import pytest
from helpers.judging import facts, ids, judge, only
from helpers.machine_parts import (
    H100,
    RTX_3090,
    V100,
    add_module,
    add_package,
    binary,
    install,
    originals,
    remove,
    use_gpu,
    use_torch,
)
from helpers.machines_base import linux, windows

from statescan.doctor import catalog, checks
from statescan.doctor.checks import states
from statescan.doctor.model import Severity


def whole():
    values = linux()
    originals(values)
    return values


def test_a_module_for_another_python_beside_the_right_one_is_no_finding():
    values = whole()
    files = values["extensions.modules"]["selective_scan_cuda"]["files"]
    other = {**files[0]["binary"], "python_tag": "cp39"}
    files.insert(0, {"path": "x", "binary": other, "in_site_packages": True})
    assert ids(values) == []
    del files[1]
    assert ids(values) == ["wheel-tag-mismatch"]


def test_a_module_without_a_report_is_not_judged():
    values = whole()
    values["extensions.modules"]["selective_scan_cuda"]["files"][0]["binary"] = {}
    assert ids(values) == []


def test_code_for_the_gpu_is_looked_for_in_every_module():
    values = whole()
    report = values["extensions.modules"]["causal_conv1d_cuda"]["files"][0]["binary"]
    report["cuda_archs"] = {"cubin": ["sm_90"], "ptx": []}
    row = only(values)
    assert row.problem.slug == "gpu-arch-not-in-binary"
    assert row.packages == ("causal-conv1d",)
    use_gpu(values, RTX_3090, H100)
    assert only(values).severity is Severity.WARNING, "one of the two GPUs is served"


def test_a_module_that_another_project_brings_is_judged_where_nothing_was_named():
    values = whole()
    module = "selective_scan_cuda_oflex"
    add_module(values, module, binary(module, values, archs=["90"]))
    row = only(values)
    assert (row.problem.slug, row.packages) == ("gpu-arch-not-in-binary", ())
    assert ids(values, "mamba-ssm") == []
    for name in ("mamba-ssm", "causal-conv1d"):
        remove(values, name)
    values |= {"extensions.python": {}}
    values["extensions.modules"] = {module: values["extensions.modules"][module]}
    assert ids(values) == ["gpu-arch-not-in-binary"], "also where it is the only one"


def test_a_package_without_its_module():
    values = whole()
    module = values["extensions.modules"]["selective_scan_cuda"]
    module |= {"files": [], "importable": False}
    add_package(values, "mamba_ssm", error="No module named 'selective_scan_cuda'")
    row = only(values)
    assert (row.problem.slug, row.severity) == ("ext-not-built", Severity.ERROR)
    values["packages.installed"]["mamba-ssm"]["version"] = "99.0"
    add_package(values, "mamba_ssm", mamba2="ok")
    use_torch(values, "2.10.0+cu128", "12.8", "3.6.0")
    row = only(values)
    assert row.severity is Severity.WARNING, "newer releases leave it out on purpose"
    assert "MAMBA_KEEP_CUDA_BUILD=TRUE" in row.evidence[0]


def test_an_import_that_fails_for_no_known_reason_is_told_as_it_is():
    values = whole()
    row = values["extensions.modules"]["causal_conv1d_cuda"]
    row |= {"importable": False, "error": "Traceback\nImportError: libextra.so: file too short"}
    add_package(values, "causal_conv1d", error="ImportError: libextra.so: file too short")
    found = only(values)
    assert found.problem.slug == "extension-import-fails"
    assert found.evidence == ("Traceback", "ImportError: libextra.so: file too short")


def test_an_error_that_a_log_would_tell_is_told_with_its_fix():
    values = whole()
    row = values["extensions.modules"]["causal_conv1d_cuda"]
    error = "ImportError: libcudart.so.11.0: cannot open shared object file: No such file"
    row |= {"importable": False, "error": error}
    found = only(values)
    assert found.problem.slug == "extension-import-fails"
    assert found.evidence[-1].startswith("reads like ABI603 cudart-missing")
    assert found.fix.text == catalog.problem("cudart-missing").fix.text


def test_a_package_that_cannot_be_imported_though_its_module_can():
    values = whole()
    add_package(values, "mamba_ssm", error="ModuleNotFoundError: No module named 'einops'")
    row = only(values)
    assert row.problem.slug == "package-import-fails"
    assert "einops" in row.evidence[0]


def test_importable_is_not_yet_usable():
    values = whole()
    add_package(values, "mamba_ssm", selective_scan="ok", layer_norm="out of resources")
    row = only(values)
    assert row.problem.slug == "package-not-usable"
    assert row.evidence == ("layer_norm: out of resources",)
    assert ids(values, torch__cuda_available=None) == [], "without a GPU nothing can compute"


@pytest.mark.parametrize(
    ("mamba", "conv", "found"),
    [
        ("2.2.4", "1.4.0", []),
        ("1.2.0.post1", "1.5.0.post8", []),
        ("2.3.1", "1.5.1", []),
        ("1.1.1", "1.1.3.post1", []),
        ("2.2.5", "1.5.0.post8", ["cc1d-too-old-for-mamba"]),
        ("2.3.1", "1.0.2", ["cc1d-too-old-for-mamba"]),
        ("2.2.4", "1.5.2", ["cc1d-api-mismatch"]),
        ("1.1.1", "1.2.0.post2", ["cc1d-api-mismatch"]),
    ],
)
def test_generations_of_the_pair(mamba, conv, found):
    values = linux()
    originals(values, mamba, conv)
    install(values, transformers="4.44.2")
    assert ids(values) == found
    assert ids(values, "mamba-ssm") == found
    assert ids(values, "causal-conv1d") == [], "the convolution alone works"


@pytest.mark.parametrize(
    ("mamba", "conv", "words"),
    [
        ("2.2.6", "1.4.0", "causal-conv1d=="),
        ("2.2.4", "1.5.2", "causal-conv1d@v1.5.0.post8"),
        ("1.1.1", "1.4.0", "causal-conv1d@v1.1.3.post1"),
    ],
)
def test_the_fix_names_the_newest_convolution_that_fits(mamba, conv, words):
    values = linux()
    originals(values, mamba, conv)
    install(values, transformers="4.44.2")
    (command,) = only(values).fix.commands
    assert words in command.run[-1]
    assert "--no-deps" in command.run


def test_uv_takes_the_place_of_pip_where_there_is_no_pip():
    values = linux()
    originals(values, lacks=("_ZN3c104cuda9SetDeviceEi",))
    uv = {"version": "0.9.15", "path": "/usr/bin/uv"}
    runs = [step.run for step in only(values, python__pip=None, python__uv=uv).fix.commands]
    assert ("uv", "pip", "uninstall", "mamba-ssm", "causal-conv1d") in runs
    assert ("uv", "cache", "clean", "mamba_ssm") in runs
    assert not any("-m" in run for run in runs)
    runs = [step.run for step in only(values, python__uv=uv).fix.commands]
    assert any(run[:3] == ("python", "-m", "pip") for run in runs)


def test_mamba_without_the_convolution_is_a_warning():
    values = whole()
    remove(values, "causal-conv1d")
    del values["extensions.modules"]["causal_conv1d_cuda"]
    del values["extensions.python"]["causal_conv1d"]
    row = only(values)
    assert (row.problem.slug, row.severity) == ("cc1d-missing", Severity.WARNING)


@pytest.mark.parametrize(
    ("mamba", "transformers", "found"),
    [("2.2.4", "5.0.0", True), ("2.2.4", "4.57.1", False), ("2.3.0", "5.0.0", False)],
)
def test_names_that_transformers_removed(mamba, transformers, found):
    values = linux()
    originals(values, mamba, "1.4.0" if mamba == "2.2.4" else "1.6.1")
    install(values, transformers=transformers)
    assert ids(values) == (["transformers-api-removed"] if found else [])


@pytest.mark.parametrize(("ffi", "found"), [("0.1.9", False), ("0.1.10", True)])
def test_packages_of_mamba_3(ffi, found):
    values = whole()
    install(values, tilelang="0.1.8", apache_tvm_ffi=ffi)
    assert ids(values) == (["mamba3-deps"] if found else [])


def test_triton_is_needed_by_mamba_and_not_by_the_convolution():
    values = whole()
    remove(values, "triton")
    add_package(values, "mamba_ssm", error="No module named 'triton'")
    assert ids(values) == ["triton-missing"]
    assert ids(values, "causal-conv1d") == []


def test_triton_of_another_torch_is_a_warning_and_one_too_old_for_the_release_an_error():
    values = whole()
    install(values, triton="3.5.1")
    row = only(values)
    assert (row.problem.slug, row.severity) == ("triton-version", Severity.WARNING)
    assert "torch 2.7.1+cu128 comes with 3.3" in row.summary
    values = whole()
    values["packages.installed"]["mamba-ssm"]["version"] = "2.3.2.post1"
    row = only(values)
    assert (row.problem.slug, row.severity) == ("triton-version", Severity.ERROR)
    assert "3.5.0 or newer" in row.summary


def test_a_torch_between_releases_brings_a_triton_of_its_own():
    values = whole()
    use_torch(values, "2.8.0a0+5228986c39.nv25.06", "12.8", "3.9.0")
    assert ids(values) == []


@pytest.mark.parametrize(("version", "found"), [("4.8.5", True), ("5.4.0", False)])
def test_the_c_compiler_of_triton(version, found):
    values = whole()
    values["compiler.c"]["version"] = version
    assert ids(values) == (["triton-host-compiler"] if found else [])
    assert ids(values, "causal-conv1d") == []


def test_the_link_name_of_libcuda_matters_to_old_triton_only():
    values = whole()
    assert ids(values, driver__link_name=False) == []
    use_torch(values, "2.4.1+cu124", "12.4", "3.0.0", archs=("sm_80", "sm_86"))
    assert ids(values, driver__link_name=False) == ["triton-libcuda-missing"]
    assert ids(values, driver__link_name=None) == [], "nobody looked"


def test_python_headers_are_needed_when_triton_runs():
    values = whole()
    headers = {"folder": "/usr/include/python3.11", "present": False}
    row = only(values, python__headers=headers)
    assert row.problem.slug == "python-headers-missing"
    assert "Triton" in row.summary
    assert ids(values, "causal-conv1d", python__headers=headers) == []


def test_a_driver_serves_its_own_major_version_of_cuda():
    values = whole()
    assert ids(values, driver__cuda="12.0", driver__version="525.60.13") == []
    row = only(values, driver__cuda="11.8", driver__version="520.61.05")
    assert row.problem.slug == "driver-too-old"
    assert "520.61.05" in row.summary
    assert "11.8" in row.summary
    row = only(values, driver__cuda=None, driver__version="470.1")
    assert "525.60.13" in row.summary
    assert row.severity is Severity.ERROR
    row = only(values, "statescan", driver__cuda="11.4")
    assert row.severity is Severity.WARNING, "statescan runs on the CPU"


def test_code_for_the_gpu_in_torch_by_its_list_or_by_its_cuda():
    values = linux()
    use_gpu(values, V100)
    row = only(values)
    assert row.problem.slug == "gpu-arch-not-in-torch"
    assert "compute capability 7.0" in row.summary
    assert row.fix.commands[0].run[-1].endswith("/cu126")
    row = only(values, torch__arch_list=None)
    assert "compute capability 7.5 to 12.1" in row.summary
    use_torch(values, "2.7.1+cu126", "12.6", "3.3.1", archs=("sm_50", "sm_70", "sm_80"))
    assert ids(values) == []
    use_gpu(values, V100, H100)
    assert only(values).severity is Severity.WARNING, "one of the two GPUs is served"


def test_a_gpu_that_torch_does_not_see():
    values = whole()
    changes = {"torch__cuda_available": False, "torch__devices": []}
    row = only(values, **changes)
    assert (row.problem.slug, row.severity) == ("gpu-not-usable", Severity.ERROR)
    row = only(linux(), **changes)
    assert row.severity is Severity.WARNING, "statescan runs on the CPU"
    values["environment.variables"]["CUDA_VISIBLE_DEVICES"] = ""
    row = only(values, **changes)
    assert row.problem.slug == "gpu-missing"
    assert "CUDA_VISIBLE_DEVICES" in row.summary
    plain = linux()
    plain["environment.variables"]["CUDA_VISIBLE_DEVICES"] = "-1"
    assert ids(plain, **changes) == [], "whoever hides the GPUs from statescan means it"


def test_four_words_for_how_far_a_package_gets():
    values = whole()
    add_package(values, "causal_conv1d", error="ImportError")
    add_package(values, "mamba_ssm", selective_scan="ok", layer_norm="no")
    module = "selective_scan_cuda_core"
    add_module(values, module, binary(module, values, archs=["80"]))
    rows = {row["name"]: row for row in states.rows(checks.examine(facts(values)).question)}
    assert list(rows) == ["statescan", "mamba-ssm", "causal-conv1d", module]
    assert set(rows["statescan"].values()) == {"statescan", "0.1.0", "yes"}
    assert rows["mamba-ssm"] == {
        "name": "mamba-ssm",
        "installed": "2.3.1",
        "importable": "yes",
        "loaded": "yes",
        "usable": "in part",
    }
    assert (rows["causal-conv1d"]["loaded"], rows["causal-conv1d"]["usable"]) == ("yes", "no")
    assert rows[module]["usable"] == "not tried"


def test_what_nobody_tried_is_not_called_no():
    values = whole()
    for row in (*values["extensions.python"].values(), *values["extensions.modules"].values()):
        row |= {"importable": None, "usable": {}}
    question = checks.examine(facts(values, statescan__smoke=None), "mamba-ssm").question
    for row in states.rows(question):
        assert {row["importable"], row["loaded"], row["usable"]} == {"not tried"}


def test_windows_has_no_c_compiler_for_triton_to_miss():
    values = windows()
    originals(values, "2.3.1", "1.6.1")
    values["extensions.modules"] = {}
    found = [row.problem.slug for row in judge(values)]
    assert "triton-host-compiler" not in found
    assert "triton-missing" in found
