# SPDX-License-Identifier: Apache-2.0
import zipfile
from pathlib import Path

import pytest
from helpers import binaries
from packaging import tags as packaging_tags
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename

from statescan.doctor.model import Fact, Facts
from statescan.doctor.symbols import judge_wheel, names, torch_files, wheel
from statescan.doctor.symbols.binary import BinaryError, WrongKindError

MACHINE = {
    "system.os": "linux",
    "system.machine": "x86_64",
    "system.libc": {"kind": "glibc", "version": "2.35"},
    "python.tag": "cp311",
    "python.version": "3.11.7",
    "torch.version": "2.5.1+cu124",
    "torch.cuda": "12.4",
    "torch.cxx11_abi": False,
}
STEM = "mamba_ssm-2.2.4+cu12torch2.5cxx11abiFALSE"
FITTING = f"{STEM}-cp311-cp311-linux_x86_64.whl"


def facts(**changes) -> Facts:
    values = {**MACHINE, **{name.replace("__", "."): value for name, value in changes.items()}}
    return Facts({name: Fact(name, value, "a test") for name, value in values.items()})


def made(folder: Path, name: str = FITTING, members=None, **options) -> dict:
    """What is read of a wheel with these members."""
    path = binaries.wheel(folder / name, members or {"mamba_ssm/__init__.py": b""}, **options)
    return wheel.inspect(path, {})


def slugs(content, **changes) -> list[str]:
    return [row.problem.slug for row in judge_wheel.judge_wheel(content, facts(**changes))]


def test_the_fields_of_a_name():
    name = names.wheel_name(FITTING)
    assert (name.distribution, name.version) == ("mamba_ssm", STEM.split("-")[1])
    assert (name.toolkit, name.torch, name.cxx11_abi) == ("cu12", "2.5", False)
    assert name.tags == ("cp311-cp311-linux_x86_64",)
    name = names.wheel_name(
        "causal_conv1d-1.4.0+cu118torch2.10cxx11abiTRUE-cp39-cp39-linux_x86_64.whl"
    )
    assert (name.toolkit, name.torch, name.cxx11_abi) == ("cu118", "2.10", True)
    name = names.wheel_name("mamba_ssm-2.2.5+hip6torch2.6cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")
    assert (name.toolkit, name.torch) == ("hip6", "2.6")
    name = names.wheel_name("einops-0.8.0-py3-none-any.whl")
    assert (name.toolkit, name.torch, name.cxx11_abi) == ("", "", None)


@pytest.mark.parametrize(
    "name",
    [
        FITTING,
        "torch-2.7.0-cp310-cp310-manylinux_2_28_x86_64.manylinux2014_x86_64.whl",
        "six-1.16.0-py2.py3-none-any.whl",
        "pkg-1-1-cp311-abi3-win_amd64.whl",
    ],
)
def test_tags_are_those_that_an_independent_reader_expands(name):
    expected = {str(tag) for tag in parse_wheel_filename(name)[3]}
    assert set(names.wheel_name(name).tags) == expected


@pytest.mark.parametrize(
    "name", ["mamba.whl", "mamba-1-cp311.whl", "a-b-c-d-e.zip", "a--c-d-e.whl"]
)
def test_what_is_no_name_of_a_wheel_is_refused(name):
    with pytest.raises(WrongKindError, match="is no name of a wheel"):
        names.wheel_name(name)


def test_a_fitting_wheel_has_no_finding(tmp_path):
    content = made(tmp_path, requires=["torch", "einops>=0.6"])
    assert slugs(content) == []
    assert content["requires"] == ["torch", "einops>=0.6"]
    assert content["wheel_tags"] == ["cp311-cp311-linux_x86_64"]
    assert content["metadata_name"] == "mamba_ssm"
    assert judge_wheel.verdict(content, []) == (
        f"{FITTING} fits this machine; it has no binary in it."
    )


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (f"{STEM}-cp310-cp310-linux_x86_64.whl", {}, ["wheel-tag-mismatch"]),
        (f"{STEM}-cp311-cp311-linux_x86_64.whl", {"python__tag": "cp313t"}, ["wheel-tag-mismatch"]),
        (f"{STEM}-cp311-cp311-win_amd64.whl", {}, ["wheel-tag-mismatch"]),
        (f"{STEM}-cp311-cp311-linux_aarch64.whl", {}, ["wheel-wrong-cpu-arch"]),
        (FITTING, {"system__machine": "aarch64"}, ["wheel-wrong-cpu-arch"]),
        (f"{STEM}-cp311-cp311-macosx_11_0_arm64.whl", {}, ["wheel-tag-mismatch"]),
        (f"{STEM}-cp311-cp311-manylinux_2_39_x86_64.whl", {}, ["glibc-too-old"]),
        (f"{STEM}-cp311-cp311-manylinux_2_28_x86_64.whl", {}, []),
        (
            f"{STEM}-cp311-cp311-manylinux2014_x86_64.whl",
            {"system__libc": {"kind": "glibc", "version": "2.12"}},
            ["glibc-too-old"],
        ),
        (f"{STEM}-cp311-cp311-musllinux_1_2_x86_64.whl", {}, ["wheel-tag-mismatch"]),
        (f"{STEM}-cp39-abi3-linux_x86_64.whl", {}, []),
        (f"{STEM}-cp312-abi3-linux_x86_64.whl", {}, ["wheel-tag-mismatch"]),
        (FITTING, {"torch__version": "2.6.0+cu124"}, ["torch-abi-mismatch"]),
        (FITTING, {"torch__version": "2.5.0a0+872d972e41"}, []),
        (FITTING, {"torch__cuda": "11.8"}, ["cudart-missing"]),
        (FITTING, {"torch__cuda": None, "torch__version": "2.5.1+cpu"}, ["torch-is-cpu-only"]),
        (FITTING, {"torch__cxx11_abi": True}, ["cxx11-abi-mismatch"]),
        (FITTING, {"torch__version": None}, []),
        (
            "mamba_ssm-2.2.5+cu13torch25.09cxx11abiTRUE-cp311-cp311-linux_x86_64.whl",
            {"torch__cuda": "13.0", "torch__cxx11_abi": True, "torch__version": "2.9.0a0"},
            [],
        ),
        ("einops-0.8.0-py3-none-any.whl", {"system__os": "windows"}, []),
    ],
)
def test_tags_and_fields(tmp_path, name, changes, expected):
    assert slugs(made(tmp_path, name), **changes) == expected


def test_all_that_differs_is_told(tmp_path):
    content = made(tmp_path)
    found = slugs(content, torch__version="2.7.1+cu118", torch__cuda="11.8", torch__cxx11_abi=True)
    assert found == ["cudart-missing", "cxx11-abi-mismatch", "torch-abi-mismatch"]


def test_a_renamed_wheel_is_noticed(tmp_path):
    content = made(tmp_path, tags=["cp310-cp310-linux_x86_64"])
    (row,) = judge_wheel.judge_wheel(content, facts())
    assert (row.problem.slug, row.severity.value) == ("wheel-tag-mismatch", "warning")
    assert "was renamed" in row.summary


@pytest.mark.parametrize(
    "wanted",
    [
        ">=3.9",
        ">=3.12",
        "<3.12,>=3.8",
        "!=3.11.7",
        "==3.11.*",
        "==3.11",
        "!=3.11.*",
        "~=3.10",
        "~=3.11.2",
        "~=3.12",
        ">3.11",
        "<=3.11.7",
        "<=3.11",
        "==3.11.7",
        ">=2.7, !=3.0.*",
    ],
)
def test_requires_python_is_judged_as_an_independent_reader_does(tmp_path, wanted):
    content = made(tmp_path, requires_python=wanted)
    fits = SpecifierSet(wanted).contains("3.11.7")
    assert slugs(content) == ([] if fits else ["python-version-unsupported"])


def test_binaries_inside_are_read_and_judged(tmp_path):
    torch = binaries.fake_torch(tmp_path / "site", version="2.5.1+cu124", cuda="12.4")
    libraries = torch_files.libraries(torch)
    code = binaries.gpu_section(tmp_path, binaries.fat_binary(["80"]))
    extension = binaries.extension(
        tmp_path / binaries.MODULE,
        [binaries.OLD_CHECK, "_ZN3c1014not_there_evenEv", "carried"],
        [
            Path(libraries["libc10.so"]),
            binaries.library(tmp_path / "libcarried.so.1", ["carried"]),
        ],
        ["-Wl,-rpath,$ORIGIN/mamba_ssm.libs"],
        code,
    )
    members = {
        binaries.MODULE: extension.read_bytes(),
        "mamba_ssm.libs/libcarried.so.1": (tmp_path / "libcarried.so.1").read_bytes(),
        "mamba_ssm/__init__.py": b"",
    }
    path = binaries.wheel(tmp_path / FITTING, members)
    content = wheel.inspect(path, libraries)
    module, carried = content["binaries"]
    assert (module["path"], carried["path"]) == (binaries.MODULE, "mamba_ssm.libs/libcarried.so.1")
    assert module["cuda_archs"] == {"cubin": ["sm_80"], "ptx": []}
    rows = {row["name"]: row for row in module["libraries"]}
    assert rows["libc10.so"]["status"] == "after-torch"
    # A file of the same wheel, named without the folder that it was unpacked into.
    assert rows["libcarried.so.1"]["status"] == "found"
    assert rows["libcarried.so.1"]["path"] == "WHEEL/mamba_ssm.libs/libcarried.so.1"
    gpu = [{"name": "NVIDIA H100", "capability": "9.0"}]
    assert slugs(content, driver__gpus=gpu) == ["torch-abi-mismatch", "gpu-arch-not-in-binary"]


def test_a_binary_for_another_cpu_than_the_name_says(tmp_path):
    data = bytearray(binaries.extension(tmp_path / binaries.MODULE).read_bytes())
    data[18] = 183
    content = made(tmp_path, members={binaries.MODULE: bytes(data)})
    assert slugs(content) == ["wheel-wrong-cpu-arch"]


def test_a_sound_wheel_with_a_binary_loads_here(tmp_path):
    data = binaries.extension(tmp_path / binaries.MODULE, ["PyList_New"]).read_bytes()
    content = made(tmp_path, members={binaries.MODULE: data})
    assert (
        judge_wheel.verdict(content, []) == f"{FITTING} fits this machine: its binary loads here."
    )


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / FITTING
    path.write_bytes(content)
    with pytest.raises(BinaryError, match="damaged, or no wheel"):
        wheel.inspect(path, {})


def test_an_archive_without_metadata_is_no_wheel(tmp_path):
    path = tmp_path / FITTING
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mamba_ssm/__init__.py", "")
    with pytest.raises(BinaryError, match="so it is no wheel"):
        wheel.inspect(path, {})


@pytest.mark.parametrize("member", ["../evil.so", "/evil.so", "a/../../evil.so", "c:evil.so"])
def test_a_member_outside_of_the_wheel_is_refused(tmp_path, member):
    path = binaries.wheel(tmp_path / "in" / FITTING, {member: b"x"})
    with pytest.raises(BinaryError, match="outside of itself"):
        wheel.inspect(path, {})
    assert not list(tmp_path.rglob("evil.so"))


def test_a_link_in_a_wheel_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("words")
    path = binaries.wheel(tmp_path / FITTING, {})
    link = zipfile.ZipInfo("link.so")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, str(secret))
    (report,) = wheel.inspect(path, {})["binaries"]
    # The link's text is taken for the file, and that is no binary.
    assert "no binary of Linux, Windows or macOS" in report["problem"]


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "MOST_BYTES", 1 << 20)
    path = binaries.wheel(tmp_path / FITTING, {"big.so": bytes(1 << 21)})
    assert path.stat().st_size < 1 << 16
    with pytest.raises(BinaryError, match="would unpack to"):
        wheel.inspect(path, {})


def test_too_many_binaries_are_refused(tmp_path):
    members = {f"b{number}.so": b"x" for number in range(100)}
    with pytest.raises(BinaryError, match="100 binaries"):
        made(tmp_path, members=members)


def test_a_wrong_checksum_is_damage(tmp_path):
    path = binaries.wheel(tmp_path / FITTING, {"x.so": bytes(range(256)) * 40})
    data = bytearray(path.read_bytes())
    place = data.index(b"x.so") + 20
    data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BinaryError, match="damaged"):
        wheel.inspect(path, {})


def test_the_tags_of_this_interpreter_fit(tmp_path):
    tag = next(iter(packaging_tags.cpython_tags(platforms=["linux_x86_64"])))
    content = made(tmp_path, f"{STEM}-{tag.interpreter}-{tag.abi}-linux_x86_64.whl")
    assert slugs(content, python__tag=tag.abi) == []
