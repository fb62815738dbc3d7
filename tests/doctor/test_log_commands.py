# SPDX-License-Identifier: Apache-2.0
"""Commands of fixes fit the versions, the GPU, the driver and the system that a log shows."""

import pytest

from statescan.doctor import catalog, shells
from statescan.doctor.logs import fitting
from statescan.doctor.logs.analyse import analyse_text
from statescan.doctor.logs.fixes import fix_for

MISSING_HEADER = "x.h:1:10: fatal error: Python.h: No such file or directory"


def typed(fix, shell: str = "bash") -> str:
    """What is to be typed, with the comments."""
    return "\n".join(line for step in fix.commands for line in shells.lines(step, shell))


def fitted(slug: str, windows: bool = False, **values: str) -> str:
    """The commands for a problem with these values of a log."""
    return typed(fitting.fit(slug, fix_for(slug, values), values, windows))


@pytest.mark.parametrize(
    ("torch", "index"), [("2.4.0", "cu124"), ("2.5.1", "cu124"), ("2.6.0", "cu126")]
)
def test_torch_comes_from_an_index_that_has_it(torch, index):
    text = fitted("torch-is-cpu-only", torch=torch)
    assert f"torch=={torch} --index-url https://download.pytorch.org/whl/{index}\n" in text


def test_every_torch_that_is_proposed_has_an_index():
    pins = catalog.load("pins")
    for minor, row in {**pins["torch"], **pins["torch_before"]}.items():
        version, cuda = fitting.torch_for("torch-is-cpu-only", {"torch": row["patch"]})
        assert (version, cuda) == (row["patch"], row["cuda"][-1]), minor


def test_same_torch_is_asked_for_when_the_log_does_not_show_it():
    text = fitted("ninja-hack")
    assert "python -m pip show torch" in text
    assert "torch==" not in text
    assert "torch==2.5.1" in fitted("ninja-hack", torch="2.5.1")


@pytest.mark.parametrize(
    ("found", "torch", "index"),
    [("10020", "1.12.1", "cu102"), ("11040", "2.7.1", "cu118"), ("12060", "2.7.1", "cu126")],
)
def test_old_driver_gets_a_torch_that_it_runs(found, torch, index):
    assert f"torch=={torch} --index-url https://download.pytorch.org/whl/{index}" in fitted(
        "driver-too-old", found=found
    )


@pytest.mark.parametrize(
    ("sm", "torch", "index"),
    [("37", "2.0.1", "cu118"), ("70", "2.7.1", "cu126"), ("120", "2.7.1", "cu128")],
)
def test_torch_has_code_for_the_gpu_of_the_log(sm, torch, index):
    text = fitted("gpu-arch-not-in-torch", sm=sm)
    assert f"torch=={torch} --index-url https://download.pytorch.org/whl/{index}" in text


@pytest.mark.parametrize(
    ("line", "sm"),
    [
        ("GPU 0: Tesla V100-SXM2-16GB", "70"),
        ("NVIDIA GeForce GTX 1080 Ti", "61"),
        ("Tesla K80", "37"),
        ("device capability of my card is (6, 0)", "60"),
    ],
)
def test_gpu_is_read_by_its_name_or_its_number(line, sm):
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    frame = '  File "/x/mamba_ssm/ops/selective_scan_interface.py", line 1, in forward'
    log = f"{line}\nTraceback (most recent call last):\n{frame}\n{error}\n"
    assert analyse_text(log).values["sm"] == sm


@pytest.mark.parametrize("slug", ["nvcc-missing", "cuda-headers-missing", "nvcc-too-old"])
def test_cuda_home_is_where_conda_put_the_toolkit(slug):
    assert "export CUDA_HOME=$CONDA_PREFIX\n" in fitted(slug, cuda_home="/usr/local/cuda-11.3")


@pytest.mark.parametrize("wrong", ["/usr/local/cuda", "/usr/local/cuda-12.4", "/usr/local/cuda-99"])
def test_cuda_home_is_not_the_folder_that_was_wrong(wrong):
    for values in ({"cuda": "12.4"}, {}):
        assert f"CUDA_HOME={wrong}\n" not in fitted("cuda-home-wrong", cuda_home=wrong, **values)


def test_release_that_was_being_installed_is_kept():
    log = f"$ pip install mamba-ssm==2.2.4\n{MISSING_HEADER}\n"
    assert typed(analyse_text(log).fix).endswith("mamba-ssm==2.2.4")


@pytest.mark.parametrize(
    ("mamba", "conv"),
    [
        ("1.1.1", "causal-conv1d==1.1.3.post1"),
        ("2.2.4", "causal-conv1d==1.4.0"),
        ("2.2.5", "causal-conv1d>=1.5.1"),
    ],
)
def test_pair_of_packages_fits(mamba, conv):
    for slug in ("cc1d-missing", "cc1d-too-old-for-mamba", "cc1d-api-mismatch"):
        assert conv in fitted(slug, mamba=mamba)
    both = fitted("torch-abi-mismatch", package="mamba-ssm", version=mamba)
    assert conv in both
    assert f"mamba-ssm=={mamba}" in both


def test_no_two_installs_of_one_package_undo_each_other():
    for slug in ("cc1d-missing", "cc1d-too-old-for-mamba", "cc1d-api-mismatch"):
        lines = [line for line in fitted(slug).splitlines() if not line.startswith("#")]
        assert len([line for line in lines if "causal-conv1d" in line]) == 1


@pytest.mark.parametrize("slug", sorted(catalog.problems()))
def test_windows_gets_no_command_of_linux(slug):
    text = fitted(slug, windows=True)
    assert "apt-get" not in text
    assert "/usr/local/cuda" not in text


def test_cause_of_windows_alone_is_answered_for_powershell():
    diagnosis = analyse_text("error: Microsoft Visual C++ 14.0 or greater is required.\n")
    assert (diagnosis.root_cause, diagnosis.shell) == ("msvc-missing", "powershell")


def test_no_wheel_of_windows_is_to_be_downloaded():
    wheel = "mamba_ssm-2.2.2+cu122torch2.3cxx11abiFALSE-cp311-cp311-win_amd64.whl"
    text = fitted("wheel-download-failed", url=f"https://x/{wheel}", file=wheel, version="2.2.2")
    assert "curl" not in text
    assert "mamba-ssm==2.2.2" in text


def test_unknown_error_is_quoted_and_nothing_is_reinstalled():
    diagnosis = analyse_text("$ python run.py\nKeyError: 'cfg.yaml'\n")
    assert diagnosis.root_cause == "log-truncated"
    assert "ends before" not in diagnosis.summary
    assert "line 2, KeyError: 'cfg.yaml'" in diagnosis.summary
    assert "install" not in typed(diagnosis.fix)


def test_what_is_not_the_cause_has_a_reason_of_its_own():
    error = "ImportError: selective_scan_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    diagnosis = analyse_text(f"$ python use.py\n{error}\n")
    assert diagnosis.not_causes
    assert all(row.reason != diagnosis.reason for row in diagnosis.not_causes)


def test_windows_gets_the_triton_that_exists_for_it():
    log = "PS C:\\x> python -c 'import mamba_ssm'\nModuleNotFoundError: No module named 'triton'\n"
    diagnosis = analyse_text(log)
    assert "triton-windows" in typed(diagnosis.fix, "powershell")
    assert "torch==" not in typed(diagnosis.fix, "powershell")
    assert "'triton-windows>=3.3,<3.4'" in fitted("triton-version", windows=True, torch="2.7.1")


@pytest.mark.parametrize(("installer", "other"), [("uv", "python -m pip"), ("", "uv pip")])
def test_package_is_built_once_with_the_tool_of_the_log(installer, other):
    text = fitted("build-isolation-wrong-torch", installer=installer or "pip")
    builds = [line for line in text.splitlines() if line.endswith("mamba-ssm")]
    assert len(builds) == 1
    assert other not in builds[0]
    assert "MAMBA_FORCE_BUILD=TRUE" in builds[0]
