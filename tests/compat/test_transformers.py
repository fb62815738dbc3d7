# SPDX-License-Identifier: Apache-2.0
"""transformers, unmodified, on the served names: equal to its own slow path, and truly served.

Two children run the same tiny models, one with statescan under the originals' names. What
transformers says about each family is asked in children too, with the version that it finds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from statescan.testing import assert_close

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FAMILIES = ("mamba", "falcon_mamba", "jamba", "zamba", "lfm2", "qwen3_next")
SCANNING = FAMILIES[:4]

pytestmark = pytest.mark.slow


def python(*arguments, path=()):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*map(str, path), str(SOURCE)))}
    environment.pop("STATESCAN_COMPAT", None)
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    found = {}
    for mode in ("plain", "served"):
        out = folder / f"{mode}.pt"
        program = TESTS / "helpers" / "transformers_families.py"
        python(str(program), mode, str(out), request.param)
        found[mode] = torch.load(out, map_location="cpu")
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_slow_path(results, family):
    plain, served = results["plain"][family], results["served"][family]
    assert_close(served["logits"], plain["logits"], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_slow_path(results, family):
    plain, served = results["plain"][family]["grads"], results["served"][family]["grads"]
    assert plain.keys() == served.keys()
    largest = max(float(grad.abs().max()) for grad in plain.values())
    for name, grad in plain.items():
        error = float((served[name] - grad).abs().max())
        # A router that takes one expert of one has gradients that are rounding noise.
        assert error <= 3e-5 * max(float(grad.abs().max()), 1e-3 * largest), name


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_writes_the_same_tokens(results, family):
    plain, served = results["plain"][family], results["served"][family]
    assert torch.equal(served["tokens"], plain["tokens"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_equals_one_prompt(results, family):
    """By itself transformers starts the scan of a second chunk from zero, without a word."""
    second, whole = results["served"][family]["pieces"]
    assert_close(second, whole, 1e-4)
    if family == "mamba":
        wrong, right = results["plain"][family]["pieces"]
        assert float((wrong - right).abs().max()) > 1e-2 * float(right.abs().max())


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_packed_sequences_stay_apart(results, family):
    """By itself transformers hands the marks to the convolution and not to the scan."""
    for together, alone in results["served"][family]["packed"]:
        assert_close(together, alone, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_steps_go_down_the_same_way(results, family):
    plain, served = results["plain"][family]["losses"], results["served"][family]["losses"]
    assert served[1] < served[0]
    if family != "falcon_mamba":
        # Its training path norms dt after the projection, the slow path before it.
        assert served == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_statescan_ran(results, family):
    calls = results["served"][family]["calls"]
    assert calls["causal_conv1d"] > 0
    assert calls["causal_conv1d_update"] > 0
    if family in SCANNING:
        assert calls["selective_scan"] > 0
        assert calls["selective_state_update"] > 0
    if family in ("mamba", "falcon_mamba"):
        assert calls["mamba_inner"] > 0
    assert results["plain"][family]["calls"] == {}


def test_status_of_the_installed_version():
    lines = python("-c", textwrap.dedent("""
        from statescan import compat
        from statescan.compat import transformers
        before = {row.family: row for row in transformers.status()}
        assert not any(row.on for row in before.values())
        assert "call statescan.compat.install() first" in before["mamba"].reason
        compat.install()
        import transformers.models.mamba.modeling_mamba
        from statescan.compat import transformers
        for row in transformers.status():
            print(row.family, row.on, row.functions.get("selective_scan_fn"), row.reason, sep="|")
    """)).splitlines()  # fmt: skip
    rows = {line.split("|")[0]: line.split("|")[1:] for line in lines}
    assert rows["mamba"][:2] == ["True", "statescan.compat.selective_scan"]
    assert rows["jamba"][0] == "True"
    assert "will find the functions" in rows["jamba"][2]
    assert rows["mamba2"][0] == "False"
    assert "Mamba-2 family" in rows["mamba2"][2]


def test_status_names_a_family_that_was_imported_too_early():
    found = python("-c", textwrap.dedent("""
        import warnings
        warnings.simplefilter("ignore")
        import transformers.models.mamba.modeling_mamba
        from statescan import compat
        compat.install()
        from statescan.compat import transformers
        print(next(str(row) for row in transformers.status() if row.family == "mamba"))
    """))  # fmt: skip
    assert "off" in found
    assert "imported before install()" in found


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0"])
def test_status_of_versions_that_ask_for_cuda(version, tmp_path):
    """These take the packages for models on CUDA only; their modules are stood in for here."""
    for family in ("mamba", "mamba2", "lfm2"):
        folder = tmp_path / "transformers" / "models" / family
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "models" / "__init__.py").touch()
    info = tmp_path / f"transformers-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    )
    code = textwrap.dedent("""
        from statescan import compat
        compat.install()
        from statescan.compat import transformers
        for device in ("cpu", "cuda"):
            for row in transformers.status(device):
                print(device, row.family, row.on, row.reason, sep="|")
    """)
    rows = [line.split("|") for line in python("-c", code, path=(tmp_path,)).splitlines()]
    assert {row[1] for row in rows} == {"mamba", "mamba2", "lfm2"}
    for device, family, on, reason in rows:
        if device == "cpu":
            assert on == "False"
            assert f"transformers {version} takes these packages for models on CUDA only" in reason
        elif family == "mamba2":
            assert "Mamba-2 family" in reason
        elif not torch.cuda.is_available():
            assert "torch sees no CUDA device" in reason
        else:
            assert on == "True"
