# SPDX-License-Identifier: Apache-2.0
"""The cause of whole logs: one of every kind, sessions with several attempts, and what wins."""

import re
from functools import cache
from pathlib import Path

import pytest

from statescan.doctor import catalog
from statescan.doctor.logs.analyse import analyse, analyse_text

LOGS = Path(__file__).parent / "logs"
NAMES = sorted(path.stem for path in LOGS.glob("*.log"))
SITE = "/opt/env/lib/python3.11/site-packages"
MODULE = "selective_scan_cuda.cpython-311-x86_64-linux-gnu.so"
UNDEFINED = f"ImportError: {SITE}/{MODULE}: undefined symbol: "
NO_TORCH = "      ModuleNotFoundError: No module named 'torch'\nerror: metadata-generation-failed\n"
NO_HEADER = (
    "      x.h:1:10: fatal error: Python.h: No such file or directory\n"
    "  ERROR: Failed building wheel for mamba-ssm\n"
)
SET_DEVICE = "_ZN3c104cuda9SetDeviceEi"
OLD_STRING = "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"
NEW_STRING = (
    "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
)


def expected(name: str) -> list[str]:
    """The causes that a log may be given, the true one first."""
    text = (LOGS / f"{name}.expect").read_text()
    also = re.search(r"also_accept: (.*)", text)
    return [re.search(r"root_cause: (\S+)", text)[1], *(also[1].split() if also else [])]


@cache
def diagnose(name: str):
    with (LOGS / f"{name}.log").open("rb") as stream:
        return analyse(stream)


def cause(text: str) -> str:
    return analyse_text(text).root_cause


@pytest.mark.parametrize("name", NAMES)
def test_log_gives_its_cause(name):
    assert diagnose(name).root_cause == expected(name)[0]


def test_every_root_cause_has_a_log():
    listed = (LOGS / "ROOT_CAUSES.txt").read_text().split()
    assert len(listed) == 57
    assert set(listed) <= set(catalog.problems())
    assert {expected(name)[0] for name in NAMES} == set(listed)


@pytest.mark.parametrize("name", NAMES)
def test_proving_line_is_the_line_of_that_number(name):
    diagnosis = diagnose(name)
    assert diagnosis.evidence
    raw = (LOGS / f"{name}.log").read_bytes()
    encoding = "utf-16-le" if diagnosis.encoding == "utf-16-le" else diagnosis.encoding
    lines = raw.decode(encoding, errors="replace").split("\n")
    for line in diagnosis.evidence:
        # What is shown is without frame and colours, so a long word of it is looked for.
        words = re.findall(r"[\w./']{6,}", line.text) or [line.text]
        assert all(word in lines[line.number - 1] for word in words[:3])


def test_line_numbers_count_line_feeds_and_not_progress_bars():
    progress = "".join(f" {part}/9 MB\r" for part in range(9))
    error = "error: command 'gcc' failed: No such file or directory"
    text = f"{progress}\r\n$ pip install mamba-ssm\r\n{error}"
    assert analyse_text(text).evidence[0].number == 3


def test_last_attempt_counts():
    first = f"$ pip install mamba-ssm\n{NO_TORCH}"
    second = f"$ pip install mamba-ssm --no-build-isolation\n{NO_HEADER}"
    assert cause(first + second) == "python-headers-missing"
    assert cause(second + first) == "torch-missing-in-build"
    diagnosis = analyse_text(first + second)
    earlier = next(row for row in diagnosis.not_causes if row.id == "torch-missing-in-build")
    assert earlier.lines == (2,)
    assert "another attempt" in earlier.reason


def test_attempts_without_prompts_are_told_apart_by_their_starts():
    first = f"Collecting mamba-ssm\n{NO_TORCH}"
    second = f"Collecting mamba-ssm\n{NO_HEADER}"
    assert cause(first + second) == "python-headers-missing"


def test_earlier_stage_wins_over_earlier_line():
    link = "/usr/bin/ld: cannot find -lcudart\n"
    header = "x.cuh:1:10: fatal error: cusparse.h: No such file or directory\n"
    assert (
        cause("building 'selective_scan_cuda' extension\n" + link + header)
        == "cuda-headers-missing"
    )


def test_module_that_a_failed_install_left_missing_is_not_the_cause():
    error = "      NameError: name 'bare_metal_version' is not defined"
    failed = f"$ pip install causal-conv1d\n{error}\nerror: metadata-generation-failed\n"
    then = "$ python use.py\nModuleNotFoundError: No module named 'causal_conv1d'\n"
    assert cause(failed + then) == "nvcc-missing"
    assert cause(then) == "cc1d-missing"


def test_success_needs_that_nothing_failed_after_it():
    good = "$ pip install mamba-ssm\nSuccessfully installed mamba-ssm-2.2.4\n"
    assert cause(good) == "success"
    assert cause(good + f"$ python use.py\n{UNDEFINED}{SET_DEVICE}\n") == "torch-abi-mismatch"


def test_success_of_another_package_is_none():
    failed = f"$ pip install mamba-ssm\n{NO_TORCH}"
    then = "$ pip install torch\nSuccessfully installed torch-2.7.0\n"
    assert cause(failed + then) == "torch-missing-in-build"


@pytest.mark.parametrize(
    ("symbol", "torch", "abi", "slug"),
    [
        (SET_DEVICE, "2.4.0", "False", "torch-abi-mismatch"),
        (OLD_STRING, "2.7.0", "True", "cxx11-abi-mismatch"),
        (OLD_STRING, "2.4.0", "False", "torch-abi-mismatch"),
        (NEW_STRING, "2.4.0", "False", "cxx11-abi-mismatch"),
        (NEW_STRING, "2.7.0", "True", "torch-abi-mismatch"),
    ],
)
def test_missing_symbol_is_judged_by_its_strings_and_its_generation(symbol, torch, abi, slug):
    asked = 'python -c "import torch; print(torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI)"'
    text = f"$ python use.py\n{UNDEFINED}{symbol}\n$ {asked}\n{torch} {abi}\n"
    assert cause(text) == slug


@pytest.mark.parametrize(
    ("wheel", "slug"),
    [
        ("torch2.4cxx11abiTRUE", "cxx11-abi-mismatch"),
        ("torch2.3cxx11abiFALSE", "torch-abi-mismatch"),
        ("torch2.3cxx11abiTRUE", "torch-abi-mismatch"),
    ],
)
def test_wheel_name_is_compared_with_the_installed_torch(wheel, slug):
    text = (
        f"$ pip install mamba_ssm-2.2.2+cu122{wheel}-cp311-cp311-linux_x86_64.whl\n"
        "Successfully installed mamba-ssm-2.2.2\n"
        '$ python -c "import torch; print(torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI)"\n'
        f"2.4.1+cu121 False\n$ python use.py\n{UNDEFINED}{NEW_STRING}\n"
    )
    assert cause(text) == slug


def test_module_outside_site_packages_hides_the_installed_one():
    error = f"ImportError: /src/mamba/{MODULE}: undefined symbol: {SET_DEVICE}"
    text = f"$ python use.py\n{error}\n"
    assert cause(text) == "import-shadowed"
    assert cause("$ pip install -e .\n" + text) == "torch-abi-mismatch"


@pytest.mark.parametrize(
    ("folder", "slug"),
    [
        ("/tmp/pip-build-env-q1w2/overlay/lib/site-packages", "build-isolation-wrong-torch"),
        ("/me/.cache/uv/builds-v0/.tmpA1b2C3/lib/site-packages", "build-isolation-wrong-torch"),
        (SITE, "nvcc-torch-cuda-mismatch"),
    ],
)
def test_cuda_mismatch_is_isolation_when_torch_was_in_the_builds_environment(folder, slug):
    text = (
        "  ╰─> [9 lines of output]\n"
        f'  File "{folder}/torch/utils/cpp_extension.py", line 3\n'
        "The detected CUDA version (11.8) mismatches the version that was used to compile\n"
        "PyTorch (12.8). Please make sure to use the same CUDA versions.\n"
    )
    assert cause(text) == slug


@pytest.mark.parametrize(("bound", "slug"), [(8, "nvcc-too-old"), (12, "gcc-too-new-for-nvcc")])
def test_nvcc_whose_bound_is_low_is_itself_too_old(bound, slug):
    error = f"unsupported GNU version! gcc versions later than {bound} are not supported!"
    assert cause(f"host_config.h:1:2: error: #error -- {error}") == slug


def test_linking_libcuda_is_tritons_at_run_time_and_the_builds_in_a_build():
    link = "/usr/bin/ld: cannot find -lcuda\ncollect2: error: ld returned 1 exit status\n"
    assert cause(f"$ python use.py\n{link}") == "triton-libcuda-missing"
    assert (
        cause(f"$ pip install .\nbuilding 'selective_scan_cuda' extension\n{link}")
        == "cuda-lib-link-missing"
    )


def test_killed_program_of_the_user_is_no_build_out_of_memory():
    assert cause("$ python use.py\nKilled\n") != "build-out-of-memory"
    assert analyse_text("$ pip install .\nKilled\n").confidence == "low"
    assert (
        analyse_text(
            "$ pip install mamba-ssm\nBuilding wheel for mamba-ssm ... \nKilled\n"
        ).confidence
        == "high"
    )


@pytest.mark.parametrize(
    "noise",
    [
        "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
        "UserWarning: There are no g++ version bounds defined for CUDA version 12.4",
        "UserWarning: The detected CUDA version (12.4) has a minor version mismatch with the"
        " version that was used to compile PyTorch (12.1).",
        "Precompiled wheel not found. Building from source...",
        "UserWarning: Failed to initialize NumPy: No module named 'numpy'",
        "DEPRECATION: mamba-ssm is being installed using the legacy 'setup.py install' method",
        "WARNING: Ignoring invalid distribution -orch (/opt/env/lib/python3.11/site-packages)",
        "could not find ninja.. Falling back to using the slow distutils backend.",
        'kernel.cuh(10): warning #177-D: variable "n" was declared but never referenced',
    ],
)
def test_noise_is_neither_a_cause_nor_hides_one(noise):
    done = "$ pip install mamba-ssm\n{}\nSuccessfully installed mamba-ssm-2.2.4\n"
    assert cause(done.format(noise)) == "success"
    failed = (
        "$ pip install mamba-ssm\n{}\nx.h:1:10: fatal error: Python.h: No such file or directory\n"
    )
    diagnosis = analyse_text(failed.format(noise))
    assert diagnosis.root_cause == "python-headers-missing"
    assert any(2 in row.lines for row in diagnosis.not_causes)


def test_on_a_mac_the_machine_is_the_cause_of_whatever_fails():
    text = (
        "Darwin Kernel Version 23.1.0\n      NameError: name 'bare_metal_version' is not defined\n"
    )
    diagnosis = analyse_text(text)
    assert diagnosis.root_cause == "macos-unsupported"
    assert "nvcc-missing" in [row.id for row in diagnosis.not_causes]


def test_empty_log_is_truncated_and_says_why():
    for text in ("", "\n\n  \n"):
        diagnosis = analyse_text(text)
        assert diagnosis.root_cause == "log-truncated"
        assert "empty" in diagnosis.reason


def test_announced_lines_are_counted():
    inner = "".join(f"      line {number}\n" for number in range(5))
    diagnosis = analyse_text(f"  ╰─> [80 lines of output]\n{inner}")
    assert diagnosis.root_cause == "log-truncated"
    assert "80 lines" in diagnosis.reason
    end = "      [end of output]\nerror: subprocess-exited-with-error\n"
    whole = f"  ╰─> [5 lines of output]\n{inner}{end}"
    assert "announced" not in analyse_text(whole).reason


def test_unknown_error_is_said_to_be_unknown():
    diagnosis = analyse_text("x.cpp:3:1: error: the moon is in the wrong phase\n")
    assert diagnosis.root_cause == "log-truncated"
    assert diagnosis.confidence == "low"
    assert diagnosis.evidence[0].number == 1
