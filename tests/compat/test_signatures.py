# SPDX-License-Identifier: Apache-2.0
"""Served functions have the originals' parameters: names, order and defaults.

``signatures.json`` was read from the source packages of the versions that stand in it.
"""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

from statescan.compat import tree

SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text())
NEW = object()
"""A default that is made anew for each object."""


def served(path: str) -> Any:
    """The object that statescan serves under ``module:name`` or ``module:class.method``."""
    module, _, name = path.partition(":")
    outer, _, method = name.partition(".")
    source, _, inner = tree.MODULES[module][outer].partition(":")
    found = getattr(import_module(f"statescan.compat.{source}"), inner)
    return inspect.getattr_static(found, method) if method else found


def original_parameters(path: str) -> list[tuple[str, Any]]:
    """Name and default of each parameter; ``inspect.Parameter.empty`` where there is none."""
    rows = []
    for name, text in SIGNATURES[path]["parameters"]:
        rows.append((name, inspect.Parameter.empty if text is None else value_of(text)))
    return rows


def value_of(text: str) -> Any:
    """The value of a default as it stands in the source."""
    known = {"F.silu": F.silu, "nn.LayerNorm": nn.LayerNorm}
    if text in known:
        return known[text]
    if text.startswith("field("):
        return NEW
    return ast.literal_eval(text.replace("float('inf')", "1e999"))


def own_parameters(found: Any) -> list[tuple[str, Any]]:
    """The same of a served object; what may follow by keyword only is left out."""
    if is_dataclass(found):
        return [(f.name, default_of(f)) for f in fields(found) if f.init]
    function = getattr(found, "__func__", found)
    rows = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        rows.append((f"{stars}{parameter.name}", parameter.default))
    return rows


def default_of(item: Any) -> Any:
    if item.default_factory is not MISSING:
        return NEW
    return inspect.Parameter.empty if item.default is MISSING else item.default


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters_are_the_originals(path):
    assert own_parameters(served(path)) == original_parameters(path)


def test_served_functions_are_plain():
    """transformers drops every keyword that ``inspect.signature`` does not show."""
    for path in SIGNATURES:
        found = served(path)
        if "." not in path.partition(":")[2] and not isinstance(found, type):
            assert inspect.isfunction(found), path
            kinds = {p.kind for p in inspect.signature(found).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, path


def test_every_served_name_exists():
    for module, names in tree.MODULES.items():
        for name, place in names.items():
            source, _, inner = place.partition(":")
            assert hasattr(import_module(f"statescan.compat.{source}"), inner), f"{module}.{name}"
