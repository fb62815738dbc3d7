# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch
from helpers import binaries

from statescan.doctor.model import Fact, Facts, Severity
from statescan.doctor.symbols import judge, report, torch_files
from statescan.errors import ArgumentError

MACHINE = {
    "system.os": "linux",
    "system.machine": "x86_64",
    "system.libc": {"kind": "glibc", "version": "2.35"},
    "python.tag": "cp311",
    "python.version": "3.11.7",
    "libraries.libstdcxx": [
        {"path": "/usr/lib/libstdc++.so.6", "glibcxx": "3.4.30", "cxxabi": "1.3.13"}
    ],
    "torch.version": "2.6.0+cu124",
    "torch.cuda": "12.4",
    "torch.cxx11_abi": False,
    "driver.gpus": [{"name": "NVIDIA A100", "capability": "8.0"}],
}
BINARY = {
    "path": f"/site/{binaries.MODULE}",
    "module": "selective_scan_cuda",
    "format": "elf",
    "machine": "x86_64",
    "needed": ["libc10.so", "libtorch_cuda.so", "libcudart.so.12", "libc.so.6"],
    "runpath": [],
    "soname": "",
    "version_needs": {
        "libc.so.6": ["GLIBC_2.2.5", "GLIBC_2.34"],
        "libstdc++.so.6": ["GLIBCXX_3.4.21", "CXXABI_1.3.9"],
    },
    "undefined_torch": [binaries.SET_DEVICE_CHAR, binaries.OLD_CHECK],
    "cxx11_abi": False,
    "torch_generation": {"first": "2.3", "last": "2.7", "because": []},
    "cuda_archs": {"cubin": ["sm_70", "sm_80"], "ptx": []},
    "python_tag": "cp311",
    "cudart": "12",
    "links_torch": True,
}


def facts(**changes) -> Facts:
    values = {**MACHINE, **{name.replace("__", "."): value for name, value in changes.items()}}
    return Facts({name: Fact(name, value, "a test") for name, value in values.items()})


def found(binary=None, **changes) -> list[tuple[str, str]]:
    """Slugs and severities for a saved report and facts with these changes."""
    rows = judge.judge({**BINARY, **(binary or {})}, facts(**changes))
    return [(row.problem.slug, row.severity.value) for row in rows]


def test_a_fitting_binary_has_no_finding():
    assert found() == []


def test_a_report_of_the_least_form_is_enough():
    # What other parts of the doctor save has no more than these.
    assert judge.judge(BINARY, Facts()) == []


@pytest.mark.parametrize(
    ("binary", "changes", "slugs"),
    [
        ({"machine": "aarch64"}, {}, ["wheel-wrong-cpu-arch"]),
        ({"format": "pe", "machine": "amd64"}, {}, ["wheel-tag-mismatch"]),
        ({"format": "pe", "machine": "amd64"}, {"system__os": "windows"}, []),
        (
            {"format": "pe", "machine": "amd64"},
            {"system__os": "windows", "system__machine": "amd64"},
            [],
        ),
        ({"python_tag": "cp310"}, {}, ["wheel-tag-mismatch"]),
        ({"python_tag": "cp313"}, {"python__tag": "cp313t"}, ["wheel-tag-mismatch"]),
        ({"python_tag": "abi3"}, {}, []),
        ({"python_tag": "abi3"}, {"python__tag": "cp313t"}, ["wheel-tag-mismatch"]),
        ({"python_tag": None}, {}, []),
        ({}, {"system__libc": {"kind": "glibc", "version": "2.31"}}, ["glibc-too-old"]),
        ({}, {"system__libc": {"kind": "glibc", "version": "2.4"}}, ["glibc-too-old"]),
        ({}, {"system__libc": {"kind": "musl", "version": "1.2.4"}}, ["glibc-too-old"]),
        (
            {},
            {"libraries__libstdcxx": [{"path": "/old", "glibcxx": "3.4.19", "cxxabi": "1.3.7"}]},
            ["libstdcxx-too-old"],
        ),
        (
            {},
            {"libraries__libstdcxx": [{"path": "/a", "glibcxx": "3.4.28", "cxxabi": "1.3.8"}]},
            ["libstdcxx-too-old"],
        ),
        ({}, {"torch__cuda": "11.8", "torch__version": "2.6.0+cu118"}, ["cudart-missing"]),
        ({}, {"torch__cuda": None, "torch__version": "2.6.0+cpu"}, ["torch-is-cpu-only"]),
        ({}, {"torch__cxx11_abi": True}, ["cxx11-abi-mismatch"]),
        ({}, {"torch__cxx11_abi": None}, []),
        ({}, {"torch__version": "2.8.0+cu128", "torch__cuda": "12.8"}, ["torch-abi-mismatch"]),
        ({}, {"torch__version": "2.2.2+cu121", "torch__cuda": "12.1"}, ["torch-abi-mismatch"]),
        (
            {},
            {"torch__version": "2.10.0+cu128", "torch__cuda": "12.8", "torch__cxx11_abi": True},
            ["cxx11-abi-mismatch", "torch-abi-mismatch"],
        ),
        ({}, {"torch__version": None, "torch__cuda": None}, ["library-missing"]),
        ({}, {"driver__gpus": [{"name": "H100", "capability": "9.0"}]}, ["gpu-arch-not-in-binary"]),
        (
            {"cuda_archs": {"cubin": ["sm_80"], "ptx": ["compute_80"]}},
            {"driver__gpus": [{"name": "H100", "capability": "9.0"}]},
            [],
        ),
        (
            {"cuda_archs": {"cubin": [], "ptx": []}},
            {"driver__gpus": [{"name": "H100", "capability": "9.0"}]},
            [],
        ),
        ({}, {"driver__gpus": []}, []),
        ({"problem": "x.so is cut off or damaged: no end."}, {}, ["binary-damaged"]),
        # For another Python or CPU nothing is loaded, so the rest is of no interest.
        (
            {"machine": "aarch64", "python_tag": "cp39"},
            {"torch__cuda": "11.8"},
            ["wheel-wrong-cpu-arch"],
        ),
    ],
)
def test_findings(binary, changes, slugs):
    assert found(binary, **changes) == [(slug, "error") for slug in slugs]


def test_one_of_two_gpus_without_code_is_a_warning():
    gpus = [{"name": "A100", "capability": "8.0"}, {"name": "H100", "capability": "9.0"}]
    assert found(driver__gpus=gpus) == [("gpu-arch-not-in-binary", "warning")]


def test_a_second_cuda_runtime_that_is_there_is_a_warning():
    seen = [{"soname": "libcudart.so.12", "path": "/usr/local/cuda/lib64/libcudart.so.12"}]
    rows = found(torch__cuda="11.8", torch__version="2.6.0+cu118", libraries__cudart=seen)
    assert rows == [("cudart-missing", "warning")]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"torch__version": "2.8.0+cu128", "torch__cuda": "12.8"},
            f"{binaries.MODULE} was built for torch 2.3 to 2.7, "
            "and torch 2.8.0+cu128 is installed.",
        ),
        (
            {"torch__cuda": "11.8", "torch__version": "2.6.0+cu118"},
            f"{binaries.MODULE} needs the CUDA runtime 12 (libcudart.so.12), "
            "and the installed torch 2.6.0+cu118 is for CUDA 11.8.",
        ),
        (
            {"system__libc": {"kind": "glibc", "version": "2.31"}},
            f"{binaries.MODULE} needs glibc 2.34, and this system has 2.31.",
        ),
        ({}, f"{binaries.MODULE}: nothing that the facts tell speaks against it."),
    ],
)
def test_the_verdict_is_one_sentence(changes, sentence):
    rows = judge.judge(BINARY, facts(**changes))
    assert judge.verdict(BINARY, rows) == sentence


def test_the_fix_is_for_the_package_of_the_module():
    (row,) = judge.judge(BINARY, facts(torch__cxx11_abi=True))
    assert row.packages == ("mamba-ssm",)
    other = {**BINARY, "module": "causal_conv1d_cuda"}
    (row,) = judge.judge(other, facts(torch__cxx11_abi=True))
    assert row.packages == ("causal-conv1d",)


def test_the_fix_for_a_package_of_others_builds_neither_of_the_two():
    other = {**BINARY, "module": "_C"}
    (row,) = judge.judge(other, facts(torch__cxx11_abi=True))
    assert row.packages == ()
    assert "mamba" not in json.dumps(row.fix.to_json())
    assert row.fix.text


def test_findings_of_saved_facts_survive_json():
    saved = Facts.from_json(json.loads(json.dumps(facts(torch__cxx11_abi=True).to_json())))
    document = json.loads(json.dumps([row.to_json() for row in judge.judge(BINARY, saved)]))
    assert [row["id"] for row in document] == ["cxx11-abi-mismatch"]


# From here on with compiled files and a folder laid out like an installed torch.


@pytest.fixture(scope="module")
def old_torch(tmp_path_factory) -> Path:
    """A CUDA build of an older torch: integer device numbers, old strings."""
    return binaries.fake_torch(
        tmp_path_factory.mktemp("old") / "site",
        version="2.1.2+cu121",
        cuda="12.1",
        symbols={
            "libc10_cuda.so": [binaries.SET_DEVICE_INT],
            "libtorch_cuda.so": ["_ZN2at4cuda1xEv"],
        },
    )


@pytest.fixture(scope="module")
def cpu_torch(tmp_path_factory) -> Path:
    return binaries.fake_torch(tmp_path_factory.mktemp("cpu") / "site")


def judged(path: Path, folder: Path) -> list[str]:
    """Slugs for a file against the torch in a folder, on this machine otherwise."""
    described = torch_files.facts(folder)
    known = {**{fact.name: fact for fact in facts()}, **described}
    known.pop("system.libc")
    rows = judge.judge(report.read(path, torch_files.libraries(folder)), Facts(known))
    assert all(row.severity is Severity.ERROR for row in rows)
    return [row.problem.slug for row in rows]


def libraries(folder: Path, *names: str) -> list[Path]:
    return [folder / "lib" / name for name in names]


def test_an_extension_for_this_torch_fits(tmp_path, old_torch):
    wants = [binaries.SET_DEVICE_INT, binaries.OLD_CHECK, binaries.EMPTY_TENSOR]
    needs = libraries(old_torch, "libc10.so", "libc10_cuda.so", "libtorch_cpu.so")
    options = [f"-Wl,-rpath,{old_torch / 'lib'}"]
    path = binaries.extension(tmp_path / binaries.MODULE, wants, needs, options)
    assert judged(path, old_torch) == []
    found_here = report.read(path, torch_files.libraries(old_torch))
    assert judge.verdict(found_here, []) == (
        f"{binaries.MODULE} loads here: every library and symbol that it needs is there."
    )


def test_a_newer_extension_against_an_older_torch(tmp_path, old_torch):
    needs = libraries(old_torch, "libc10.so", "libc10_cuda.so")
    wants = [binaries.SET_DEVICE_CHAR, binaries.OLD_CHECK]
    options = [f"-Wl,-rpath,{old_torch / 'lib'}"]
    path = binaries.extension(tmp_path / binaries.MODULE, wants, needs, options)
    assert judged(path, old_torch) == ["torch-abi-mismatch"]
    (row,) = judge.judge(
        report.read(path, torch_files.libraries(old_torch)),
        facts(torch__version="2.1.2+cu121", torch__cuda="12.1"),
    )
    assert row.summary.endswith(
        "was built for torch 2.3 to 2.7, and torch 2.1.2+cu121 is installed."
    )
    assert "c10::cuda::SetDevice(signed char)" in row.evidence[0]


def test_the_other_strings(tmp_path, old_torch):
    needs = libraries(old_torch, "libc10.so")
    path = binaries.extension(tmp_path / binaries.MODULE, [binaries.NEW_CHECK], needs)
    assert judged(path, old_torch) == ["cxx11-abi-mismatch"]


def test_only_cuda_symbols_are_missing(tmp_path, old_torch, cpu_torch):
    wants = [binaries.SET_DEVICE_INT, binaries.OLD_CHECK]
    needs = libraries(old_torch, "libc10.so", "libc10_cuda.so")
    path = binaries.extension(tmp_path / binaries.MODULE, wants, needs)
    assert judged(path, cpu_torch) == ["torch-is-cpu-only"]


def test_a_cpu_torch_of_another_version_is_two_problems(tmp_path, old_torch, cpu_torch):
    wants = [binaries.SET_DEVICE_INT, binaries.OLD_CHECK, "_ZN3c1014not_there_evenEv"]
    needs = libraries(old_torch, "libc10.so", "libc10_cuda.so")
    path = binaries.extension(tmp_path / binaries.MODULE, wants, needs)
    assert judged(path, cpu_torch) == ["torch-is-cpu-only", "torch-abi-mismatch"]


def test_a_look_outweighs_what_names_suggest(tmp_path, cpu_torch):
    # A name of torch 2.3 to 2.7 that this older torch has all the same.
    path = binaries.extension(
        tmp_path / binaries.MODULE, [binaries.OLD_CHECK], libraries(cpu_torch, "libc10.so")
    )
    found_here = report.read(path, torch_files.libraries(cpu_torch))
    found_here["torch_generation"] = {"first": "2.3", "last": "2.7", "because": []}
    rows = judge.judge(found_here, facts(torch__version="2.1.2+cu121", torch__cuda="12.1"))
    assert rows == []


def test_a_symbol_that_does_not_exist(tmp_path, cpu_torch):
    needs = libraries(cpu_torch, "libc10.so")
    path = binaries.extension(tmp_path / binaries.MODULE, ["selective_scan_launch"], needs)
    assert judged(path, cpu_torch) == ["symbol-missing"]


def test_a_library_that_is_not_named(tmp_path, cpu_torch):
    needs = libraries(cpu_torch, "libtorch_cpu.so")
    path = binaries.extension(tmp_path / binaries.MODULE, [binaries.OLD_CHECK], needs)
    assert judged(path, cpu_torch) == ["symbol-missing"]


def test_a_library_that_is_nowhere(tmp_path, cpu_torch):
    gone = binaries.library(tmp_path / "libextra.so.3", ["extra"])
    path = binaries.extension(tmp_path / binaries.MODULE, ["extra"], [gone])
    gone.unlink()
    assert judged(path, cpu_torch) == ["library-missing"]


def test_a_library_that_torch_no_longer_has(tmp_path, old_torch):
    gone = binaries.library(tmp_path / "libtorch_cuda_cu.so", ["_ZN2at4cuda4goneEv"])
    needs = [gone, *libraries(old_torch, "libc10.so")]
    path = binaries.extension(tmp_path / binaries.MODULE, ["_ZN2at4cuda4goneEv"], needs)
    gone.unlink()
    assert judged(path, old_torch) == ["torch-abi-mismatch"]


def test_the_cuda_runtime_of_nvidias_wheel_comes_with_torch(tmp_path):
    site = tmp_path / "site"
    folder = binaries.fake_torch(site, version="2.1.2+cu121", cuda="12.1")
    cudart = binaries.library(
        site / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12", ["cudaLaunchKernel"]
    )
    binaries.extension(
        folder / "lib" / "libtorch_global_deps.so",
        needs=[cudart],
        options=["-Wl,-rpath,$ORIGIN/../../nvidia/cuda_runtime/lib"],
    )
    needs = [cudart, *libraries(folder, "libc10.so")]
    path = binaries.extension(tmp_path / binaries.MODULE, ["cudaLaunchKernel"], needs)
    rows = report.read(path, torch_files.libraries(folder))["libraries"]
    states = {row["name"]: row["status"] for row in rows}
    # A machine with this CUDA runtime in its own folders has it without torch as well.
    assert states["libcudart.so.12"] in ("after-torch", "found")
    assert judged(path, folder) == []


def test_a_cuda_runtime_that_is_nowhere(tmp_path, old_torch):
    cudart = binaries.library(tmp_path / "libcudart.so.12", ["cudaLaunchKernel"])
    needs = [cudart, *libraries(old_torch, "libc10.so")]
    path = binaries.extension(tmp_path / binaries.MODULE, ["cudaLaunchKernel"], needs)
    cudart.unlink()
    if any(
        row["status"] == "found"
        for row in report.read(path)["libraries"]
        if row["name"] == "libcudart.so.12"
    ):
        pytest.skip("this machine has a CUDA 12 runtime where the loader finds it")
    assert judged(path, old_torch) == ["cudart-missing"]


def test_a_cuda_runtime_of_another_major(tmp_path, old_torch):
    cudart = binaries.library(tmp_path / "libcudart.so.11.0", ["cudaLaunchKernel"])
    needs = [cudart, *libraries(old_torch, "libc10.so")]
    path = binaries.extension(tmp_path / binaries.MODULE, ["cudaLaunchKernel"], needs)
    cudart.unlink()
    assert judged(path, old_torch) == ["cudart-missing"]


def test_a_libstdcxx_that_is_too_old(tmp_path, cpu_torch):
    script = tmp_path / "versions"
    script.write_text("GLIBCXX_3.4.99 { global: coming; };")
    stub = binaries.library(
        tmp_path / "stub" / "libstdc++.so.6", ["coming"], f"-Wl,--version-script={script}"
    )
    path = binaries.extension(tmp_path / binaries.MODULE, ["coming"], [stub])
    # The unversioned name is absent as well, of course; the version is the cause.
    assert judged(path, cpu_torch)[0] == "libstdcxx-too-old"


def test_a_file_patched_to_another_cpu(tmp_path, cpu_torch):
    path = binaries.extension(tmp_path / binaries.MODULE, [], libraries(cpu_torch, "libc10.so"))
    data = bytearray(path.read_bytes())
    data[18] = 183
    path.write_bytes(data)
    assert judged(path, cpu_torch) == ["wheel-wrong-cpu-arch"]


def test_a_torch_folder_is_read(old_torch, cpu_torch, tmp_path):
    values = {name: fact.value for name, fact in torch_files.facts(old_torch).items()}
    assert values["torch.version"] == "2.1.2+cu121"
    assert values["torch.cuda"] == "12.1"
    assert values["torch.hip"] is None
    assert values["torch.cxx11_abi"] is False
    assert set(values["torch.libraries"]) == {
        *("libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_cuda.so"),
        "libtorch_python.so",
    }
    assert torch_files.facts(cpu_torch)["torch.cuda"].value is None
    for given in (old_torch, old_torch.parent, old_torch / "lib"):
        assert torch_files.locate(given) == old_torch
    with pytest.raises(ArgumentError, match="no libraries of torch"):
        torch_files.locate(tmp_path)


def test_missing_symbols_of_given_libraries(tmp_path, old_torch):
    wants = [binaries.SET_DEVICE_INT, binaries.SET_DEVICE_CHAR]
    path = binaries.extension(tmp_path / "x.so", wants)
    found_here = report.report(path, {}, look=False)
    assert found_here["missing"] is None
    (row,) = judge.missing_symbols(found_here, torch_files.libraries(old_torch))
    assert row["symbol"] == binaries.SET_DEVICE_CHAR
    assert row["readable"] == "c10::cuda::SetDevice(signed char)"
    assert row["cuda_only"] is True
    assert "signed char" in row["meaning"]


def test_an_extension_for_the_torch_of_this_process_loads(tmp_path):
    folder = Path(torch.__file__).parent
    needs = libraries(folder, "libc10.so", "libtorch_cpu.so")
    check = binaries.NEW_CHECK if torch.compiled_with_cxx11_abi() else binaries.OLD_CHECK
    other = binaries.OLD_CHECK if check is binaries.NEW_CHECK else binaries.NEW_CHECK
    good = binaries.extension(tmp_path / "good.so", [check], needs)
    found_here = report.read(good)
    assert found_here["missing"]["torch"] == []
    assert found_here["cxx11_abi"] is torch.compiled_with_cxx11_abi()
    assert torch_files.cxx11_abi(torch_files.libraries(folder)) is torch.compiled_with_cxx11_abi()
    torch.ops.load_library(str(good))
    bad = binaries.extension(tmp_path / "bad.so", [other], needs)
    assert [row["symbol"] for row in report.read(bad)["missing"]["torch"]] == [other]
    with pytest.raises(OSError, match=r"bad\.so"):
        torch.ops.load_library(str(bad))
