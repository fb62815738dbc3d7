# SPDX-License-Identifier: Apache-2.0
"""What `import statescan` may load and do, seen from a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-c", code],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that ``statement`` adds to sys.modules."""
    code = (
        "import json, sys\nbefore = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted({n.split('.')[0] for n in set(sys.modules) - before})))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "statement", ["import statescan", "import statescan.cli.main", "import statescan.errors"]
)
def test_importing_loads_only_the_standard_library(statement):
    others = loaded_by(statement) - set(sys.stdlib_module_names) - {"statescan"}
    assert others == set()


def test_the_measure_sees_what_is_loaded():
    assert "pytest" in loaded_by("import pytest")


def test_help_works_without_torch():
    """Where torch is absent or does not load, the program still explains itself."""
    code = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("libtorch_cpu.so: cannot open shared object file")
sys.meta_path.insert(0, NoTorch())
from statescan.cli.main import main
helped = main(["--help"])
failed = main(["generate", "--prompt", "x"])
sys.exit(0 if (helped, failed) == (0, 1) else f"{helped} {failed}")
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert "libtorch_cpu.so: cannot open shared object file" in done.stderr


def test_importing_starts_nothing_and_writes_nothing(tmp_path):
    """No process, socket, folder or file for writing, by CPython's own audit events."""
    code = """
import sys
seen = []
def hook(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.mkdir", "os.remove",
                 "socket.connect", "socket.getaddrinfo", "ctypes.dlopen"):
        seen.append(f"{event}{args}")
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(f"{event}{args}")
sys.addaudithook(hook)
import statescan
if seen:
    sys.exit("\\n".join(seen))
import os
os.mkdir(sys.argv[0] or "never")
""".replace('sys.argv[0] or "never"', repr(str(tmp_path / "control")))
    done = run(code + "print(len(seen))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1", "the hook must see the control event"


def test_all_modules_import():
    """Every module, in one process with warnings as errors; __main__ runs the program instead."""
    package = ROOT / "src" / "statescan"
    names = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    done = run(f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_public_names_resolve_and_are_listed():
    code = (
        "import statescan\n"
        "missing = [n for n in statescan.__all__ if not hasattr(statescan, n)]\n"
        "assert not missing, missing\n"
        "assert set(statescan.__all__) <= set(dir(statescan))\n"
        "try:\n    statescan.no_such_name\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "no_such_name" in done.stdout
