# SPDX-License-Identifier: Apache-2.0
"""Checks of torch, of what is beside it, and of statescan itself."""

from __future__ import annotations

import pytest
from helpers.judging import ids, only, to_build
from helpers.machine_parts import no_driver, no_torch, originals, remove, use_torch
from helpers.machines_base import laptop, linux

from statescan.doctor.model import Severity


def test_no_torch_is_one_finding_with_the_environment_in_it():
    values = laptop()
    no_torch(values)
    row = only(values)
    assert row.problem.slug == "torch-missing"
    assert "/home/user/venv" in row.summary


@pytest.mark.parametrize(("version", "old"), [("2.3.1", True), ("2.4.0+cpu", False)])
def test_statescan_needs_torch_2_4(version, old):
    values = laptop()
    use_torch(values, version, None, None)
    assert ids(values) == (["torch-too-old"] if old else [])


def test_an_old_torch_is_fine_for_the_originals():
    values = linux()
    use_torch(values, "2.1.2+cu121", "12.1", "2.1.0", abi=False, archs=("sm_80", "sm_86"))
    assert ids(values, "mamba-ssm") == []
    assert ids(values) == ["torch-too-old"]


def test_what_follows_from_a_torch_that_cannot_be_imported_is_not_told():
    values = laptop()
    failed = {"ok": False, "error": "Traceback\nImportError: libcudnn.so.9: cannot", "seconds": 1}
    smoke = {"ok": False, "error": "ImportError", "seconds": 1}
    row = only(values, torch__import=failed, statescan__smoke=smoke)
    assert row.problem.slug == "torch-import-fails"
    assert row.evidence == ("ImportError: libcudnn.so.9: cannot",)


def test_rests_of_a_package_are_a_warning_while_torch_still_works():
    values = laptop()
    row = only(values, packages__invalid=["~orch-2.6.0.dist-info"])
    assert (row.problem.slug, row.severity) == ("package-half-removed", Severity.WARNING)
    assert ids(values, packages__invalid=["~umpy", "~orchvision"]) == []
    failed = {"ok": False, "error": "ImportError: x", "seconds": 1}
    row = only(values, packages__invalid=["~orch"], torch__import=failed)
    assert (row.problem.slug, row.severity) == ("package-half-removed", Severity.ERROR)


def test_rests_of_an_original_count_where_it_is_installed():
    values = linux()
    assert ids(values, packages__invalid=["~amba_ssm"]) == []
    originals(values)
    assert ids(values, packages__invalid=["~amba_ssm-2.2.2.dist-info"]) == ["package-half-removed"]


def test_a_cpu_torch_beside_a_gpu_is_a_warning_for_statescan_and_an_error_for_the_originals():
    values = linux()
    use_torch(values, "2.7.1+cpu", None, None)
    row = only(values)
    assert (row.problem.slug, row.severity) == ("torch-is-cpu-only", Severity.WARNING)
    assert "RTX 3090 is not used" in row.summary
    assert "until then statescan runs on the CPU" in row.fix.text
    assert row.fix.commands[0].run[-1].endswith("/cu128"), "the driver serves CUDA 12.8"
    row = only(values, "mamba-ssm")
    assert (row.problem.slug, row.severity) == ("torch-is-cpu-only", Severity.ERROR)


def test_the_index_of_the_fix_is_one_that_the_driver_serves():
    values = linux()
    use_torch(values, "2.7.1+cpu", None, None)
    row = only(values, driver__cuda="12.6", toolkit__build=None)
    assert row.fix.commands[0].run[-1].endswith("/cu126")
    build = {**values["toolkit.build"], "version": "11.8"}
    row = only(values, toolkit__build=build)
    assert row.fix.commands[0].run[-1].endswith("/cu118"), "the toolkit that is there"


def test_an_amd_gpu_wants_a_rocm_build():
    values = linux()
    no_driver(values)
    amd = {"rocm": "6.3.0", "gpus": ["gfx1100"]}
    row = only(values, driver__amd=amd)
    assert (row.problem.slug, row.severity) == ("cuda-torch-on-amd", Severity.WARNING)
    assert ids(values, driver__amd=amd, torch__hip="6.3.42131") == []
    assert ids(values, "mamba-ssm", driver__amd=amd) == ["cuda-torch-on-amd"]


def test_a_folder_hides_the_installed_package():
    values = linux()
    shadow = [{"module": "mamba_ssm", "path": "/home/user/mamba/mamba_ssm"}]
    assert ids(values, extensions__shadows=shadow) == [], "nothing is installed that it hides"
    originals(values)
    row = only(values, extensions__shadows=shadow)
    assert row.problem.slug == "import-shadowed"
    assert "/home/user/mamba/mamba_ssm" in row.summary
    mine = [{"module": "torch", "path": "/home/user/torch.py"}]
    row = only(linux(), extensions__shadows=mine)
    assert row.packages == ("statescan",)
    assert "another name" in row.fix.text
    other = [{"module": "numpy", "path": "/home/user/numpy"}]
    assert ids(values, extensions__shadows=other) == []


def test_a_module_in_the_current_folder_hides_the_installed_one():
    values = linux()
    originals(values)
    files = values["extensions.modules"]["selective_scan_cuda"]["files"]
    files.insert(0, {**files[0], "path": "/clone/x.so", "in_site_packages": False})
    row = only(values)
    assert row.problem.slug == "import-shadowed"
    assert row.evidence == ("/clone/x.so",)
    del files[1]
    assert ids(values) == [], "an in-place build of a clone hides nothing"


def test_a_build_without_isolation_needs_its_tools_and_ninja_only_for_speed():
    values = to_build()
    remove(values, "wheel", "packaging")
    row = only(values, "mamba-ssm")
    assert (row.problem.slug, row.severity) == ("build-deps-missing", Severity.ERROR)
    assert "lacks wheel, packaging in" in row.summary
    values = to_build()
    remove(values, "ninja")
    row = only(values, "mamba-ssm", compiler__ninja=None)
    assert (row.problem.slug, row.severity) == ("build-deps-missing", Severity.WARNING)
    assert "one file at a time" in row.summary
    values = linux()
    remove(values, "ninja")
    assert ids(values, "mamba-ssm", compiler__ninja=None) == [], "a wheel is published"


def test_a_c_library_that_was_not_built_is_a_choice_and_a_damaged_one_is_not():
    values = laptop()
    for reason in (
        "STATESCAN_PURE is set",
        "_cpu.so was not built with this install (looked in x)",
    ):
        assert ids(values, statescan__native={"error": reason}) == []
    row = only(values, statescan__native={"error": "_cpu.so: invalid ELF header"})
    assert (row.problem.slug, row.severity) == ("native-library-broken", Severity.WARNING)
    assert row.evidence == ("_cpu.so: invalid ELF header",)


def test_a_forced_backend_must_exist_and_run():
    values = laptop()
    for forced, words in (("cuda", "no CUDA driver"), ("metal", "no such backend")):
        values["environment.variables"]["STATESCAN_BACKEND"] = forced
        row = only(values, statescan__smoke={"ok": False, "error": "raised", "seconds": 1})
        assert row.problem.slug == "backend-forced-unusable"
        assert words in row.summary
        assert row.evidence == ("usable: cpu, torch, reference",)
    for forced in ("", "auto", "CPU", "torch"):
        values["environment.variables"]["STATESCAN_BACKEND"] = forced
        assert ids(values) == []


def test_the_test_computation_counts_for_statescan_alone():
    values = linux()
    smoke = {"ok": False, "error": "Traceback\n  line\nAssertionError: off by 0.3", "seconds": 1}
    row = only(values, statescan__smoke=smoke)
    assert row.problem.slug == "smoke-test-failed"
    assert row.evidence[-1] == "AssertionError: off by 0.3"
    assert ids(values, "mamba-ssm", statescan__smoke=smoke) == []
