# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a model: each whole or not at all, weights in one piece or in shards.

What is stored under which name is decided by ``checkpoint``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from statescan.errors import ArgumentError
from statescan.models.tensor_files import (
    SAFETENSORS_INDEX_NAME,
    SAFETENSORS_NAME,
    TORCH_NAME,
    import_safetensors,
)

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", re.IGNORECASE)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, flush it to disk and rename it over ``path``."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read; models are meant to be shared.
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON object atomically, its keys sorted."""
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def byte_count(size: int | str) -> int:
    """A number of bytes, from itself or from text such as "5GB" or "200 MiB"."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ArgumentError(
            f"save_model: got max_shard_size={size!r}.\n"
            f"It must be a number of bytes, or text with a unit of {', '.join(_UNITS)}.\n"
            "Use '5GB', or leave it out for one file."
        )
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def write_torch_file(folder: Path, tensors: dict[str, Tensor]) -> None:
    """pytorch_model.bin; it is not used where a safetensors file stands beside it, so none may."""
    write_atomically(folder / TORCH_NAME, lambda file: torch.save(tensors, file))
    _remove_stale(folder, set())


def write_safetensors(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int | None) -> None:
    """model.safetensors, or shards of at most ``max_bytes`` with an index.

    A tensor that alone is larger gets a shard of its own. Files of an earlier save that would be
    read instead of these are removed at the end.
    """
    save = import_safetensors().save_file
    shards = _plan(tensors, max_bytes)
    names = _shard_names(len(shards))
    for name, shard in zip(names, shards):
        part = {key: tensors[key] for key in shard}
        write_atomically(folder / name, lambda file, part=part: save(part, file, {"format": "pt"}))  # type: ignore[misc]
    current = set(names)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(map(_bytes, tensors.values()))},
            "weight_map": {key: name for name, shard in zip(names, shards) for key in shard},
        }
        write_json(folder / SAFETENSORS_INDEX_NAME, index)
        current.add(SAFETENSORS_INDEX_NAME)
    _remove_stale(folder, current)


def _plan(tensors: Mapping[str, Tensor], max_bytes: int | None) -> list[list[str]]:
    """Names of the tensors of each shard, in the model's order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = _bytes(tensor)
        if max_bytes is not None and shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SAFETENSORS_NAME]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _remove_stale(folder: Path, current: set[str]) -> None:
    """Remove safetensors files under the names that this module gives, save the current ones."""
    for path in folder.iterdir():
        ours = path.name in (SAFETENSORS_NAME, SAFETENSORS_INDEX_NAME) or _SHARD.fullmatch(
            path.name
        )
        if ours and path.name not in current:
            path.unlink()
