# SPDX-License-Identifier: Apache-2.0
"""The text that is compiled: no includes, structs as Python packs them, tables in order."""

from __future__ import annotations

import re

import pytest
from helpers.fake_driver import KERNEL

from statescan.backends.cuda import nvrtc, source, tables
from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel

SOURCES = sorted(source.FOLDER.glob("*.cu*"))
MOST_INSTANCES = 150


def real_compiler():
    """The compiler of this machine; torch for CUDA brings one, torch for CPUs does not."""
    found = nvrtc.status()
    if found.compiler is None:
        pytest.skip(found.reason)
    return found.compiler


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_device_code_includes_nothing(path):
    # NVRTC would need a folder of headers then, which is one more thing that a machine may lack.
    assert re.findall(r"^\s*#\s*include.*", path.read_text(), re.MULTILINE) == []


def test_every_kernel_file_has_a_table_and_every_table_a_kernel_file():
    assert {path.stem for path in SOURCES if path.suffix == ".cu"} == set(tables.stems())


def test_there_are_not_too_many_instances():
    assert sum(len(kernel.instances) for kernel in tables.TABLE.values()) <= MOST_INSTANCES


def test_names_of_instances_are_unique_over_all_kernels():
    symbols = [k.symbol(i) for k in tables.TABLE.values() for i in k.instances]
    assert len(symbols) == len(set(symbols))
    assert all(re.fullmatch(r"statescan_[a-z0-9_]+", symbol) for symbol in symbols)


@pytest.mark.parametrize("stem", tables.stems())
def test_tables_are_well_formed(stem):
    kernel = tables.kernel(stem)
    names = [name for name, _ in kernel.fields]
    assert len(names) == len(set(names))
    assert all(kind in (POINTER, INTEGER) or kind.endswith("*") for _, kind in kernel.fields)
    # The driver takes 4 kB of parameters from every architecture.
    assert kernel.packer.size <= 4096
    for instance in kernel.instances:
        assert instance.threads % 32 == 0
        assert 32 <= instance.threads <= 1024


def test_an_unknown_kernel_is_named_with_those_that_there_are():
    with pytest.raises(KeyError, match="'nothing' is no CUDA kernel; there are"):
        tables.kernel("nothing")


def test_the_struct_is_the_tables_fields_in_order(toy):
    assert source.parameter_struct(KERNEL) == (
        "struct ToyParams {\n    void* x;\n    i64 count;\n    void* out;\n};\n"
        'static_assert(sizeof(ToyParams) == 24, "layout");\n'
    )


def test_a_field_may_spell_its_own_pointer_type():
    kernel = Kernel("toy", (("x", "const float*"),), ())
    assert "    const float* x;" in source.parameter_struct(kernel)


def test_a_unit_has_shared_code_first_and_the_instances_last(toy):
    text = source.unit(KERNEL)
    order = [
        "typedef long long i64;",
        "struct ToyParams",
        "void toy(const ToyParams& p)",
        "__launch_bounds__(128, 1)\nstatescan_toy__bf16(const __grid_constant__ ToyParams p)",
        "toy<bf16>(p);",
        "__launch_bounds__(256, 2)\nstatescan_toy__f32(const __grid_constant__ ToyParams p)",
        "toy<float>(p);",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_a_unit_of_one_instance_has_no_other(toy):
    text = source.unit(KERNEL, KERNEL.instances[:1])
    assert "statescan_toy__bf16" in text
    assert "statescan_toy__f32" not in text


def test_headers_of_a_kernel_know_its_struct(toy):
    (source.FOLDER / "extra.cuh").write_text("// shared by two kernels\n")
    kernel = Kernel("toy", KERNEL.fields, (Instance("only", "", 32),), headers=("extra.cuh",))
    text = source.unit(kernel)
    assert text.index("typedef long long") < text.index("struct T") < text.index("// shared by two")
    assert "    toy(p);\n" in text, "an instance without template arguments"


def test_line_ends_of_a_checkout_do_not_change_the_hash(toy):
    before = source.unit_hash(KERNEL)
    path = source.FOLDER / "toy.cu"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    source._read_file.cache_clear()
    source.unit_hash.cache_clear()
    assert source.unit_hash(KERNEL) == before


def test_instances_and_fields_are_in_the_hash(toy):
    other = Kernel("toy", KERNEL.fields, KERNEL.instances[:1])
    renamed = Kernel("toy", (("y", "ptr"), *KERNEL.fields[1:]), KERNEL.instances)
    assert len({source.unit_hash(kernel) for kernel in (KERNEL, other, renamed)}) == 3


def test_the_toy_compiles_to_a_cubin_and_to_ptx(toy):
    compiler = real_compiler()
    text = source.unit(KERNEL)
    assert compiler.compile(text, "toy", "sm_90").code.startswith(b"\x7fELF")
    assert b".target sm_80" in compiler.compile(text, "toy", "compute_80").code


def test_the_struct_lies_where_python_packs_it(toy):
    made = real_compiler().compile(source.layout_check(KERNEL), "toy_layout", "sm_90")
    assert made.code.startswith(b"\x7fELF"), "a static_assert that fails gives no code"


@pytest.mark.parametrize("stem", tables.stems())
def test_every_struct_lies_where_python_packs_it(stem):
    compiler = real_compiler()
    made = compiler.compile(source.layout_check(tables.kernel(stem)), f"{stem}_layout", "sm_90")
    assert made.code.startswith(b"\x7fELF"), "a static_assert that fails gives no code"


def test_a_wrong_layout_does_not_compile(toy, monkeypatch):
    compiler = real_compiler()
    kernel = Kernel("toy", (("first", INTEGER), ("second", INTEGER)), ())
    monkeypatch.setitem(source._TYPES, INTEGER, "int")
    with pytest.raises(nvrtc.CompileError, match="layout"):
        compiler.compile(source.layout_check(kernel), "toy_layout", "sm_90")


def test_an_error_in_a_source_shows_the_compilers_log(toy):
    compiler = real_compiler()
    with pytest.raises(nvrtc.CompileError, match=r"(?s)toy does not compile for sm_90.*no_such"):
        compiler.compile("no_such_type x;", "toy", "sm_90")


def test_the_compiler_knows_what_to_make_for_a_gpu():
    compiler = real_compiler()
    assert compiler.architecture_for((9, 0)) == "sm_90"
    assert compiler.architecture_for((3, 5)) is None
    assert (compiler.architecture_for((99, 0)) or "").startswith("compute_")


def test_a_file_that_is_no_compiler_is_a_reason_and_not_an_error(tmp_path):
    path = tmp_path / "libnvrtc.so.12"
    path.write_text("not a library")
    found = nvrtc.first_that_loads(iter([path]))
    assert found.compiler is None
    assert str(path) in found.reason
    assert isinstance(found.error, OSError)


def test_no_compiler_at_all_says_how_to_get_one():
    found = nvrtc.first_that_loads(iter([]))
    assert found.compiler is None
    assert "pip install nvidia-cuda-nvrtc" in found.reason


def test_compilers_are_looked_for_in_wheels_and_in_the_toolkit(tmp_path, monkeypatch):
    folders = ["one/nvidia/cuda_nvrtc/lib", "two/nvidia/cu13/lib", "toolkit/lib64"]
    files = []
    for folder in folders:
        path = tmp_path / folder / "libnvrtc.so.12"
        path.parent.mkdir(parents=True)
        path.write_text("")
        (path.parent / "libnvrtc.alt.so.12").write_text("")
        files.append(path)
    monkeypatch.setattr(nvrtc, "_mapped", lambda: iter(()))
    monkeypatch.setattr(nvrtc, "_from_pathfinder", lambda: iter(()))
    monkeypatch.setattr(nvrtc, "find_library", lambda name: None)
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path / "one"), str(tmp_path / "two")])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert list(nvrtc.candidates()) == files


def test_a_compiler_that_is_loaded_already_comes_first(monkeypatch, tmp_path):
    path = tmp_path / "libnvrtc.so.12"
    path.write_text("")
    maps = f"7f00-7f01 r-xp 00000000 08:01 42    {path}\n"
    monkeypatch.setattr(nvrtc.Path, "is_file", lambda self: True)
    monkeypatch.setattr(nvrtc.Path, "read_text", lambda self, errors=None: maps)
    assert list(nvrtc._mapped()) == [path]
