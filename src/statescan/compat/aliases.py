# SPDX-License-Identifier: Apache-2.0
"""Serves the originals' module names from statescan: ``install`` and ``uninstall``.

Which names there are is in ``tree``; what they do is in the modules beside it. Modules are made
at their first import, so installing needs no torch and costs about a millisecond.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from statescan.compat import tree
from statescan.compat.distributions import served_distributions
from statescan.errors import ArgumentError, BackendUnavailableError

IMPORT_SECONDS = 180
"""How long an installed original may take to import before it counts as broken."""


@dataclass(frozen=True)
class Installed:
    """What ``install`` did.

    Attributes:
        names: Top-level modules that are served now.
        replaced: For each name whose original is installed but does not import, the reason.
        too_late: Modules that were imported before and keep what they found then.
    """

    names: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...] = ()
    too_late: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"statescan serves {', '.join(self.names)}"]
        lines += [f"in place of the installed {name}: {why}" for name, why in self.replaced]
        lines += [f"imported too early to see it: {name}" for name in self.too_late]
        return "\n".join(lines)


class _Loader(Loader):
    """Makes a module whose names are looked up at their first use."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        fill(module, module.__name__)


class _Finder(MetaPathFinder):
    """Finds the served modules and tells their distributions."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.shims: tuple[str, ...] = ()
        """Names that an installed shim serves, which has metadata of its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.split(".")[0]
        inside_shim = top in self.shims and top != fullname
        if fullname not in tree.MODULES or not (top in self.names or inside_shim):
            return None
        spec = ModuleSpec(
            fullname, _Loader(), origin="statescan", is_package=tree.is_package(fullname)
        )
        spec.has_location = False
        return spec

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        return served_distributions(self.names, name)


_finder = _Finder()


def fill(module: ModuleType, name: str) -> None:
    """Give ``module`` the names of the served module ``name``, loaded at their first use."""
    served = tree.MODULES[name]

    def load(attribute: str) -> Any:
        place = served.get(attribute)
        if place is None:
            raise AttributeError(
                f"module {name!r} as statescan serves it has no attribute {attribute!r}; "
                f"it has {', '.join(sorted(served)) or 'submodules only'}"
            )
        source, _, inner = place.partition(":")
        value = getattr(import_module(f"statescan.compat.{source}"), inner)
        setattr(module, attribute, value)
        return value

    module.__doc__ = f"{name}, served by statescan."
    module.__dict__["__getattr__"] = load
    module.__dict__["__dir__"] = lambda: sorted({*module.__dict__, *served})
    module.__dict__["__all__"] = [key for key in served if not key.startswith("_")]
    distribution = tree.distribution_of(name)
    if distribution is not None:
        module.__dict__["__version__"] = tree.VERSIONS[distribution]


def serve(name: str) -> None:
    """Make the module ``name``, which is being imported from a shim, the served one."""
    _finder.shims = tuple(dict.fromkeys((*_finder.shims, name)))
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    fill(sys.modules[name], name)


def install(*, force: bool = False, names: Collection[str] | None = None) -> Installed:
    """Serve ``mamba_ssm``, ``causal_conv1d`` and their extension modules from statescan.

    Imports of these names, nested paths and ``importlib.metadata.version`` answer from here on.
    An original that is installed and imports is left alone and the call refused; one that is
    installed and broken is replaced.

    Args:
        force: Serve the names whether or not an original works.
        names: Top-level modules to serve; all by default.

    Returns:
        What is served, what was replaced and what came too late; ``print`` it.

    Raises:
        BackendUnavailableError: a working original is installed.
        ArgumentError: a name that is not served.
    """
    wanted = _wanted(names)
    replaced = [] if force else _broken_originals(wanted)
    for loaded in [key for key in sys.modules if key.split(".")[0] in wanted]:
        if not _is_served(sys.modules[loaded]):
            del sys.modules[loaded]
    _finder.names = tuple(dict.fromkeys((*_finder.names, *wanted)))
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    too_late = _imported_too_early(wanted)
    if too_late:
        warnings.warn(
            f"statescan.compat.install: {', '.join(too_late)} looked for "
            "these packages before and will not look again. Call install() before importing them.",
            stacklevel=2,
        )
    return Installed(_finder.names, tuple(replaced), tuple(too_late))


def uninstall() -> tuple[str, ...]:
    """Stop serving; returns the names that were served. Objects made before keep working."""
    names, _finder.names = _finder.names, ()
    if _finder in sys.meta_path and not _finder.shims:
        sys.meta_path.remove(_finder)
    for key in [key for key, module in sys.modules.items() if _is_served(module)]:
        del sys.modules[key]
    return names


def installed() -> tuple[str, ...]:
    """Top-level modules that are served now; empty without ``install``."""
    return _finder.names


def install_from_environment() -> None:
    """What the variable STATESCAN_COMPAT does at the start of Python; never raises."""
    try:
        install()
    except Exception as error:  # noqa: BLE001  (a start of Python must not fail because of us)
        print(f"statescan: STATESCAN_COMPAT is set, but: {error}", file=sys.stderr)  # noqa: T201


def _wanted(names: Collection[str] | None) -> tuple[str, ...]:
    known = tuple(name for name in tree.MODULES if "." not in name)
    if names is None:
        return known
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ArgumentError(
            f"install: {unknown[0]!r} is not a module that statescan serves.\n"
            f"It serves {', '.join(known)}.\nLeave names out for all of them."
        )
    return tuple(name for name in known if name in names)


def _broken_originals(wanted: Collection[str]) -> list[tuple[str, str]]:
    """Installed originals that do not import, with the reason; refuses if one does."""
    present = [name for name in wanted if _original(name) is not None]
    broken = []
    for name in present:
        why = _why_broken(name)
        if why is None:
            raise BackendUnavailableError(
                f"install: the original {name} is installed and imports.\n"
                "statescan serves a name only where no working package has it.\n"
                f"Uninstall it, or call install(force=True) to use statescan instead."
            )
        broken.append((name, why))
    return broken


def _original(name: str) -> ModuleSpec | None:
    """The spec of a package on disk; a shim of ours is none."""
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    distribution = tree.distribution_of(name)
    if distribution is not None:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return spec
        if version.endswith("+statescan"):
            return None
    return spec


def _why_broken(name: str) -> str | None:
    """Import the original in a child, which may crash; None if it works."""
    command = [sys.executable, "-c", f"import torch, {name}"]
    # The variable would serve the name there, which then always works.
    environment = {key: value for key, value in os.environ.items() if key != "STATESCAN_COMPAT"}
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}"
    if child.returncode == 0:
        return None
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {child.returncode}"


def _is_served(module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and isinstance(getattr(spec, "loader", None), _Loader)


def _imported_too_early(wanted: Collection[str]) -> list[str]:
    """Modeling modules of transformers that looked for a served package when they were imported."""
    found = []
    for key, module in list(sys.modules.items()):
        if ".modeling_" not in key or not key.startswith("transformers."):
            continue
        names = vars(module).keys() if module is not None else ()
        if any(name in names for name in _LOOKED_FOR):
            found.append(key)
    return sorted(found)


_LOOKED_FOR = (
    *("causal_conv1d_fn", "selective_scan_fn", "mamba_inner_fn", "selective_state_update"),
    *("mamba_chunk_scan_combined", "is_fast_path_available"),
)
