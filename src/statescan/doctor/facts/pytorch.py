# SPDX-License-Identifier: Apache-2.0
"""Probes of the installed torch by its files: version, CUDA, string ABI, libraries.

What only an import shows is asked of a child process, in ``children``.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.probe import Seen, probe
from statescan.doctor.symbols import torch_files

_ABI = re.compile(r"_GLIBCXX_USE_CXX11_ABI=([01])")
_NAMES = (
    *("torch.version", "torch.cuda", "torch.hip", "torch.cxx11_abi"),
    *("torch.location", "torch.libraries"),
)


def folder(machine: Machine) -> Path | None:
    """The folder that ``import torch`` would take, whole or not."""
    for place in machine.search_path:
        found = place / "torch"
        if (found / "__init__.py").is_file() or (found / "lib").is_dir():
            return found
    if machine.root is not None:
        return None
    # An editable install has no folder on the path. Finding a top-level name imports nothing.
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@probe(*_NAMES, source="files of torch")
def files(machine: Machine) -> dict[str, Any]:
    """What torch/version.py and its libraries say."""
    found = folder(machine)
    if found is None:
        return {**dict.fromkeys(_NAMES), "torch.libraries": {}}
    facts = {name: Seen(row.value, row.source) for name, row in torch_files.facts(found).items()}
    written = found / "version.py"
    for name in ("torch.version", "torch.cuda", "torch.hip"):
        facts[name] = Seen(facts[name].value, str(written))
    if not facts["torch.version"].value:
        problem = f"{written} tells no version" if written.exists() else f"there is no {written}"
        facts["torch.version"] = Seen(None, str(written), problem)
    return {**facts, "torch.cxx11_abi": _string_abi(machine, found, facts["torch.cxx11_abi"])}


def _string_abi(machine: Machine, found: Path, by_symbols: Seen) -> Seen:
    """As torch's own build wrote it down, else by the symbols of its library."""
    config = found / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    said = _ABI.search(machine.read(config))
    if said:
        return Seen(said[1] == "1", str(config))
    return Seen(by_symbols.value, f"symbols of {found / 'lib'}")
