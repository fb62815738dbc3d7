# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess

import pytest
from helpers import binaries

from statescan.doctor.symbols import report
from statescan.doctor.symbols.gpu_code import of_machine, runs_on

NONE = {"cubin": [], "ptx": []}


def archs(path):
    return report.report(path, {}, look=False)["cuda_archs"]


@pytest.mark.parametrize("section", [".nv_fatbin", "__nv_relfatbin"])
@pytest.mark.parametrize("compressed", [False, True])
def test_targets_of_a_fat_binary(tmp_path, section, compressed):
    content = binaries.fat_binary(
        ["90", "80", "90a", "100f", "120"], ["120", "90a"], compressed=compressed
    )
    code = binaries.gpu_section(tmp_path, content, section)
    path = binaries.extension(tmp_path / "gpu.so", assembly=code)
    assert archs(path) == {
        "cubin": ["sm_80", "sm_90", "sm_90a", "sm_100f", "sm_120"],
        "ptx": ["compute_90a", "compute_120"],
    }


def test_several_fat_binaries_in_one_section(tmp_path):
    parts = [binaries.fat_binary([arch]) for arch in ("70", "75", "86")]
    content = b"".join(part + bytes(8) for part in parts)
    path = binaries.extension(tmp_path / "gpu.so", assembly=binaries.gpu_section(tmp_path, content))
    assert archs(path) == {"cubin": ["sm_70", "sm_75", "sm_86"], "ptx": []}


def test_a_file_without_section_headers_is_searched(tmp_path):
    code = binaries.gpu_section(tmp_path, binaries.fat_binary(["80"], ["80"]))
    path = binaries.extension(tmp_path / "gpu.so", assembly=code)
    data = bytearray(path.read_bytes())
    data[0x28:0x30] = bytes(8)
    data[0x3A:0x40] = bytes(6)
    path.write_bytes(data)
    assert archs(path) == {"cubin": ["sm_80"], "ptx": ["compute_80"]}


def test_no_gpu_code(tmp_path):
    assert archs(binaries.extension(tmp_path / "cpu.so")) == NONE


def test_the_magic_number_by_chance_is_no_code(tmp_path):
    content = b"\x50\xed\x55\xba" * 20
    path = binaries.extension(tmp_path / "x.so", assembly=binaries.gpu_section(tmp_path, content))
    assert archs(path) == NONE


def test_amd_targets(tmp_path):
    targets = b"host-x86_64-unknown-linux-- hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+ x--gfx1100\0"
    content = b"__CLANG_OFFLOAD_BUNDLE__" + bytes(8) + targets
    code = binaries.gpu_section(tmp_path, content, ".hip_fatbin")
    path = binaries.extension(tmp_path / "amd.so", assembly=code)
    assert report.report(path, {}, look=False)["amd_archs"] == ["gfx1100", "gfx90a:sramecc+"]


def test_windows_files_have_the_same_code_in_a_shorter_name(tmp_path):
    data = binaries.windows_library({"c10.dll": ["x"]})
    path = tmp_path / "x.cp311-win_amd64.pyd"
    # The one section gets the compiler's name, and its free space the code.
    content = binaries.fat_binary(["86"])
    place = len(data)
    data = data.replace(b".rdata\0\0", b".nv_fatb").ljust(place + 512, b"\0")
    at = data.index(b".nv_fatb")
    size = (place - 0x400 + 512).to_bytes(4, "little")
    data = bytearray(data[: at + 16] + size + data[at + 20 :])
    data[place : place + len(content)] = content
    path.write_bytes(data)
    assert archs(path) == {"cubin": ["sm_86"], "ptx": []}


def test_what_nvcc_makes(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc to compile GPU code with; the written fat binaries stand in")
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel(float *x) { x[threadIdx.x] *= 2; }\n")
    path = tmp_path / "real.so"
    done = subprocess.run(
        [
            *(nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "-o", path, source),
            *("-gencode", "arch=compute_80,code=sm_80"),
            *("-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]"),
        ],
        *(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"this nvcc cannot make sm_80 and sm_90a: {done.stderr.strip()[:200]}")
    assert archs(path) == {"cubin": ["sm_80", "sm_90a"], "ptx": ["compute_90a"]}


@pytest.mark.parametrize(
    ("cubin", "ptx", "gpu", "how"),
    [
        (["sm_80"], [], (8, 0), "cubin"),
        (["sm_80"], [], (8, 6), "cubin"),
        (["sm_86"], [], (8, 0), None),
        (["sm_80"], [], (9, 0), None),
        (["sm_80"], ["compute_80"], (9, 0), "ptx"),
        (["sm_80"], ["compute_90"], (8, 6), "cubin"),
        ([], ["compute_90"], (8, 6), None),
        (["sm_62"], [], (6, 1), None),
        (["sm_60"], [], (6, 1), "cubin"),
        (["sm_90a"], [], (9, 0), "cubin"),
        (["sm_100a"], [], (10, 3), None),
        (["sm_100f"], [], (10, 3), "cubin"),
        (["sm_100"], [], (12, 0), None),
        (["sm_120"], [], (12, 1), "cubin"),
        ([], ["compute_90a"], (10, 0), None),
        ([], ["compute_100f"], (10, 3), "ptx"),
        ([], ["compute_100f"], (12, 0), None),
        ([], ["compute_50"], (12, 0), "ptx"),
        ([], [], (8, 0), None),
        (["sm_what"], ["compute_"], (8, 0), None),
    ],
)
def test_which_code_runs_on_which_gpu(cubin, ptx, gpu, how):
    assert runs_on({"cubin": cubin, "ptx": ptx}, gpu) == how


def test_gpus_of_saved_facts():
    rows = [
        {"name": "NVIDIA H200", "capability": "9.0"},
        {"name": "NVIDIA GeForce RTX 5090", "capability": "12.0"},
        {"name": "unknown", "capability": None},
        "nonsense",
    ]
    assert of_machine(rows) == [("NVIDIA H200", (9, 0)), ("NVIDIA GeForce RTX 5090", (12, 0))]
