# SPDX-License-Identifier: Apache-2.0
"""Where the code of a kernel comes from: the package's cubins, a compilation, the package's PTX.

Gives bytes and says why a better source was passed over; loading them is done by ``loading``.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from statescan.backends.cuda import cache, nvrtc, source
from statescan.backends.cuda.tables.base import Instance, Kernel

FOLDER = source.FOLDER / "cubins"
"""Of the package: a folder for each architecture, with a manifest and one file a kernel."""

MANIFEST = "manifest.json"
SCHEMA = 1
COMPRESSED = ".xz"
"""Last part of the names of compressed files: machine code shrinks to a seventh."""

PTX = "compute_80"
"""Architecture of the shipped PTX, which a driver can turn into code for any later GPU."""

_log = logging.getLogger("statescan.cuda")


@dataclass(frozen=True)
class Code:
    """Code to load.

    Attributes:
        data: A cubin, or PTX.
        origin: Where it is from, for messages.
        whole: Whether all instances of the kernel are in it, or the one that was asked for.
    """

    data: bytes
    origin: str
    whole: bool


def candidates(
    kernel: Kernel, instance: Instance, capability: tuple[int, int], reasons: list[str]
) -> Iterator[Code]:
    """Forms of an instance for a device, the best first; ``reasons`` gets why one is left out."""
    *cubin_names, ptx = _architectures(capability)
    found = (shipped(kernel, name, reasons) for name in cubin_names)
    best = next((code for code in found if code is not None), None)
    if best is not None:
        yield best
    yield from _compiled(kernel, instance, capability, reasons)
    code = shipped(kernel, ptx, reasons) if ptx else None
    if code is not None:
        # A driver compiles all that it is given, so this is a text for each instance.
        text = json.loads(code.data)[instance.suffix]
        yield Code(text.encode(), code.origin, whole=False)


def serves(capability: tuple[int, int]) -> bool:
    """Whether the package has code for a device, of any kernel."""
    return any(manifest(FOLDER / name) for name in _architectures(capability) if name)


def _architectures(capability: tuple[int, int]) -> list[str]:
    """Folders that may serve a device, the best first; the last is PTX, or empty.

    Code for 8.0 runs on 8.6 and not the other way round; nothing crosses a major version.
    """
    major, minor = capability
    return [f"sm_{major}{lesser}" for lesser in range(minor, -1, -1)] + [PTX if major >= 8 else ""]


def shipped(kernel: Kernel, architecture: str, reasons: list[str]) -> Code | None:
    """The package's code for an architecture, if it is there, whole and of these sources."""
    folder = FOLDER / architecture
    record = manifest(folder).get(kernel.stem)
    if record is None:
        return None
    path = folder / record["file"]
    if record["source"] != source.unit_hash(kernel):
        # In a checkout after a change; scripts/build_cubins makes them anew.
        reasons.append(f"{path} was built from other sources")
        return None
    try:
        data = path.read_bytes()
        if sha256(data).hexdigest() != record["sha256"]:
            reasons.append(f"{path} is damaged")
            return None
        return Code(unpacked(path.name, data), str(path), whole=True)
    # ImportError: a Python that was built without lzma.
    except (OSError, ImportError) as error:
        reasons.append(f"{path} cannot be read ({error})")
        return None


def unpacked(name: str, data: bytes) -> bytes:
    """Code as it is loaded, from a file of that name."""
    if not name.endswith(COMPRESSED):
        return data
    # Not every Python has it, and only who loads CUDA kernels needs it.
    import lzma

    return lzma.decompress(data)


@lru_cache(maxsize=32)
def manifest(folder: Path) -> dict[str, Any]:
    """Records of an architecture's kernels by stem, empty where there are none."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    kernels: dict[str, Any] = found["kernels"] if found.get("schema") == SCHEMA else {}
    return kernels


_compiling = threading.Lock()


def _compiled(
    kernel: Kernel, instance: Instance, capability: tuple[int, int], reasons: list[str]
) -> Iterator[Code]:
    """One instance from the disk cache or from NVRTC."""
    found = nvrtc.status()
    if found.compiler is None:
        reasons.append(found.reason)
        return
    architecture = found.compiler.architecture_for(capability)
    if architecture is None:
        reasons.append(f"{found.compiler.path} knows no architecture of this GPU")
        return
    text = source.unit(kernel, (instance,))
    version = ".".join(map(str, found.compiler.version))
    key = cache.key_of((text, version, architecture, *nvrtc.FLAGS))
    with _compiling:
        data = cache.read(key)
        if data is None:
            symbol = kernel.symbol(instance)
            _log.info("compiling %s for %s with NVRTC %s", symbol, architecture, version)
            try:
                data = found.compiler.compile(text, symbol, architecture).code
            except nvrtc.CompileError as error:
                reasons.append(str(error))
                return
            cache.write(key, data)
    yield Code(data, f"NVRTC {version} for {architecture}", whole=False)
