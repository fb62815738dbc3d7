# SPDX-License-Identifier: Apache-2.0
"""Finds the weight files of a model folder and reads them: one file or shards, of either format.

Names of tensors are kept as stored; what they mean is ``checkpoint``'s and ``key_maps``' business.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import Tensor

from statescan.errors import CheckpointError, MissingExtraError
from statescan.models.key_maps import listed
from statescan.models.safe_files import check_regular, exists, one_line, read_json_object, reason
from statescan.models.torch_files import read_torch_file

SAFETENSORS_NAME = "model.safetensors"
SAFETENSORS_INDEX_NAME = "model.safetensors.index.json"
TORCH_NAME = "pytorch_model.bin"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
WEIGHT_NAMES = (SAFETENSORS_NAME, SAFETENSORS_INDEX_NAME, TORCH_NAME, TORCH_INDEX_NAME)
"""In the order of preference."""

_PLAIN_NAME = re.compile(r"\w[\w.\-]*", re.ASCII)


def import_safetensors() -> ModuleType:
    """safetensors.torch, or an error that says how to install it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError(
            "model files need safetensors, which is not installed: pip install 'statescan[models]'"
        ) from error
    module: ModuleType = safetensors.torch
    return module


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weight file or of its shards.

    Raises:
        CheckpointError: there is none, or one is damaged.
    """
    name = next((name for name in WEIGHT_NAMES if exists(folder / name)), None)
    if name is None:
        raise CheckpointError(f"{folder} holds none of {', '.join(WEIGHT_NAMES)}")
    read = _read_safetensors if name.startswith(SAFETENSORS_NAME) else read_torch_file
    if name in (SAFETENSORS_INDEX_NAME, TORCH_INDEX_NAME):
        return _read_shards(folder / name, read)
    return read(folder / name)


def shard_names(path: Path) -> dict[str, set[str]]:
    """The shards of an index and the tensors in each; every shard lies in the index's folder."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} is not an index of shards: it has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        # One plain name: no way out of the folder on any system, and nothing hidden.
        if not isinstance(shard, str) or not _PLAIN_NAME.fullmatch(shard):
            raise CheckpointError(
                f"{path} names the shard {one_line(repr(shard))}, which is not in its folder"
            )
        shards.setdefault(shard, set()).add(tensor)
    return shards


def _read_shards(path: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shards = shard_names(path)
    missing = [shard for shard in shards if not exists(path.parent / shard)]
    if missing:
        raise CheckpointError(
            f"{path} names {len(shards)} shards, of which {listed(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    for shard, wanted in shards.items():
        found = read(path.parent / shard)
        for names, problem in (
            (wanted - found.keys(), "lacks"),
            (found.keys() - wanted, "has, against the index,"),
        ):
            if names:
                raise CheckpointError(f"{path.parent / shard} {problem} {one_line(listed(names))}")
        tensors.update(found)
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    safetensors = import_safetensors()
    check_regular(path)
    try:
        mapped: dict[str, Tensor] = safetensors.load_file(path)
        # Copies rather than the memory map: a mapped file cannot be replaced on Windows.
        return {name: tensor.clone() for name, tensor in mapped.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    except Exception as error:
        # safetensors raises a class of its own, and others for damaged headers.
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file: {reason(error)}"
        ) from error
