# SPDX-License-Identifier: Apache-2.0
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers.fake_machine import distribution, machine, write

from statescan.doctor.facts import children, extensions
from statescan.doctor.model import Fact

TORCH = """\
import types
__version__ = "2.7.1+cu128"
version = types.SimpleNamespace(cuda="12.8", hip={hip!r})
_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_80 sm_90 compute_90")
def properties(index):
    return types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * 10**9,
                                 gcnArchName="gfx942:sramecc+:xnack-")
cuda = types.SimpleNamespace(is_available=lambda: {gpus} > 0, device_count=lambda: {gpus},
                             get_device_properties=properties)
"""

COMPILED = [Path(one) for one in sys.path if Path(one).name == "lib-dynload"]
"""Where the standard library has its compiled modules."""


@pytest.fixture
def here(tmp_path):
    found = machine(tmp_path)
    found.search_path = (found.site, Path(sysconfig.get_path("stdlib")), *COMPILED)
    write(found.site / "torch/__init__.py", TORCH.format(hip=None, gpus=1))
    return found


def seen(here) -> dict[str, Fact]:
    static = {
        "extensions.modules": Fact("extensions.modules", extensions.modules(here), "files"),
        "extensions.python": Fact("extensions.python", extensions.python(here), "files"),
        "driver.amd": Fact("driver.amd", None, "files"),
    }
    return children.with_answers(static, children.torch_and_originals(here, smoke=True))


def module(here, name: str, text: str) -> Path:
    """An importable file, and beside it one that looks like a compiled module."""
    write(here.site / f"{name}.cpython-399-x86_64-linux-gnu.so", "not a binary")
    return write(here.site / f"{name}.py", text)


def test_torch_and_its_gpus(here):
    found = seen(here)
    assert found["torch.import"].value["ok"] is True
    assert 0 <= found["torch.import"].value["seconds"] < 10
    assert found["torch.arch_list"].value == ["sm_80", "sm_90", "compute_90"]
    assert found["torch.cuda_available"].value is True
    assert found["torch.devices"].value == [
        {"name": "NVIDIA H200", "capability": "9.0", "memory_gb": 139.7}
    ]
    assert "torch" not in {fact.problem for fact in found.values()}


def test_gpus_of_amd_are_no_cuda_devices(here):
    write(here.site / "torch/__init__.py", TORCH.format(hip="6.3.42131", gpus=2))
    found = seen(here)
    assert found["torch.devices"].value == []
    assert found["driver.amd"].value == {"rocm": None, "gpus": ["gfx942", "gfx942"]}


def test_an_import_that_fails_is_told_with_its_last_line(here):
    write(here.site / "torch/__init__.py", "raise ImportError('libcudnn.so.9: no such file')\n")
    found = seen(here)
    row = found["torch.import"].value
    assert row["ok"] is False and row["seconds"] is None
    assert row["error"].splitlines()[-1] == "ImportError: libcudnn.so.9: no such file"
    assert found["torch.devices"].value is None
    assert found["torch.cuda_available"].value is None


def test_what_needs_a_broken_torch_is_unknown(here):
    write(here.site / "torch/__init__.py", "raise ImportError('broken')\n")
    module(here, "selective_scan_cuda", "import torch\n")
    row = seen(here)["extensions.modules"].value["selective_scan_cuda"]
    assert (row["importable"], row["error"]) == (None, "")


def test_imports_of_the_originals(here):
    module(here, "selective_scan_cuda", "import torch\nprint('loaded', flush=True)\n")
    module(here, "causal_conv1d_cuda", "raise ImportError('x.so: undefined symbol: _ZN3c10')\n")
    write(here.site / "mamba_ssm/__init__.py", "import selective_scan_cuda, causal_conv1d_cuda\n")
    found = seen(here)
    modules, packages = found["extensions.modules"].value, found["extensions.python"].value
    assert modules["selective_scan_cuda"]["importable"] is True
    assert modules["causal_conv1d_cuda"]["importable"] is False
    assert modules["causal_conv1d_cuda"]["error"].endswith("undefined symbol: _ZN3c10")
    assert packages["mamba_ssm"]["importable"] is False
    assert packages["mamba_ssm"]["file"] == str(here.site / "mamba_ssm/__init__.py")
    assert "causal_conv1d" not in packages


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of POSIX")
def test_a_crash_ends_one_step_and_no_other(here):
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    module(here, "causal_conv1d_cuda", crash)
    module(here, "selective_scan_cuda", "import torch\n")
    module(here, "selective_scan_cuda_core", "import os\nos._exit(7)\n")
    modules = seen(here)["extensions.modules"].value
    assert modules["selective_scan_cuda"]["importable"] is True
    assert modules["causal_conv1d_cuda"]["importable"] is False
    assert modules["causal_conv1d_cuda"]["error"].endswith("the process was ended by SIGSEGV")
    assert "causal_conv1d_cuda.py" in modules["causal_conv1d_cuda"]["error"]
    error = modules["selective_scan_cuda_core"]["error"]
    assert error.endswith("the process ended with exit status 7")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of POSIX")
def test_a_torch_that_crashes_is_tried_once(here):
    text = f"open({str(here.cwd / 'tried')!r}, 'a').write('x')\nimport os\nos.abort()\n"
    write(here.site / "torch/__init__.py", text)
    module(here, "selective_scan_cuda", "import torch\n")
    found = seen(here)
    assert found["torch.import"].value["error"].endswith("ended by SIGABRT")
    assert (here.cwd / "tried").read_text() == "x"


def test_a_step_that_hangs_is_ended(here):
    module(here, "selective_scan_cuda", "import time\ntime.sleep(60)\n")
    answers = children.ask(here, ["torch", "import:selective_scan_cuda", "devices"], seconds=2)
    assert answers["torch"]["ok"] is True
    assert answers["import:selective_scan_cuda"]["error"] == "no answer within 2 s"
    assert answers["devices"]["error"].startswith("not tried")


def test_an_import_that_exits_is_an_error_of_its_own(here):
    module(here, "selective_scan_cuda", "raise SystemExit('no GPU')\n")
    row = seen(here)["extensions.modules"].value["selective_scan_cuda"]
    assert (row["importable"], row["error"].splitlines()[-1]) == (False, "SystemExit: no GPU")


def test_the_child_sees_the_current_folder_only_if_this_process_does(here):
    write(here.cwd / "mamba_ssm/__init__.py")
    distribution(here.site, "mamba_ssm", "2.2.4")
    write(here.site / "mamba_ssm/__init__.py")
    assert seen(here)["extensions.python"].value["mamba_ssm"]["file"].startswith(str(here.site))
    here.sees_cwd = True
    assert seen(here)["extensions.python"].value["mamba_ssm"]["file"].startswith(str(here.cwd))


def test_statescan_does_not_answer_for_the_originals(here):
    here.environ = {**here.environ, "STATESCAN_COMPAT": "1"}
    text = "import os\nassert 'STATESCAN_COMPAT' not in os.environ\n"
    module(here, "selective_scan_cuda", text)
    assert seen(here)["extensions.modules"].value["selective_scan_cuda"]["importable"] is True


def test_a_computation_is_tried_where_there_is_a_gpu(here):
    write(here.site / "causal_conv1d/__init__.py")
    usable = seen(here)["extensions.python"].value["causal_conv1d"]["usable"]
    assert list(usable) == ["causal_conv1d"] and "has no attribute" in usable["causal_conv1d"]
    write(here.site / "torch/__init__.py", TORCH.format(hip=None, gpus=0))
    here._ran.clear()
    assert seen(here)["extensions.python"].value["causal_conv1d"]["usable"] == {}


def test_looking_writes_nothing_beside_what_it_imports(here):
    module(here, "selective_scan_cuda", "import torch\n")
    before = sorted(here.site.rglob("*"))
    seen(here)
    assert sorted(here.site.rglob("*")) == before


def test_the_library_is_asked_for_without_torch_too(here):
    package = Path(children.__file__).parents[3]
    here.search_path = (package, *map(Path, sys.path))
    found = children.own(here, smoke=True, with_torch=False)
    assert list(found) == ["statescan.native"]
    assert set(found["statescan.native"].value) in ({"path", "isa"}, {"error"})


def test_a_statescan_that_cannot_be_imported(here):
    found = children.own(here, smoke=True)
    assert found["statescan.native"].value is None
    assert "No module named 'statescan'" in found["statescan.native"].problem
    assert found["statescan.smoke"].value["ok"] is False
