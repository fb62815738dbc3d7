# SPDX-License-Identifier: Apache-2.0
"""Model folders: config.json beside model.safetensors, written atomically and read with care.

State of the optimiser and of training lives in ``training.state``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from statescan.errors import ArgumentError, CheckpointError, MissingExtraError, StatescanError
from statescan.models.config import MambaConfig
from statescan.models.lm import MambaLM
from statescan.nn.precision import full_precision_parameters

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TORCH_NAME = "pytorch_model.bin"
_HEAD, _EMBEDDING = "lm_head.weight", "backbone.embedding.weight"


def save_model(
    model: MambaLM, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write config.json and model.safetensors; each file appears whole or not at all.

    Args:
        model: Any MambaLM; a tied head is stored once.
        directory: Made if it does not exist.
        dtype: Store the weights so, except the state-space parameters, which stay float32.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(
            f"save_model: got dtype={dtype}.\n"
            "It must be a floating-point dtype or None.\n"
            "Use torch.bfloat16 for half the size."
        )
    safetensors = import_safetensors()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    kept = full_precision_parameters(model)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == _HEAD and model.config.tie_embeddings:
            continue
        stored = tensor.detach().to("cpu", None if name in kept else dtype)
        tensors[name] = stored.contiguous()
    metadata = {"format": "pt"}
    write_atomically(
        folder / WEIGHTS_NAME, lambda file: safetensors.save_file(tensors, file, metadata)
    )
    text = model.config.to_json()
    write_atomically(folder / CONFIG_NAME, lambda file: file.write_text(text, encoding="utf-8"))


def load_model(
    directory: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> MambaLM:
    """Read a model folder of ``save_model`` or of state-spaces, in evaluation mode.

    Args:
        directory: Holds config.json and model.safetensors (or its shards, or pytorch_model.bin).
        device: Where to put the parameters; default the CPU.
        dtype: Convert to it, except the state-space parameters; default as stored.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the configuration.
        MissingExtraError: safetensors is not installed.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give one with {CONFIG_NAME} in it")
    config = MambaConfig.from_file(folder / CONFIG_NAME)
    tensors = _read_tensors(folder)
    model = _empty_model(folder, config, tensors)
    _check_tensors(folder, model, tensors)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return model.to(device=device, dtype=dtype).eval()


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


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS_NAME).is_file():
        return _read_safetensors(folder / WEIGHTS_NAME)
    if (folder / INDEX_NAME).is_file():
        tensors: dict[str, Tensor] = {}
        for name in _shard_names(folder / INDEX_NAME):
            tensors.update(_read_safetensors(folder / name))
        return tensors
    if (folder / TORCH_NAME).is_file():
        return _read_torch(folder / TORCH_NAME)
    names = f"{WEIGHTS_NAME}, {INDEX_NAME} or {TORCH_NAME}"
    raise CheckpointError(f"{folder} holds none of {names}")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    safetensors = import_safetensors()
    try:
        mapped: dict[str, Tensor] = safetensors.load_file(path)
        # Copies rather than the memory map: a mapped file cannot be replaced on Windows.
        tensors = {name: tensor.clone() for name, tensor in mapped.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        # safetensors raises a class of its own, and others for damaged headers.
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error
    return tensors


def _shard_names(path: Path) -> list[str]:
    """File names of an index, each of which must lie in the index's own folder."""
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of shards: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path} names the shard {name!r}, which is not in its folder")
    return names


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        # weights_only: a pickle from elsewhere must not run code.
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Unpickling a damaged file raises almost anything.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or holds more than tensors: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise CheckpointError(f"{path} is not a table of tensors")
    return tensors


def _empty_model(folder: Path, config: MambaConfig, tensors: dict[str, Tensor]) -> MambaLM:
    """The model without memory for its weights, which are assigned afterwards."""
    layers = sum(name.endswith(".mixer.D") for name in tensors)
    if layers != config.n_layer:
        # Before building, which would take for ever where a damaged n_layer is huge.
        raise CheckpointError(
            f"{folder}: {CONFIG_NAME} asks for n_layer={config.n_layer}, "
            f"the checkpoint has {layers} layers"
        )
    try:
        with torch.device("meta"):
            return MambaLM(config)
    except (StatescanError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{folder / CONFIG_NAME} describes no model: {reason}") from error


def _check_tensors(folder: Path, model: MambaLM, tensors: dict[str, Tensor]) -> None:
    """Refuse names and shapes that do not fit, before anything is assigned."""
    expected = model.state_dict()
    tied = model.config.tie_embeddings
    if tied and _HEAD not in tensors and _EMBEDDING in tensors:
        tensors[_HEAD] = tensors[_EMBEDDING]
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    for names, verb in ((missing, "lacks"), (unexpected, "has the unknown tensor")):
        if names:
            raise CheckpointError(f"{folder}: the checkpoint {verb} {_listed(names)}")
    for name, tensor in tensors.items():
        wanted = expected[name].shape
        if tensor.shape != wanted or not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"{CONFIG_NAME} asks for floating-point {tuple(wanted)}"
            )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
