# SPDX-License-Identifier: Apache-2.0
import pytest
from helpers import binaries
from helpers.fake_machine import distribution, machine, write

from statescan.doctor.facts import extensions


@pytest.fixture
def here(tmp_path):
    return machine(tmp_path)


def test_nothing_is_there(here):
    assert extensions.modules(here) == {}
    assert extensions.python(here) == {}
    assert extensions.shadows(here) == []


def test_compiled_modules_are_read_and_not_loaded(here):
    path = binaries.extension(here.site / binaries.MODULE, [binaries.OLD_CHECK])
    row = extensions.modules(here)["selective_scan_cuda"]
    assert (row["importable"], row["error"]) == (None, "")
    (file,) = row["files"]
    assert (file["path"], file["in_site_packages"]) == (str(path), True)
    assert file["binary"]["format"] == "elf"
    assert file["binary"]["cxx11_abi"] is False
    assert file["binary"]["python_tag"] == "cp311"


def test_what_is_no_binary_is_told_in_its_report(here):
    write(here.site / "causal_conv1d_cuda.cpython-311-x86_64-linux-gnu.so", "<html>")
    row = extensions.modules(here)["causal_conv1d_cuda"]
    assert row["files"][0]["binary"]["format"] == "unknown"
    assert "HTML" in row["files"][0]["binary"]["problem"]


def test_every_file_of_a_name_in_the_order_of_the_search(here):
    for folder, tag in ((here.site, "cpython-310"), (here.site, "cpython-311"), (here.cwd, "abi3")):
        write(folder / f"selective_scan_cuda_core.{tag}-x.so", "-")
    write(here.site / "selective_scan_cuda_core.pyi")
    files = extensions.modules(here)["selective_scan_cuda_core"]["files"]
    assert [(file["path"], file["in_site_packages"]) for file in files] == [
        (str(here.cwd / "selective_scan_cuda_core.abi3-x.so"), False),
        (str(here.site / "selective_scan_cuda_core.cpython-310-x.so"), True),
        (str(here.site / "selective_scan_cuda_core.cpython-311-x.so"), True),
    ]


def test_a_module_that_lies_in_the_current_folder_alone_is_not_on_the_path(here):
    write(here.cwd / "selective_scan_cuda.abi3.so", "-")
    write(here.site / "causal_conv1d_cuda.abi3.so", "-")
    assert extensions.importable_modules(here) == ["causal_conv1d_cuda"]
    here.sees_cwd = True
    assert sorted(extensions.importable_modules(here)) == [
        "causal_conv1d_cuda",
        "selective_scan_cuda",
    ]


def test_a_clone_in_the_current_folder_hides_the_installed_package(here):
    write(here.site / "mamba_ssm/__init__.py")
    clone = write(here.cwd / "mamba_ssm/__init__.py").parent
    assert extensions.shadows(here) == [{"module": "mamba_ssm", "path": str(clone)}]


def test_a_folder_of_pythonpath_hides_it_too(tmp_path):
    here = machine(tmp_path)
    other = write(tmp_path / "code/causal_conv1d.py").parent
    here.search_path = (other, here.site)
    write(here.site / "causal_conv1d/__init__.py")
    assert extensions.shadows(here) == [
        {"module": "causal_conv1d", "path": str(other / "causal_conv1d.py")}
    ]


def test_a_clone_hides_nothing_where_nothing_is_installed(here):
    write(here.cwd / "mamba_ssm/__init__.py")
    distribution(here.site, "mamba_ssm", "2.2.4")
    assert extensions.shadows(here) == []


def test_a_folder_without_init_hides_nothing(here):
    write(here.site / "mamba_ssm/__init__.py")
    write(here.cwd / "mamba_ssm/README.md")
    assert extensions.shadows(here) == []


def test_an_editable_package_is_known_by_its_metadata(here):
    distribution(here.site, "mamba_ssm", "2.2.4")
    assert extensions.python(here) == {
        "mamba_ssm": {"importable": None, "error": "", "file": None, "usable": {}}
    }
