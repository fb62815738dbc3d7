# SPDX-License-Identifier: Apache-2.0
"""Loads and saves models in state-spaces' layout and in transformers', from folders or the hub.

Names are in ``key_maps``, files in ``tensor_files``, ``torch_files`` and ``model_writer``. The
state of training lives in ``training.state``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from statescan.errors import ArgumentError, CheckpointError, StatescanError
from statescan.models.config import MambaConfig
from statescan.models.config_transformers import config_from_transformers, config_to_transformers
from statescan.models.hub import CONFIG_NAME, find_model_folder
from statescan.models.key_maps import (
    EMBEDDING,
    HEAD,
    LAYOUTS,
    Layout,
    listed,
    tensors_from_transformers,
    tensors_to_layout,
)
from statescan.models.lm import MambaLM
from statescan.models.model_writer import (
    byte_count,
    write_atomically,
    write_json,
    write_safetensors,
    write_torch_file,
)
from statescan.models.safe_files import one_line, read_json_object, reason
from statescan.models.tensor_files import SAFETENSORS_NAME, import_safetensors, read_tensors
from statescan.nn.precision import full_precision_parameters

__all__ = ["import_safetensors", "load_model", "read_config", "save_model", "write_atomically"]

WEIGHTS_NAME = SAFETENSORS_NAME
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_model(
    source: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> MambaLM:
    """Load a checkpoint in state-spaces' layout or in transformers', in evaluation mode.

    No code of the checkpoint is executed, whatever its files hold.

    Args:
        source: Folder with config.json and model.safetensors, its shards, or pytorch_model.bin; or
            the id of such a checkpoint on the Hugging Face hub, as in "state-spaces/mamba-130m".
        device: Where to put the parameters; default torch's default device, usually the CPU.
        dtype: Convert to it, except the state-space parameters; default as stored.
        revision: Branch, tag or commit on the hub; default its main branch.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the configuration; or the
            hub cannot be reached and the local cache has not got the checkpoint.
        MissingExtraError: safetensors or huggingface_hub is needed and not installed.
    """
    folder = find_model_folder(source, revision)
    config, layout = read_config(folder / CONFIG_NAME)
    tensors = read_tensors(folder)
    if layout == "transformers":
        tensors = {tensors_from_transformers(name): tensor for name, tensor in tensors.items()}
    _check_tensors(folder, config, tensors)
    model = _empty_model(folder, config)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    # Asked by making a tensor: the default may be set for good or by a `with` of torch.device.
    place = torch.empty(0).device if device is None else device
    return model.to(device=place, dtype=dtype).eval()


def save_model(
    model: MambaLM,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    layout: Layout = "state-spaces",
    weights: Literal["safetensors", "torch"] = "safetensors",
    max_shard_size: int | str | None = None,
) -> None:
    """Write config.json and the weights; each file appears whole or not at all.

    Weights of an earlier save, by this function or by transformers, are replaced.

    Args:
        model: Any MambaLM; a tied head is stored once.
        directory: Made if it does not exist.
        dtype: Store the weights so, except the state-space parameters, which stay float32.
        layout: "state-spaces", or "transformers" for its ``MambaForCausalLM``. Numbers of special
            tokens are stored in the latter only.
        weights: "safetensors", or "torch" for pytorch_model.bin, which is what mamba_ssm reads.
        max_shard_size: Split safetensors into files of at most so many bytes; "5GB" is understood.

    Raises:
        ArgumentError: the layout cannot express the model, or an option is not one of the allowed.
    """
    _check_options(dtype, layout, weights, max_shard_size)
    max_bytes = None if max_shard_size is None else byte_count(max_shard_size)
    if layout == "transformers":
        values = config_to_transformers(model.config)
        values["torch_dtype"] = str(dtype or model.lm_head.weight.dtype).removeprefix("torch.")
    else:
        values = model.config.to_dict()
    if weights == "safetensors":
        import_safetensors()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _stored_tensors(model, dtype, layout, with_tied_head=weights == "torch")
    if weights == "torch":
        write_torch_file(folder, tensors)
    else:
        write_safetensors(folder, tensors, max_bytes)
    write_json(folder / CONFIG_NAME, values)


def read_config(path: Path) -> tuple[MambaConfig, Layout]:
    """The configuration in a config.json, and the layout that it belongs to."""
    values = read_json_object(path)
    # Checkpoints that were converted to transformers' layout often keep the keys of the other.
    layout: Layout = "transformers" if "model_type" in values else "state-spaces"
    read = config_from_transformers if layout == "transformers" else MambaConfig.from_dict
    try:
        return read(values), layout
    except (ArgumentError, TypeError) as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).splitlines())}") from error


def _check_options(
    dtype: torch.dtype | None, layout: str, weights: str, max_shard_size: int | str | None
) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise ArgumentError(
            f"save_model: got dtype={dtype}.\n"
            f"It must be one of {', '.join(map(str, _DTYPES))}, or None.\n"
            "Use torch.bfloat16 for half the size."
        )
    if layout not in LAYOUTS or weights not in ("safetensors", "torch"):
        raise ArgumentError(
            f"save_model: got layout={layout!r}, weights={weights!r}.\n"
            f"The layouts are {' and '.join(LAYOUTS)}, the weights safetensors or torch.\n"
            "Leave them out for what load_model reads fastest."
        )
    if weights == "torch" and max_shard_size is not None:
        raise ArgumentError(
            f"save_model: got max_shard_size={max_shard_size!r} and weights='torch'.\n"
            "Only safetensors are split.\n"
            "Leave one of them out."
        )


def _stored_tensors(
    model: MambaLM, dtype: torch.dtype | None, layout: Layout, with_tied_head: bool
) -> dict[str, Tensor]:
    """Tensors under their names in the files; those of the state space in full precision."""
    kept = full_precision_parameters(model)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == HEAD and model.config.tie_embeddings:
            continue
        stored = tensor.detach().to("cpu", None if name in kept else dtype)
        tensors[tensors_to_layout(name, layout)] = stored.contiguous()
    if with_tied_head and model.config.tie_embeddings:
        # mamba_ssm asks for both names; torch.save writes their common data once.
        tensors[HEAD] = tensors[tensors_to_layout(EMBEDDING, layout)]
    return tensors


def _empty_model(folder: Path, config: MambaConfig) -> MambaLM:
    """The model without memory for its weights, which are assigned afterwards."""
    try:
        with torch.device("meta"):
            return MambaLM(config)
    except (StatescanError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        why = one_line(str(error).splitlines()[0]) if str(error) else reason(error)
        raise CheckpointError(f"{folder / CONFIG_NAME} describes no model: {why}") from error


def _expected_shapes(
    folder: Path, config: MambaConfig, tensors: dict[str, Tensor]
) -> dict[str, torch.Size]:
    """Shapes by name, from a model of one layer: all layers are built only once they are there."""
    layers = sum(name.endswith(".mixer.D") for name in tensors)
    if layers != config.n_layer:
        raise CheckpointError(
            f"{folder}: {CONFIG_NAME} asks for {config.n_layer} layers, "
            f"the checkpoint has {layers} layers"
        )
    expected: dict[str, torch.Size] = {}
    for name, tensor in _empty_model(folder, replace(config, n_layer=1)).state_dict().items():
        before, layer, after = name.partition("backbone.layers.0.")
        for i in range(layers if layer else 1):
            expected[f"backbone.layers.{i}.{after}" if layer else before] = tensor.shape
    return expected


def _check_tensors(folder: Path, config: MambaConfig, tensors: dict[str, Tensor]) -> None:
    """Refuse names and shapes that do not fit, before anything is built or assigned."""
    expected = _expected_shapes(folder, config, tensors)
    tied = config.tie_embeddings
    if tied and HEAD not in tensors and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    for names, verb in ((missing, "lacks"), (unexpected, "has the unknown tensor")):
        if names:
            raise CheckpointError(f"{folder}: the checkpoint {verb} {one_line(listed(names))}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name] or tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype} {one_line(tuple(tensor.shape))}, "
                f"{CONFIG_NAME} asks for floating-point {tuple(expected[name])}"
            )
    if tied and not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
        raise CheckpointError(
            f"{folder}: {HEAD} and {EMBEDDING} differ, though {CONFIG_NAME} ties them: "
            "set tie_embeddings (transformers: tie_word_embeddings) to false there to use both"
        )
