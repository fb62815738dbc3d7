# SPDX-License-Identifier: Apache-2.0
"""The layers import only downward, and a few imports that would undo the design stay out.

Read from the syntax trees, so a rule holds for imports inside functions too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "statescan"

LAYERS = (
    ("errors", "settings", "_after_import"),
    ("reference", "kernels"),
    ("backends",),
    ("dispatch",),
    ("ops",),
    ("testing", "nn"),
    ("models",),
    ("generation",),
    ("training", "compat"),
    # Needs nothing of the layers between: it runs where torch is missing or broken.
    ("doctor",),
    ("cli",),
)
"""From the bottom to the top; a module imports from its own entry and from lower rows."""

RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}

BACKENDS_FOR_OPS = {"statescan.backends.base", "statescan.backends.outputs"}
"""The modules of backends/ that ops may import: the description of a call, and the allocation of
its outputs. Neither runs anything or belongs to one backend."""

ROOT_IMPORTERS = ("backends/native.py", "cli/", "doctor/")
"""Modules that may import the package itself: the loader of the native library, which searches its
``__path__``, the doctor, which tells the version, and the top layer."""


def modules() -> list[str]:
    return sorted(
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE or path.stem in RANK
    )


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported from statescan."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "statescan":
            names = [f"statescan.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "statescan.backends":
            names = [f"statescan.backends.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}"]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("statescan", ""):
                yield node.lineno, name


def layer_violations(module: str, source: str) -> list[str]:
    """What ``module`` (a path inside the package) imports against the rules."""
    own = module.removesuffix(".py").split("/")[0]
    if own not in RANK:
        return [f"{module}: {own!r} has no place in LAYERS; give it one"]
    found = []
    for line, name in imported(ast.parse(source)):
        where = f"{module}:{line}"
        target = name.split(".")[1] if name.count(".") else ""
        if name.startswith("."):
            found.append(f"{where}: relative import {name}")
        elif not target or target not in RANK:
            if not module.startswith(ROOT_IMPORTERS):
                found.append(f"{where}: {name} is the package's top, not a layer below {own}")
        elif target != own and RANK[target] >= RANK[own]:
            found.append(f"{where}: {own} imports {name}, which is not below it")
        elif own == "ops" and target == "backends" and name not in BACKENDS_FOR_OPS:
            found.append(f"{where}: ops reach backends through dispatch only, not by {name}")
        elif own in ("nn", "models") and target in ("backends", "dispatch"):
            found.append(f"{where}: {own} imports {name}; it must not choose kernels")
    return found


def backend_names_in_modules(module: str, source: str) -> list[str]:
    """Calls under nn/ that force a backend by a literal name."""
    if not module.startswith("nn/"):
        return []
    return [
        f"{module}:{node.value.lineno}: backend={node.value.value!r}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.keyword)
        and node.arg == "backend"
        and isinstance(node.value, ast.Constant)
        and node.value.value != "auto"
    ]


def environment_reads(module: str, source: str) -> list[str]:
    """Reads of one environment variable outside settings.py; copying all for a child is fine."""
    if module == "settings.py":
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
        if text.startswith(("os.getenv(", "os.environ.get(", "os.environ[")):
            found.append(f"{module}:{node.lineno}: {text}")
    return found


def swallowed_import_errors(module: str, source: str) -> list[str]:
    """Handlers that turn a failed import into nothing: pass, or a name set to a constant."""

    def is_nothing(statement: ast.stmt) -> bool:
        value = getattr(statement, "value", None)
        return isinstance(statement, ast.Pass) or (
            isinstance(statement, ast.Assign | ast.Expr) and isinstance(value, ast.Constant)
        )

    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "Exception"
        names = set(re.findall(r"\w+", caught))
        wide = names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
        if wide and all(is_nothing(statement) for statement in node.body):
            found.append(f"{module}:{node.lineno}: except {caught} drops the error")
    return found


CHECKS = (
    layer_violations,
    backend_names_in_modules,
    environment_reads,
    swallowed_import_errors,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_module_keeps_the_rule(check):
    found = [line for name in modules() for line in check(name, (PACKAGE / name).read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        (layer_violations, "backends/torch/scan.py", "from statescan.dispatch import select"),
        (
            layer_violations,
            "errors.py",
            "def f():\n    import statescan.settings as s, statescan.ops",
        ),
        (layer_violations, "dispatch/select.py", "from statescan import ops"),
        (layer_violations, "dispatch/select.py", "import statescan"),
        (layer_violations, "dispatch/select.py", "from statescan import generate"),
        (layer_violations, "ops/scan.py", "from statescan.backends.torch import selective_scan"),
        (layer_violations, "ops/scan.py", "from statescan.backends import outputs, native"),
        (layer_violations, "ops/scan.py", "from . import _shapes"),
        (layer_violations, "nn/mamba.py", "from statescan.dispatch import use_backend"),
        (layer_violations, "nn/mamba.py", "import statescan.backends.torch"),
        (layer_violations, "newfolder/x.py", ""),
        (backend_names_in_modules, "nn/mamba.py", "f(x, backend='torch')"),
        (environment_reads, "ops/scan.py", "import os\nv = os.environ.get('STATESCAN_BACKEND')"),
        (environment_reads, "ops/scan.py", "import os\nv = os.environ['STATESCAN_BACKEND']"),
        (swallowed_import_errors, "nn/x.py", "try:\n import a\nexcept ImportError:\n a = None"),
        (swallowed_import_errors, "nn/x.py", "try:\n import a\nexcept Exception:\n pass"),
        (swallowed_import_errors, "nn/x.py", "try:\n import a\nexcept:\n pass"),
    ],
)
def test_the_rules_can_fail(check, module, source):
    assert check(module, source) != []


def test_the_rules_accept_what_the_design_allows():
    allowed = {
        "ops/scan.py": "from statescan.backends.outputs import scan_chunk_size\n"
        "from statescan import dispatch, errors",
        "backends/native.py": "import statescan\nfrom statescan import settings",
        "cli/bench.py": "import os\nfrom statescan import models, ops\nenv = dict(os.environ)",
        "nn/mamba.py": "from statescan.ops import mamba_inner\nmamba_inner(x, backend='auto')",
        "cli/train.py": "try:\n import rich\nexcept ImportError as e:\n raise SystemExit from e",
        "cli/bar.py": "try:\n import rich\nexcept ImportError:\n bar = PlainBar()",
    }
    found = [line for m, source in allowed.items() for c in CHECKS for line in c(m, source)]
    assert found == []


def test_every_folder_of_the_package_has_a_layer():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(RANK), "new folders need a row in LAYERS"
