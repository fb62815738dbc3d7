# SPDX-License-Identifier: Apache-2.0
"""The stages of a build with their commands, in their order; nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from statescan.doctor import catalog
from statescan.doctor.builder.model import SKIPPED, Setup, Stage
from statescan.doctor.checks.base import EXTENSIONS
from statescan.doctor.model import Command, Facts

_TOOLS = ("setuptools", "wheel", "packaging", "ninja")


@dataclass(frozen=True)
class Places:
    """Where the files of a build are."""

    folder: Path

    @property
    def sdist(self) -> Path:
        """Folder of the source package as it was fetched."""
        return self.folder / "sdist"

    @property
    def source(self) -> Path:
        """Folder in which it is unpacked and compiled."""
        return self.folder / "source"

    @property
    def wheel(self) -> Path:
        """Folder of the wheel that is built."""
        return self.folder / "wheel"

    @property
    def temporary(self) -> Path:
        """Folder for temporary files, where those of the system do not serve."""
        return self.folder / "tmp"

    @property
    def imports(self) -> Path:
        """The program that proves the import."""
        return self.folder / "proof_import.py"

    @property
    def computes(self) -> Path:
        """The program that proves the computation."""
        return self.folder / "proof_compute.py"


def plan(setup: Setup, facts: Facts, python: str) -> tuple[Stage, ...]:
    """All stages, with those that are not needed here marked as skipped."""
    return (
        tools(facts, python),
        source(setup, python),
        compilation(setup, python, Places(setup.folder).source / "NAME"),
        install(setup, python, Places(setup.folder).wheel / "NAME.whl"),
        imports(setup, python),
        smoke(setup, facts, python),
    )


def tools(facts: Facts, python: str) -> Stage:
    """Install what the package's setup imports, as far as it is missing."""
    installed: Mapping[str, object] = facts.get("packages.installed", {})
    missing = [name for name in _TOOLS if name not in installed]
    if "ninja" in missing and facts.get("compiler.ninja"):
        missing.remove("ninja")
    title = "Install the build tools that are missing"
    if not missing:
        return Stage("tools", title, status=SKIPPED, note="all of them are here")
    pins = catalog.load("pins")["build"]
    named = [f"{name}=={pins[name]}" for name in missing]
    return Stage("tools", title, (_pip(python, "install", *named),))


def source(setup: Setup, python: str, *, no_cache: bool = False) -> Stage:
    """Fetch the source package and unpack it."""
    release = setup.release
    command = _pip(
        *(python, "download", "--no-deps", "--no-build-isolation"),
        *(("--no-cache-dir",) if no_cache else ()),
        *("--no-binary", release.package, "--dest", str(Places(setup.folder).sdist)),
        f"{release.package}=={release.version}",
    )
    return Stage("source", f"Fetch the sources of {release.package} {release.version}", (command,))


def compilation(setup: Setup, python: str, tree: Path) -> Stage:
    """Compile, into a wheel."""
    wheels = str(Places(setup.folder).wheel)
    command = _pip(
        *(python, "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir"),
        *("--wheel-dir", wheels, str(tree)),
    )
    names = ", ".join(setup.targets.names) or "every GPU that the release names"
    return Stage("compile", f"Compile it for {names}", (command,))


def install(setup: Setup, python: str, wheel: Path) -> Stage:
    """Install the wheel and nothing else."""
    command = _pip(python, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    return Stage("install", "Install the wheel; torch stays as it is", (command,))


def imports(setup: Setup, python: str) -> Stage:
    """Import the module, and look which GPU code it holds."""
    command = Command((python, str(Places(setup.folder).imports)))
    return Stage("import", f"Import {EXTENSIONS[setup.release.package]}", (command,))


def smoke(setup: Setup, facts: Facts, python: str) -> Stage:
    """Compute something and compare it with plain torch, where there is a GPU."""
    title = "Compare its results with plain torch"
    if not (facts.get("torch.cuda_available") or facts.get("driver.gpus")):
        return Stage("smoke", title, status=SKIPPED, note="no GPU is visible here")
    if setup.release.package == "mamba-ssm" and "causal-conv1d" not in facts.get(
        "packages.installed", {}
    ):
        note = "causal-conv1d, which its fast path calls, is not installed"
        return Stage("smoke", title, status=SKIPPED, note=note)
    return Stage("smoke", title, (Command((python, str(Places(setup.folder).computes))),))


def _pip(python: str, *words: str) -> Command:
    return Command((python, "-m", "pip", *words))
