# SPDX-License-Identifier: Apache-2.0
"""On recorded machines the doctor finds what is wrong, only that, and nothing on healthy ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import make_machines
from helpers.machine_parts import MACHINES

from statescan.doctor import checks
from statescan.doctor.facts.names import NAMES
from statescan.doctor.model import Facts, Severity

MARKS = {Severity.ERROR: "", Severity.WARNING: "?", Severity.INFO: "i"}

EXPECTED: dict[str, tuple[str, str, str, str]] = {
    "aarch64-with-x86-module": ("WHL403", "", "WHL403", "WHL403"),
    "backend-forced": ("SST102", "SST102", "GPU913", "GPU913"),
    "bare-venv": ("ENV311", "ENV311", "ENV311", "ENV311"),
    "centos7-gcc48": ("", "", "CC201", "CC201"),
    "conda-nvcc-without-headers": ("", "", "TK106", "TK106"),
    "container-without-gpus": ("GPU911?", "", "GPU911?", "GPU911?"),
    "conv-missing": ("API706?", "", "API706?", ""),
    "conv-too-old-for-mamba": ("API705", "", "API705", ""),
    "cuda-home-list": ("", "", "TK102", "TK102"),
    "cudart-11-module": ("ABI603", "", "ABI603", "ABI603"),
    "cxx11-abi-old-torch": ("ABI602", "", "ABI602", "ABI602"),
    "debian-system-python": ("", "", "ENV326", "ENV326"),
    "driver-too-old": ("GPU903", "GPU903?", "GPU903", "GPU903"),
    "gcc-14-nvcc-121": ("", "", "CC202", "CC202"),
    "gh200-aarch64": ("", "", "", ""),
    "glibc-too-old": ("ABI604", "", "ABI604", "ABI604"),
    "gtx-1080-ti": ("", "", "GPU901", "GPU901"),
    "half-removed-torch": ("ENV314", "ENV314", "ENV314", "ENV314"),
    "healthy-cpu-laptop": ("", "", "GPU913", "GPU913"),
    "healthy-gpu": ("", "", "", ""),
    "laptop-with-cuda-torch": ("", "", "GPU913", "GPU913"),
    "library-path-cuda-11": ("ENV324?", "", "ENV324?", "ENV324?"),
    "libstdcxx-old-in-conda": ("ABI605", "", "ABI605", "ABI605"),
    "little-memory": ("", "", "RES501?", ""),
    "mac-arm64": ("", "", "PLT103", "PLT103"),
    "module-left-out": ("API701", "", "API701", ""),
    "musl-alpine": ("PLT111", "PLT111", "PLT111", "PLT111"),
    "native-library-damaged": ("SST101?", "SST101?", "GPU913", "GPU913"),
    "ngc-container": ("", "", "", ""),
    "no-disk": ("", "", "RES503", "RES503"),
    "no-python-headers": ("CC205", "", "CC205", ""),
    "nvcc-10-of-distribution": ("", "", "TK103", "TK103"),
    "nvcc-missing": ("", "", "TK101", "TK101"),
    "nvcc-off-path": ("", "", "TK101", "TK101"),
    "old-triton-without-libcuda-link": ("TRI803", "", "TRI803", ""),
    "pure-install": ("", "", "GPU913", "GPU913"),
    "python-314": ("", "", "", ""),
    "python-315-without-torch": ("ENV305", "ENV305", "ENV305", "ENV305"),
    "python-39": ("ENV305", "ENV305", "", ""),
    "rocm-with-cuda-torch": ("PLT113?", "PLT113?", "PLT113", "PLT113"),
    "rocm": ("", "", "", ""),
    "rtx-5090-nvcc-124": ("", "", "TK105", "TK105"),
    "rtx-5090-on-old-torch": ("GPU902", "GPU902", "GPU902", "GPU902"),
    "shadowing-clone": ("API703", "", "API703", ""),
    "skip-build-set": ("", "", "ENV322", ""),
    "slim-container-running": ("TRI802", "", "TRI802", ""),
    "slim-container": ("", "", "TK101 TRI802", "TK101"),
    "smoke-test-fails": ("SST103", "SST103", "GPU913", "GPU913"),
    "stale-wheel-cache": ("", "", "RES511?", ""),
    "switch-is-1": ("", "", "ENV321?", ""),
    "tiny-memory-container": ("", "", "RES501", "RES501"),
    "torch-cpu-on-gpu": ("ENV304?", "ENV304?", "ENV304", "ENV304"),
    "torch-import-fails": ("ENV313", "ENV313", "ENV313", "ENV313"),
    "torch-upgraded": ("ABI601", "", "TK101 ABI601", "TK101 ABI601"),
    "transformers-5": ("API707", "", "API707", ""),
    "two-cudas-wrong-first": ("", "", "TK104", "TK104"),
    "uv-venv-without-tools": ("", "", "ENV303", "ENV303"),
    "v100-on-new-build": ("GPU901", "", "GPU901", "GPU901"),
    "v100-on-new-torch": ("GPU902", "GPU902", "GPU902", "GPU902"),
    "v100-source-build": ("", "", "GPU901?", "GPU901?"),
    "vmamba-modules": ("", "", "", ""),
    "windows-msvc-too-new": ("", "", "CC207 ENV307?", "CC207 ENV307?"),
    "windows-without-msvc": ("", "", "CC206", "CC206"),
    "wsl2-healthy": ("", "", "", ""),
    "wsl2-without-driver": ("PLT112", "", "PLT112", "PLT112"),
}
"""Findings by machine, for no named package, statescan, mamba-ssm and causal-conv1d; "?" marks a
warning."""

HEALTHY = [name for name, found in EXPECTED.items() if not any(found)]

QUESTIONS = (None, "statescan", "mamba-ssm", "causal-conv1d")


def read(name: str) -> Facts:
    return Facts.read(make_machines.FOLDER / f"{name}.json")


def found(facts: Facts, package: str | None) -> str:
    rows = checks.run(facts, package)
    return " ".join(row.problem.code + MARKS[row.severity] for row in rows)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("package", QUESTIONS)
def test_exactly_these_findings(name, package):
    assert found(read(name), package) == EXPECTED[name][QUESTIONS.index(package)]


def test_every_machine_is_expected_and_every_file_is_what_the_builder_writes():
    files = {path.stem: path for path in Path(make_machines.FOLDER).glob("*.json")}
    assert set(files) == set(MACHINES) == set(EXPECTED)
    assert len(files) >= 28
    for name, path in files.items():
        assert path.read_text(encoding="utf-8") == make_machines.text(name), name


@pytest.mark.parametrize("name", EXPECTED)
def test_the_machine_is_whole(name):
    """Every fact that a probe sets is there, so that no check is skipped for lack of it."""
    facts = read(name)
    rows = {fact.name for fact in facts}
    assert rows <= set(NAMES)
    results = checks.examine(facts, "mamba-ssm").results
    assert [row.reason for row in results if row.reason.startswith("nothing is known")] == []


def test_what_is_healthy_has_the_usual_kinds():
    """Without these a change that always finds something would pass unseen."""
    assert {"healthy-gpu", "wsl2-healthy", "ngc-container", "gh200-aarch64", "python-314"} <= set(
        HEALTHY
    )
    for_statescan = {name for name, row in EXPECTED.items() if not row[1]}
    assert {"healthy-cpu-laptop", "mac-arm64", "slim-container", "rocm"} <= for_statescan


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_is_healthy_without_what_only_an_import_tells(name):
    document = json.loads((make_machines.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    rows = document["facts"]
    silent = ("torch.import", "torch.arch_list", "torch.devices", "torch.cuda_available")
    for fact in (*silent, "extensions.python", "statescan.smoke", "statescan.backends"):
        rows[fact]["value"] = None
    for module in rows["extensions.modules"]["value"].values():
        module["importable"] = None
    facts = Facts.from_json(document)
    for package in QUESTIONS:
        assert found(facts, package) == ""


def test_no_facts_at_all_are_no_cause_for_alarm():
    assert checks.run(Facts()) == []
    assert checks.run(Facts(), "mamba-ssm") == []
