# SPDX-License-Identifier: Apache-2.0
"""Serving the originals' names: imports, specs, metadata, refusal, and going back.

Each test runs in a Python of its own, since what is tested is what an interpreter finds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def python(tmp_path):
    """Run code in a new interpreter whose path begins with a folder for fake packages."""

    def run(code, *arguments, check=True, environment=None):
        given = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), str(SOURCE)))}
        given.pop("STATESCAN_COMPAT", None)
        done = subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**given, **(environment or {})},
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


def put(tmp_path, name, text, version=None):
    """A fake original in the child's path."""
    package = tmp_path / "site" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    if version is not None:
        info = tmp_path / "site" / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_path_of_the_originals_imports(python):
    python("""
        import importlib
        from statescan import compat
        from statescan.compat import tree
        compat.install()
        for module, names in tree.MODULES.items():
            found = importlib.import_module(module)
            assert set(names) <= set(dir(found)), module
            for name in names:
                getattr(found, name)
        from mamba_ssm import Mamba, MambaLMHeadModel, selective_scan_fn, mamba_inner_fn
        from mamba_ssm.ops.triton.layernorm import RMSNorm, layer_norm_fn
        from mamba_ssm.modules.mamba_simple import Mamba as Same, Block
        from mamba_ssm.ops.selective_scan_interface import *
        import selective_scan_cuda, causal_conv1d_cuda
        assert Same is Mamba
    """)


def test_installing_needs_no_torch(python):
    python("""
        import sys
        from statescan import compat
        compat.install()
        import mamba_ssm.ops.triton, causal_conv1d
        assert mamba_ssm.__version__.endswith("+statescan")
        assert "torch" not in sys.modules
    """)


def test_specs_and_metadata_are_real(python):
    python("""
        import importlib.metadata as metadata
        from importlib.util import find_spec
        from statescan import compat
        compat.install()
        assert find_spec("mamba_ssm").submodule_search_locations is not None
        assert find_spec("mamba_ssm.ops.selective_scan_interface").origin == "statescan"
        assert find_spec("mamba_ssm.nothing") is None
        assert metadata.version("mamba-ssm") == metadata.version("mamba_ssm")
        assert metadata.version("causal_conv1d") == "1.7.0+statescan"
        assert metadata.packages_distributions()["selective_scan_cuda"] == ["mamba-ssm"]
        assert "mamba-ssm" in {d.name for d in metadata.distributions()}
        assert metadata.metadata("mamba-ssm")["Name"] == "mamba-ssm"
        from packaging.version import Version
        assert Version(metadata.version("mamba_ssm")) >= Version("2.0.4")
    """)


def test_an_unknown_name_says_what_there_is(python):
    done = python(
        """
        from statescan import compat
        compat.install()
        from mamba_ssm.ops.triton.selective_state_update import nothing
        """,
        check=False,
    )
    assert "ImportError: cannot import name 'nothing'" in done.stderr


def test_uninstall_gives_the_names_back(python, tmp_path):
    put(tmp_path, "mamba_ssm", "mine = 1", "9.9")
    python("""
        import importlib.metadata as metadata
        from statescan import compat
        compat.install(force=True)
        import mamba_ssm
        assert not hasattr(mamba_ssm, "mine")
        assert "mamba_ssm" in compat.uninstall()
        assert compat.installed() == ()
        import mamba_ssm
        assert mamba_ssm.mine == 1
        assert metadata.version("mamba_ssm") == "9.9"
    """)


def test_a_working_original_is_left_alone(python, tmp_path):
    put(tmp_path, "causal_conv1d", "works = True", "1.6.1")
    done = python(
        """
        from statescan import compat
        try:
            compat.install()
        finally:
            import causal_conv1d
            assert causal_conv1d.works
        """,
        check=False,
    )
    assert "the original causal_conv1d is installed and imports" in done.stderr
    assert "install(force=True)" in done.stderr


def test_a_broken_original_is_replaced_and_the_reason_told(python, tmp_path):
    put(tmp_path, "causal_conv1d", "raise ImportError('x.so: undefined symbol: _ZN3c10')", "1.6.1")
    done = python("""
        from statescan import compat
        print(compat.install())
        import causal_conv1d
        assert causal_conv1d.__version__ == "1.7.0+statescan"
    """)
    assert (
        "in place of the installed causal_conv1d: ImportError: x.so: undefined symbol"
        in done.stdout
    )


def test_some_names_alone_may_be_served(python):
    python("""
        from importlib.util import find_spec
        from statescan import compat
        from statescan.errors import ArgumentError
        assert compat.install(names=["causal_conv1d"]).names == ("causal_conv1d",)
        assert find_spec("causal_conv1d") and not find_spec("mamba_ssm")
        try:
            compat.install(names=["mamba"])
        except ArgumentError as error:
            assert "'mamba' is not a module that statescan serves" in str(error)
    """)


def test_modeling_modules_that_came_too_early_are_named(python, tmp_path):
    modeling = tmp_path / "site" / "transformers" / "models" / "mamba"
    modeling.mkdir(parents=True)
    (modeling / "modeling_mamba.py").write_text("causal_conv1d_fn = None\n")
    python("""
        import warnings
        import transformers.models.mamba.modeling_mamba
        from statescan import compat
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = compat.install()
        name = "transformers.models.mamba.modeling_mamba"
        assert found.too_late == (name,)
        assert name in str(caught[0].message)
        assert name in str(found)
    """)


def test_models_pickled_under_the_originals_paths_are_read(python):
    """A pickle names the module where its class was found when it was written."""
    python("""
        import pickle, torch
        from statescan import compat
        compat.install()
        from mamba_ssm.models.config_mamba import MambaConfig
        text = pickle.dumps(MambaConfig(d_model=8), protocol=0)
        text = text.replace(b"statescan.compat.models", b"mamba_ssm.models.config_mamba")
        assert pickle.loads(text).d_model == 8
    """)


def test_the_environment_variable_serves_from_the_start(python):
    """What the .pth file of the installed package does."""
    line = (SOURCE.parent / "src" / "statescan" / "compat" / "start.pth").read_text()
    code = "exec(sys.argv[1]); import causal_conv1d; print(causal_conv1d.__version__)"
    done = python("import sys; " + code, line, environment={"STATESCAN_COMPAT": "1"})
    assert done.stdout.strip() == "1.7.0+statescan"
    for value in ({}, {"STATESCAN_COMPAT": "0"}):
        done = python("import sys; " + code, line, environment=value, check=False)
        assert "No module named 'causal_conv1d'" in done.stderr


def test_the_variable_never_stops_a_start(python, tmp_path):
    put(tmp_path, "causal_conv1d", "works = True", "1.6.1")
    done = python("""
        from statescan.compat.aliases import install_from_environment
        install_from_environment()
        import causal_conv1d
        assert causal_conv1d.works
    """)
    assert done.stderr.startswith("statescan: STATESCAN_COMPAT is set, but: install: the original")
