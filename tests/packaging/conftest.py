# SPDX-License-Identifier: Apache-2.0
"""Builds wheels of a copy of this checkout, so that no test writes into the checkout itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_INPUTS = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "src")


class Builder:
    """Runs pip on a copy of the sources.

    Without build isolation: the build tools come with the ``test`` extra, so that these tests need
    no network. The isolated build is what ``pip install`` of the README does.
    """

    def __init__(self, source: Path, scratch: Path) -> None:
        self.source = source
        self.scratch = scratch
        self.count = 0

    def run(
        self, env: Mapping[str, str], source: Path | None = None
    ) -> tuple[int, str, list[Path]]:
        """Build a wheel; returns pip's exit status, its output and the wheels made."""
        self.count += 1
        out = self.scratch / f"out{self.count}"
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        command += ["--no-index", "--disable-pip-version-check", "--wheel-dir", str(out)]
        # Only with -v does pip show the backend's closing message.
        command += ["-v", "-C", f"build-dir={self.scratch / f'build{self.count}'}"]
        clean = {name: v for name, v in os.environ.items() if not name.startswith("STATESCAN_")}
        done = subprocess.run(
            [*command, str(source or self.source)],
            env={**clean, **env},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr, sorted(out.glob("*.whl"))

    def wheel(self, env: Mapping[str, str], source: Path | None = None) -> Path:
        """Build a wheel that must succeed."""
        status, output, wheels = self.run(env, source)
        assert status == 0, output
        assert len(wheels) == 1, output
        return wheels[0]

    def hook(self, name: str, destination: Path) -> None:
        """Call one hook of the build backend, as pip and build do, with native code required."""
        code = "import sys; from scikit_build_core import build; getattr(build, sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}(sys.argv[2])", name, str(destination)],
            cwd=self.source,
            env={**os.environ, "STATESCAN_REQUIRE_NATIVE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr


def compiler() -> str | None:
    """The C compiler that CMake would take."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def copy_sources(destination: Path) -> Path:
    """Copy what a build reads."""
    for name in BUILD_INPUTS:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(
                origin,
                destination / name,
                ignore=shutil.ignore_patterns("__pycache__", "_cpu.*", ".*"),
            )
        else:
            destination.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin, destination / name)
    return destination


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    for module in ("pip", "scikit_build_core"):
        if find_spec(module) is None:
            pytest.skip(f'{module} is not installed here: pip install ".[test]"')
    scratch = tmp_path_factory.mktemp("wheels")
    return Builder(copy_sources(scratch / "source"), scratch)


@pytest.fixture(scope="session")
def native_wheel(builder: Builder) -> Path:
    """The wheel that a machine with a C compiler builds."""
    if compiler() is None:
        pytest.skip("no C compiler on PATH: the native wheel cannot be built here")
    return builder.wheel({"STATESCAN_REQUIRE_NATIVE": "1"})


@pytest.fixture(scope="session")
def build_without_compiler(builder: Builder) -> tuple[int, str, list[Path]]:
    return builder.run({"CC": "/nonexistent/cc"})


@pytest.fixture(scope="session")
def pure_wheel(build_without_compiler: tuple[int, str, list[Path]]) -> Path:
    """The wheel that a machine without a C compiler builds."""
    status, output, wheels = build_without_compiler
    assert status == 0, output
    return wheels[0]


@pytest.fixture(scope="session")
def native_install(native_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with the native wheel's files."""
    folder = tmp_path_factory.mktemp("native")
    with zipfile.ZipFile(native_wheel) as archive:
        archive.extractall(folder)
    return folder
