# SPDX-License-Identifier: Apache-2.0
"""Fixes of logs: for what the log is about, with the values in it, and safe to copy."""

import re
from functools import cache
from pathlib import Path

import pytest

from statescan.doctor import shells
from statescan.doctor.logs import show
from statescan.doctor.logs.analyse import analyse, analyse_text

LOGS = Path(__file__).parent / "logs"
NAMES = sorted(path.stem for path in LOGS.glob("*.log"))
MODULE = "causal_conv1d_cuda.cpython-311-x86_64-linux-gnu.so"


@cache
def diagnose(name: str):
    with (LOGS / f"{name}.log").open("rb") as stream:
        return analyse(stream)


def typed(diagnosis, shell: str = "bash") -> str:
    """What is to be typed."""
    return "\n".join(line for step in diagnosis.fix.commands for line in shells.lines(step, shell))


@pytest.mark.parametrize("name", NAMES)
def test_every_log_gets_a_fix_without_holes(name):
    diagnosis = diagnose(name)
    assert diagnosis.fix.text
    for shell in shells.SHELLS:
        text = diagnosis.fix.text + typed(diagnosis, shell)
        assert not re.search(r"\{[a-z_]+\}|\b(?:NEEDED|FOUND|VERSION)\b", text)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("redirect-unquoted", ["'mamba-ssm>=2.2.2'", "rm ./=2.2.2"]),
        ("redirect-less-than", ["'causal-conv1d<1.5'"]),
        ("download-certificate", ["curl", "v2.2.2/mamba_ssm-2.2.2+cu122torch2.3", "MAMBA_FORCE"]),
        ("torch-missing-uv", ["uv pip install --no-build-isolation mamba-ssm==2.2.2"]),
        ("build-deps-packaging", ["setuptools", "packaging", "ninja", "causal-conv1d"]),
        ("torch-replaced-uv", ["torch==2.6.0", "/cu124"]),
        ("torch-replaced-quietly", ["torch==2.4.1", "/cu118"]),
        ("python-h-zh", ["python3.11-dev"]),
        ("nvcc-missing-cuda-home-unset", ["cuda-12.1"]),
        ("gpu-not-in-binary", ["compute_120", "sm_120"]),
        ("conv-arguments", ["causal-conv1d==1.1.3.post1"]),
        ("oom-cc1plus", ["MAX_JOBS=1"]),
        ("ext-not-built-module", ["MAMBA_KEEP_CUDA_BUILD=TRUE", "unset MAMBA_SKIP_CUDA_BUILD"]),
        ("nvcc-arch-72", ["mamba-ssm>=2.2.6"]),
        ("conv-too-old-module", ["causal-conv1d>=1.5.1"]),
    ],
)
def test_fix_has_the_values_of_its_log(name, parts):
    text = typed(diagnose(name))
    for part in parts:
        assert part in text


def test_newer_architecture_asks_for_a_newer_nvcc():
    assert "CUDA 12.8" in diagnose("nvcc-arch-120").fix.text
    assert "CUDA 11.8" in diagnose("nvcc-arch-90").fix.text


def test_other_projects_module_is_named():
    diagnosis = diagnose("vmamba-core")
    assert "selective_scan_cuda_core" in diagnosis.fix.text
    assert "does not help" in diagnosis.fix.text


def test_file_that_hides_the_package_is_named_by_its_path():
    error = f"ImportError: /src/conv/{MODULE}: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    diagnosis = analyse_text(f"$ python use.py\n{error}\n")
    assert f"rm /src/conv/{MODULE}" in typed(diagnosis)


def test_package_is_the_one_that_failed():
    for package, force in (
        ("mamba-ssm", "MAMBA_FORCE_BUILD"),
        ("causal-conv1d", "CAUSAL_CONV1D_FORCE_BUILD"),
    ):
        error = "x.h:1:10: fatal error: Python.h: No such file or directory"
        text = f"{error}\n  ERROR: Failed building wheel for {package}\n"
        values = analyse_text(text).values
        assert (values["package"], values["force"]) == (package, force)


def test_values_that_would_run_something_are_left_out():
    wheel = "mamba_ssm-1+cu12torch2.4cxx11abiTRUE-cp311-cp311-linux_x86_64.whl"
    diagnosis = analyse_text(
        '$ pip install "a`b"\n'
        f"Guessing wheel URL:  https://x/$(touch${{IFS}}y)/{wheel}\n"
        "error: <urlopen error timed out>\n"
    )
    assert diagnosis.root_cause == "wheel-download-failed"
    for shell in shells.SHELLS:
        assert "touch" not in typed(diagnosis, shell)
    assert all(not re.search(r"[$`;\"']", value) for value in diagnosis.values.values())


@pytest.mark.parametrize(
    ("prompt", "shell"),
    [
        ("$ pip install mamba-ssm", "bash"),
        ("PS C:\\x> pip install mamba-ssm", "powershell"),
        ("C:\\x>pip install mamba-ssm", "cmd"),
        ("C:\\Windows\\x.h", "powershell"),
        ("nothing", "bash"),
    ],
)
def test_shell_is_that_of_the_log(prompt, shell):
    error = "ModuleNotFoundError: No module named 'torch'\nerror: metadata-generation-failed"
    assert analyse_text(f"{prompt}\n{error}\n").shell == shell


def test_stale_cached_wheel_is_shown_beside_the_error():
    diagnosis = diagnose("stale-cached-wheel")
    assert "cache" in diagnosis.reason
    assert "Using cached" in diagnosis.evidence[1].text
    assert "cache remove" in typed(diagnosis)


@pytest.mark.parametrize("name", NAMES)
def test_shown_lines_come_in_order_and_fit(name):
    diagnosis = diagnose(name)
    lines = show.lines(diagnosis, "bash", 80, coloured=False)
    assert lines[0].startswith(("[error] ", "[warning] ", "[ok] "))
    assert f"{diagnosis.problem.code} {diagnosis.root_cause}" in lines[0]
    starts = [
        next(place for place, line in enumerate(lines) if line.lstrip().startswith(word))
        for word in ("line ", "fix: ", "confidence: ")
    ]
    assert starts == sorted(starts)
    told = [place for place, line in enumerate(lines) if line.startswith("not the cause: ")]
    assert all(starts[1] < place < starts[2] for place in told)
    plain = "\n".join(lines)
    coloured = "\n".join(show.lines(diagnosis, "bash", 80, coloured=True))
    assert re.sub(r"\033\[\d+m", "", coloured) == plain
