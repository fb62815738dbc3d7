# SPDX-License-Identifier: Apache-2.0
"""What a build gives, with a compiler and without, and what lies in the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

EXTRAS = {"models", "train", "bench", "doctor", "test", "dev"}


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def tag_of(wheel: Path) -> str:
    return wheel.stem.split("-", 2)[2]


def is_native(wheel: Path) -> bool:
    return any(re.fullmatch(r"statescan/_cpu\.(so|dylib|dll)", name) for name in names_in(wheel))


def child(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that sees ``folder`` before anything installed."""
    env = {name: v for name, v in os.environ.items() if not name.startswith("STATESCAN_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**env, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )


def test_a_compiler_gives_one_wheel_for_every_python(native_wheel):
    assert is_native(native_wheel)
    assert tag_of(native_wheel).startswith("py3-none-")
    assert tag_of(native_wheel) != "py3-none-any"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="auditwheel reads ELF files only")
@pytest.mark.skipif(
    find_spec("auditwheel") is None, reason='auditwheel is not installed: pip install ".[test]"'
)
def test_auditwheel_finds_nothing_that_a_system_must_have(native_wheel):
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(native_wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    needs = {name: found[name] for name in ("external_libs", "versioned_symbols")}
    assert needs == {"external_libs": {}, "versioned_symbols": {}}
    # Instructions beyond the platform's least are in functions that only entry.c chooses.
    assert found["unsupported_isa"] is False
    assert not found["pure"]


def test_no_compiler_gives_a_pure_wheel(pure_wheel):
    assert tag_of(pure_wheel) == "py3-none-any"
    assert not is_native(pure_wheel)


def test_no_compiler_says_so_at_the_end_of_the_build(build_without_compiler):
    _, output, _ = build_without_compiler
    assert "installed without native CPU kernels" in output


def test_require_native_turns_a_broken_compiler_into_a_failure(builder):
    status, output, wheels = builder.run({"CC": "/nonexistent/cc", "STATESCAN_REQUIRE_NATIVE": "1"})
    assert status != 0, output
    assert not wheels


def test_an_error_in_a_source_gives_a_pure_wheel(builder, tmp_path):
    source = Path(shutil.copytree(builder.source, tmp_path / "broken"))
    kernel = source / "src/statescan/kernels/cpu/cpuid.c"
    kernel.write_text(kernel.read_text() + "\nthis is not C\n")
    assert tag_of(builder.wheel({}, source)) == "py3-none-any"


def test_pure_build_needs_nothing_on_path(builder, tmp_path):
    wheel = builder.wheel({"STATESCAN_PURE": "1", "PATH": str(tmp_path)})
    assert tag_of(wheel) == "py3-none-any"


@pytest.mark.parametrize("kind", ["native_wheel", "pure_wheel"])
def test_wheel_holds_every_file_of_the_package(kind, builder, request):
    package = builder.source / "src"
    expected = {
        path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()
    }
    names = names_in(request.getfixturevalue(kind))
    assert expected <= names
    assert {"statescan/py.typed", "statescan/kernels/cpu/abi.h"} <= names
    # Beside the package: what every start of Python reads, to serve names if it is asked to.
    assert "statescan_compat.pth" in names
    extra = {name for name in names - expected if ".dist-info/" not in name}
    assert extra - {"statescan_compat.pth"} <= {
        "statescan/_cpu.so",
        "statescan/_cpu.dylib",
        "statescan/_cpu.dll",
    }


def test_embedded_model_is_in_the_wheel(pure_wheel):
    names = names_in(pure_wheel)
    data = [name for name in names if name.startswith("statescan/models/data/")]
    assert any(name.endswith(".safetensors") for name in data), data
    assert "statescan/models/data/config.json" in names


def test_torch_is_the_only_hard_dependency_and_has_no_upper_bound(pure_wheel):
    metadata = metadata_of(pure_wheel)
    hard = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert hard == ["torch>=2.4"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


def test_wheel_carries_licence_and_command(pure_wheel):
    names = names_in(pure_wheel)
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    assert f"{info}/licenses/LICENSE" in names
    with zipfile.ZipFile(pure_wheel) as archive:
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert "statescan=statescan.cli.main:main" in entry_points.replace(" ", "")


def test_version_is_the_same_in_package_and_metadata(pure_wheel, tmp_path):
    with zipfile.ZipFile(pure_wheel) as archive:
        archive.extractall(tmp_path)
    done = child(tmp_path, "import statescan; print(statescan.__version__)")
    assert done.stdout.strip() == metadata_of(pure_wheel)["Version"], done.stderr


def test_pure_install_tells_why_there_is_no_native_library(pure_wheel, tmp_path):
    with zipfile.ZipFile(pure_wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "from statescan.backends import native\n"
        "found = native.status()\n"
        "assert found.library is None\n"
        "print(found.reason)\n"
        "try:\n    native.require()\nexcept RuntimeError as error:\n    print(error)\n"
    )
    done = child(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "was not built with this install" in done.stdout
    assert "hint: reinstall where a C compiler is on PATH" in done.stdout


def test_native_install_loads_its_library(native_install):
    code = (
        "from statescan.backends import native\nprint(native.require().path, native.require().isa)"
    )
    done = child(native_install, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(native_install))


def test_sdist_builds_without_the_checkout(builder, tmp_path):
    builder.hook("build_sdist", tmp_path)
    archive = next(tmp_path.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        # Early releases of 3.10 and 3.11 have no filter argument.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(tmp_path, **safe)
    unpacked = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert (unpacked / "CMakeLists.txt").is_file()
    assert tag_of(builder.wheel({"STATESCAN_PURE": "1"}, unpacked)) == "py3-none-any"


def test_editable_install_finds_the_library_beside_the_checkout(builder, native_wheel, tmp_path):
    builder.hook("build_editable", tmp_path)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(site)
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import statescan\n"
        "from statescan.backends import native\n"
        "print(statescan.__file__); print(native.require().path)"
    )
    done = child(tmp_path, code)
    assert done.returncode == 0, done.stderr
    module, library = done.stdout.split("\n")[:2]
    assert Path(module).is_relative_to(builder.source / "src")
    assert Path(library).is_relative_to(site)
