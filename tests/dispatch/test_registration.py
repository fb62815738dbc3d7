# SPDX-License-Identifier: Apache-2.0
"""When the ops become known to torch: at once, with torch, or at first use; in new processes.

What ``import statescan`` may load is tested in tests/packaging.
"""

from __future__ import annotations

import pytest
from helpers.integration import child

ASK = "import importlib.util, statescan; importlib.util.find_spec('torch'); "
KNOWN = "print(hasattr(torch.ops.statescan, 'selective_scan_fwd'))"


@pytest.mark.parametrize(
    ("code", "known"),
    [
        ("import torch; import statescan; " + KNOWN, True),
        ("import torch; import statescan.errors; " + KNOWN, True),
        ("import statescan, torch; " + KNOWN, True),
        ("import statescan; import torch.nn; import torch; " + KNOWN, True),
        ("from statescan import causal_conv1d; import torch; " + KNOWN, True),
        (ASK + "import torch; " + KNOWN, True),
        ("import torch; " + KNOWN, False),
    ],
)
def test_ops_are_registered(code, known):
    assert child(code) == f"{known}\n"


def test_import_of_statescan_does_not_import_torch():
    assert child("import statescan, sys; print('torch' in sys.modules)") == "False\n"


def test_the_hook_leaves_nothing_behind():
    """After torch is there nobody of statescan stands between Python and its modules."""
    code = """
import sys, statescan
import torch
print([finder for finder in sys.meta_path if getattr(finder, "name", "") == "torch"])
"""
    assert child(code) == "[]\n"


def test_broken_torch_fails_as_it_would_without_statescan(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import statescan
for _ in range(2):
    try:
        import torch
    except ImportError as error:
        print(error)
"""
    assert child(code) == "libtorch.so: cannot open\n" * 2


def test_reloading_or_importing_twice_registers_once():
    code = """
import importlib, torch, statescan, statescan.ops
importlib.reload(statescan)
print(statescan.causal_conv1d(torch.ones(1, 1, 2), torch.ones(1, 1)).tolist())
"""
    assert child(code) == "[[[1.0, 1.0]]]\n"
