# SPDX-License-Identifier: Apache-2.0
"""ONNX export: a language model as one file, or any module that calls the sequence ops.

The recurrence becomes one ONNX ``Scan``, so that lengths stay free. How each op is written out is
in ``_onnx_forms``; nothing here runs in training or generation.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from statescan.errors import ArgumentError, BackendUnavailableError, MissingExtraError
from statescan.generation._onnx_forms import FORMS, decompositions, of_torch
from statescan.models.lm import MambaLM
from statescan.nn.cache import InferenceCache, LayerCache

__all__ = ["decompositions", "export_onnx", "onnx_program"]

_PACKING = ("seq_idx", "cu_seqlens")
_LIBRARIES = ("onnx", "onnxscript")


def export_onnx(model: MambaLM, path: str | os.PathLike[str]) -> None:
    """Write a language model as one ONNX file whose batch and number of tokens are free.

    Inputs are input_ids (batch, seqlen), conv_states (layers, batch, d_inner, d_conv - 1) and
    ssm_states (layers, batch, d_inner, d_state); outputs are logits (batch, seqlen, padded
    vocabulary) and both states after the last token. Zero states begin a text, so one file serves
    prompts, chunks of prompts and single steps.

    Args:
        model: A MambaLM on the CPU; weights are stored in its dtype.
        path: File to write; above 2 GB the weights go into a second file beside it.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
        BackendUnavailableError: this torch cannot translate a scan.
    """
    if model.device.type != "cpu":
        raise ArgumentError(
            f"export_onnx: the model is on {model.device}.\n"
            "It must be on the CPU.\n"
            "Use export_onnx(model.cpu(), path)."
        )
    wrapped = _WithStates(model)
    # Sizes of 2 and more: torch.export takes 1 for a constant.
    input_ids = torch.zeros(2, 4, dtype=torch.long)
    states = wrapped.zero_states(2)
    batch, seqlen = torch.export.Dim("batch"), torch.export.Dim("seqlen")
    free = ({0: batch, 1: seqlen}, {1: batch}, {1: batch})
    program = onnx_program(
        wrapped,
        (input_ids, *states),
        dynamic_shapes=free,
        input_names=["input_ids", "conv_states", "ssm_states"],
        output_names=["logits", "new_conv_states", "new_ssm_states"],
    )
    program.save(os.fspath(path))


def onnx_program(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
) -> Any:
    """torch's ``ONNXProgram`` of any module that calls sequence ops; ``save`` writes it.

    Args:
        module: In evaluation mode; its calls must be without packing and without complex A.
        args: Example inputs, none of them empty; axes named in ``dynamic_shapes`` 2 or longer.
        dynamic_shapes: As in ``torch.export.export``.
        input_names, output_names: Of the graph.

    Raises:
        BackendUnavailableError: an op, or a way of calling it, has no form in ONNX.
    """
    _require_libraries()
    # With gradients on, models take the sequence ops for single tokens too; the decode ops write
    # into their states, which a graph of ONNX cannot.
    with torch.enable_grad():
        exported = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
    _refuse_untranslatable(exported)
    table = {**torch.export.default_decompositions(), **decompositions()}
    decomposed = exported.run_decompositions(table)
    with warnings.catch_warnings():
        # One Dim for the axes of several inputs is meant, and torch warns of each.
        warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
        return torch.onnx.export(
            decomposed,
            dynamo=True,
            input_names=input_names,
            output_names=output_names,
            # The axes are free already; here it gives them the names of their Dims.
            dynamic_shapes=dynamic_shapes,
            verbose=False,
        )


class _WithStates(nn.Module):
    """A model whose states are arguments and results instead of a cache."""

    def __init__(self, model: MambaLM) -> None:
        super().__init__()
        self.model = model

    def zero_states(self, batch: int) -> tuple[Tensor, Tensor]:
        cache = self.model.allocate_inference_cache(batch)
        return _stacked(cache)

    def forward(
        self, input_ids: Tensor, conv_states: Tensor, ssm_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        pairs = zip(conv_states.unbind(0), ssm_states.unbind(0))
        cache = InferenceCache([LayerCache(conv.clone(), ssm.clone()) for conv, ssm in pairs])
        logits = self.model(input_ids, cache=cache).logits
        return (logits, *_stacked(cache))


def _stacked(cache: InferenceCache) -> tuple[Tensor, Tensor]:
    return (
        torch.stack([layer.conv_state for layer in cache]),
        torch.stack([layer.ssm_state for layer in cache]),
    )


def _require_libraries() -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"ONNX export needs {' and '.join(missing)}, which is not installed: "
            "pip install onnx onnxscript"
        )
    of_torch("torch.onnx._internal.exporter._torchlib.ops.hop", "higher_order_scan")


def _refuse_untranslatable(exported: torch.export.ExportedProgram) -> None:
    """One clear reason before the exporter gives a long one."""
    for node in exported.graph.nodes:
        name = str(node.target)
        if node.op != "call_function" or not name.startswith("statescan."):
            continue
        op = name.split(".")[1]
        if op not in FORMS:
            raise BackendUnavailableError(
                f"ONNX export: {op} has no form in ONNX, because it writes into its arguments.\n"
                "Only selective_scan, causal_conv1d and mamba_inner can be exported.\n"
                "Pass the states as initial_states and take the final ones, as export_onnx does."
            )
        values = dict(zip((a.name for a in node.target._schema.arguments), node.args))
        packed = [name for name in _PACKING if values.get(name) is not None]
        if packed:
            raise BackendUnavailableError(
                f"ONNX export: {op} is called with {packed[0]}, which has no form in ONNX.\n"
                "Export a model that is called with one sequence a row.\n"
                "Run rows of unequal length one at a time."
            )
        if values["A" if "A" in values else "x"].meta["val"].is_complex():
            raise BackendUnavailableError(
                f"ONNX export: {op} is called with complex A, and ONNX has no complex arithmetic.\n"
                "Export a model whose A is real.\nMamba-1 and Mamba-2 models have real A."
            )
