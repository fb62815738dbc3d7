# SPDX-License-Identifier: Apache-2.0
"""The shim distributions: imports without a call, requirements met, the real package untouched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from statescan.compat import tree

ROOT = Path(__file__).resolve().parents[2]
SHIMS = ROOT / "shims"

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment that sees this one's packages and this checkout, and none of its own."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    here = [path for path in sys.path if path.endswith("site-packages")]
    (Path(site) / "others.pth").write_text("\n".join([*here, str(ROOT / "src")]) + "\n")

    def run(*command, check=True):
        done = subprocess.run(
            [python, *command], capture_output=True, text=True, timeout=300, cwd=folder
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    run.site = Path(site)
    return run


def install(environment, name, tmp_path, check=True):
    """pip install of a copy, since setuptools writes beside the sources."""
    copy = shutil.copytree(SHIMS / name, tmp_path / name)
    options = ("--no-build-isolation", "--no-deps", "--quiet")
    return environment("-m", "pip", "install", *options, str(copy), check=check)


def remove(environment, name):
    environment("-m", "pip", "uninstall", "--yes", "--quiet", name)


@pytest.mark.parametrize("name", tree.DISTRIBUTIONS)
def test_the_real_package_is_not_overwritten(environment, name, tmp_path):
    real = environment.site / f"{name.replace('-', '_')}-1.0.0.dist-info"
    real.mkdir()
    (real / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    done = install(environment, name, tmp_path, check=False)
    assert done.returncode != 0
    assert f"{name} 1.0.0 itself is installed" in done.stdout + done.stderr
    assert real.exists()
    shutil.rmtree(real)


def test_imports_work_without_a_call_and_pip_sees_the_requirement_met(environment, tmp_path):
    for name in tree.DISTRIBUTIONS:
        install(environment, name, tmp_path)
    environment("-c", (
        "import importlib.metadata as m, importlib.util as u\n"
        "assert u.find_spec('mamba_ssm').origin.endswith('__init__.py')\n"
        "import mamba_ssm, causal_conv1d, selective_scan_cuda, causal_conv1d_cuda\n"
        "from mamba_ssm.ops.selective_scan_interface import selective_scan_fn\n"
        "from mamba_ssm.modules.mamba_simple import Mamba\n"
        "from causal_conv1d.cpp_functions import causal_conv1d_fwd_function\n"
        "assert selective_scan_fn.__module__ == 'statescan.compat.selective_scan'\n"
        "assert m.version('mamba-ssm') == mamba_ssm.__version__\n"
        "assert [d.name for d in m.distributions()].count('mamba-ssm') == 1\n"
    ))  # fmt: skip
    done = environment(
        *("-m", "pip", "install", "--dry-run", "--no-index", "--no-deps"),
        *("mamba-ssm>=2.2", "causal-conv1d>=1.4"),
    )
    assert "Requirement already satisfied: mamba-ssm>=2.2" in done.stdout
    assert "Requirement already satisfied: causal-conv1d>=1.4" in done.stdout
    # A second install finds only a shim there.
    again = tmp_path / "again"
    again.mkdir()
    install(environment, "mamba-ssm", again)
    for name in tree.DISTRIBUTIONS:
        remove(environment, name)


def test_versions_are_those_that_are_served_by_name():
    for name, version in tree.VERSIONS.items():
        assert f'version = "{version}"' in (SHIMS / name / "pyproject.toml").read_text()


def test_install_takes_a_shim_for_no_original(environment, tmp_path):
    install(environment, "causal-conv1d", tmp_path)
    environment("-c", (
        "from statescan import compat\n"
        "assert compat.install().replaced == ()\n"
        "import causal_conv1d\n"
        "assert causal_conv1d.__version__ == '1.7.0+statescan'\n"
    ))  # fmt: skip
    remove(environment, "causal-conv1d")
