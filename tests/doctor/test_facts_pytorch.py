# SPDX-License-Identifier: Apache-2.0
import pytest
from helpers import binaries
from helpers.fake_machine import machine, write

from statescan.doctor.facts import pytorch

VERSION = """\
from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '2.5.1+cu124'
debug = False
cuda: Optional[str] = '12.4'
git_version = 'a8d6afb511a69687bbb2b7e88a3cf67917e1697e'
hip: Optional[str] = None
"""
CONFIG = 'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI={}")\n'


@pytest.fixture
def here(tmp_path):
    return machine(tmp_path)


@pytest.fixture
def torch(here):
    write(here.site / "torch/__init__.py", "raise RuntimeError('this must not be run')\n")
    write(here.site / "torch/version.py", VERSION)
    return here.site / "torch"


def values(here):
    return {name: getattr(row, "value", row) for name, row in pytorch.files(here).items()}


def test_no_torch(here):
    assert values(here) == {
        "torch.version": None,
        "torch.cuda": None,
        "torch.hip": None,
        "torch.cxx11_abi": None,
        "torch.location": None,
        "torch.libraries": {},
    }


def test_the_version_file_is_read_and_not_run(here, torch):
    found = values(here)
    assert (found["torch.version"], found["torch.cuda"]) == ("2.5.1+cu124", "12.4")
    assert (found["torch.hip"], found["torch.location"]) == (None, str(torch))
    assert pytorch.files(here)["torch.cuda"].source == str(torch / "version.py")


def test_a_build_for_rocm(here, torch):
    write(torch / "version.py", "__version__ = '2.7.1+rocm6.3'\ncuda = None\nhip = '6.3.42131'\n")
    found = values(here)
    assert (found["torch.cuda"], found["torch.hip"]) == (None, "6.3.42131")


@pytest.mark.parametrize(("written", "abi"), [(0, False), (1, True)])
def test_the_string_abi_is_written_in_the_cmake_file(here, torch, written, abi):
    config = write(torch / "share/cmake/Torch/TorchConfig.cmake", CONFIG.format(written))
    found = pytorch.files(here)["torch.cxx11_abi"]
    assert (found.value, found.source) == (abi, str(config))


def test_without_that_file_by_the_symbols_of_its_library(here, torch):
    binaries.library(torch / "lib/libc10.so", [binaries.OLD_CHECK])
    write(torch / "share/cmake/Torch/TorchConfig.cmake", "set(TORCH_CXX_FLAGS)\n")
    found = values(here)
    assert found["torch.cxx11_abi"] is False
    assert found["torch.libraries"] == {"libc10.so": str(torch / "lib/libc10.so")}


def test_a_torch_without_a_version_file_has_a_place_and_a_problem(here):
    write(here.site / "torch/lib/libc10.so", "-")
    found = pytorch.files(here)
    assert found["torch.location"].value == str(here.site / "torch")
    assert found["torch.version"].value is None
    assert "version.py" in found["torch.version"].problem


def test_the_first_on_the_path_is_the_one_that_is_imported(here, torch, tmp_path):
    other = tmp_path / "user"
    write(other / "torch/__init__.py")
    write(other / "torch/version.py", "__version__ = '2.1.0'\n")
    here.search_path = (other, here.site)
    assert values(here)["torch.version"] == "2.1.0"


def test_the_torch_of_this_python():
    import torch

    from statescan.doctor.facts.machine import Machine

    found = values(Machine.here())
    assert found["torch.version"] == torch.__version__
    assert found["torch.cuda"] == torch.version.cuda
    assert found["torch.cxx11_abi"] == torch._C._GLIBCXX_USE_CXX11_ABI
    assert found["torch.location"] == torch.__path__[0]
