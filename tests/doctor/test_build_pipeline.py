# SPDX-License-Identifier: Apache-2.0
"""Whole builds of a small package: real pip, ninja, compiler and interpreter; no network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from helpers import binaries, fake_build

import statescan
from statescan.doctor.builder import before, model, pipeline, retry
from statescan.doctor.logs.analyse import analyse_text
from statescan.doctor.render import build as text

SOURCE = str(Path(statescan.__file__).parents[1])
SCHEMA = Path(model.__file__).parents[1] / "schemas" / "build.schema.json"
MODULE = "causal_conv1d_cuda"


class Watcher:
    """Remembers what it was told."""

    def __init__(self):
        self.stages, self.states, self.notes = [], [], []

    def stage(self, stage):
        self.stages.append((stage.name, stage.status))

    def compiling(self, state):
        self.states.append(state)

    def note(self, line):
        self.notes.append(line)


@pytest.fixture
def shop(tmp_path):
    binaries.gcc()
    return fake_build.workshop(tmp_path / "a shop")


def build(shop, *, archs=("sm_90",), **changes):
    facts = shop.facts(**changes)
    request = before.Request("causal-conv1d", fake_build.VERSION, tuple(archs))
    setup = before.prepare(request, facts, shop.root / "build folder", shop.python)
    assert setup.findings == ()
    watcher = Watcher()
    outcome = pipeline.run(setup, facts, shop.python, shop.variables, watcher)
    content = {"schema_version": 1, "command": "build", **outcome.to_json()}
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return outcome, watcher


def stages(outcome):
    return {row.name: row.status for row in outcome.stages}


def shown(outcome):
    return "\n".join(text.ended_lines(outcome, "bash", 80, False))


def imports(shop):
    command = [shop.python, "-c", f"import {MODULE}; print({MODULE}.causal_conv1d_fwd())"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=shop.root)
    return done.stdout.strip()


def test_a_package_is_built_installed_and_proved(shop):
    outcome, watcher = build(shop)
    log = outcome.setup.log.read_text()
    assert outcome.status == "built", log
    assert stages(outcome) == {
        "tools": "skipped", "source": "done", "compile": "done", "install": "done",
        "import": "done", "smoke": "skipped",
    }  # fmt: skip
    assert imports(shop) == "42"
    # The release names three targets; only the wanted one reached the compiler.
    assert len(shop.calls()) == 2
    for call in shop.calls():
        assert call[-2:] == ["-gencode", "arch=compute_90,code=sm_90"]
        assert call.count("-gencode") == 1
    proof = next(row for row in outcome.stages if row.name == "import")
    assert "code for sm_90" in proof.note
    assert "takes the 8 arguments of its release" in proof.note
    assert "NumPy" not in proof.note
    assert sorted(row["source"] for row in outcome.kernels) == ["forward.cu", "module.cu"]
    assert outcome.wheel.is_file()
    # What is large goes, the log stays, with what was set and what was run.
    assert not (outcome.setup.folder / "source").exists()
    assert "# CAUSAL_CONV1D_FORCE_BUILD=TRUE" in log
    assert "pip wheel -v --no-deps --no-build-isolation" in log
    assert watcher.states[-1].total == 2
    assert watcher.stages[0] == ("tools", "skipped")
    assert ("compile", "planned") in watcher.stages
    assert "is installed and imports; its results were not compared" in " ".join(
        shown(outcome).split()
    )


def test_after_memory_ran_out_it_is_tried_once_more_with_less(shop):
    """With the user's own compiler command, which the second attempt keeps too."""
    own = shop.root / "own"
    own.write_text(f'#!/bin/sh\necho own >> "{shop.root}/own.log"\nexec "$@"\n')
    own.chmod(0o755)
    given = {"PYTORCH_NVCC": f"'{own}' '{shop.toolkit}/bin/nvcc'"}
    shop.set_mode("memory")
    outcome, watcher = build(shop, **{"environment.variables": given})
    assert outcome.status == "built", outcome.setup.log.read_text()
    assert outcome.retried.startswith("MAX_JOBS=1")
    assert watcher.notes == [f"trying once more with {outcome.retried}"]
    threads = [call[call.index("--threads") + 1] for call in shop.calls()]
    assert threads[0] == "4"
    assert threads[-2:] == ["1", "1"]
    assert (shop.root / "own.log").read_text() == "own\n" * len(threads)
    assert stages(outcome)["compile"] == "done"
    log = outcome.setup.log.read_text()
    assert log.count("# second attempt: MAX_JOBS=1") == 1
    assert "Second attempt with MAX_JOBS=1" in shown(outcome)


def disks(monkeypatch, *, two, free_gb=50):
    """The build's folder on a disk of its own or of all, with that much room."""
    monkeypatch.setattr(retry, "device", lambda path: two and path.name == "build folder")
    room = SimpleNamespace(free=free_gb * 1e9)
    monkeypatch.setattr(retry.shutil, "disk_usage", lambda path: room)


def test_a_full_disk_is_left_for_another_with_room(shop, monkeypatch):
    disks(monkeypatch, two=True)
    shop.set_mode("disk")
    outcome, watcher = build(shop)
    assert outcome.status == "built", outcome.setup.log.read_text()
    assert outcome.retried.startswith("temporary files in the build's own folder")
    assert watcher.notes == [f"trying once more with {outcome.retried}"]
    assert "Second attempt with temporary files" in shown(outcome)


@pytest.mark.parametrize("rest", [{"two": False}, {"two": True, "free_gb": 1}])
def test_a_full_disk_without_another_is_told(shop, monkeypatch, rest):
    disks(monkeypatch, **rest)
    shop.set_mode("disk")
    outcome, _ = build(shop)
    assert (outcome.status, outcome.retried) == ("failed", "")
    assert outcome.diagnosis.root_cause == "disk-full"


def test_a_folder_for_temporary_files_that_the_user_named_stays(tmp_path, monkeypatch):
    folder = tmp_path / "build folder"
    folder.mkdir()
    disks(monkeypatch, two=True)
    assert retry.is_roomier(folder, {})
    assert not retry.is_roomier(folder, {"TMPDIR": "/mine"})


def test_a_failure_is_explained_and_not_tried_again(shop):
    shop.set_mode("compiler")
    outcome, _ = build(shop)
    assert outcome.status == "failed"
    assert outcome.diagnosis.root_cause == "gcc-too-new-for-nvcc"
    assert outcome.retried == ""
    assert stages(outcome) == {
        "tools": "skipped", "source": "done", "compile": "failed", "install": "skipped",
        "import": "skipped", "smoke": "skipped",
    }  # fmt: skip
    assert "unsupported GNU version" in outcome.setup.log.read_text()
    assert "CC202 gcc-too-new-for-nvcc" in shown(outcome)
    assert imports(shop) == ""
    # Where the cause is not recognised, asking for the log that is there would lead nowhere.
    unknown = replace(outcome, diagnosis=analyse_text("no words of a known kind\n"))
    assert "of no kind that is known here. The output ended with:\n  | " in shown(unknown)
    assert "statescan log" not in shown(unknown)


def test_a_source_package_without_sources_is_told(shop):
    fake_build.sdist(shop.root / "index", sources=False)
    outcome, _ = build(shop)
    row = next(row for row in outcome.stages if row.name == "source")
    assert (outcome.status, row.status) == ("failed", "failed")
    assert "holds no CUDA sources" in row.note


def test_a_package_that_cannot_be_fetched_is_told(shop):
    (shop.root / "index" / f"causal_conv1d-{fake_build.VERSION}.tar.gz").unlink()
    outcome, _ = build(shop)
    assert outcome.status == "failed"
    assert stages(outcome)["source"] == "failed"
    assert "No matching distribution" in outcome.setup.log.read_text()


def test_a_module_of_another_generation_is_told(shop):
    fake_build.sdist(shop.root / "index", arguments=7)
    outcome, _ = build(shop)
    assert (outcome.status, stages(outcome)["import"]) == ("failed", "failed")
    assert "takes 7 arguments instead of 8" in outcome.setup.log.read_text()
    assert "was built and installed, and does not work" in shown(outcome)


def test_an_interrupt_ends_every_process_and_says_so(shop):
    """The build runs in a process of its own, which gets what Ctrl-C sends."""
    shop.set_mode("hang")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from helpers import fake_build\n"
        "from statescan.doctor.builder import before, pipeline\n"
        "import test_build_pipeline as here\n"
        "root = Path(sys.argv[1])\n"
        "shop = fake_build.Workshop(root, str(root / 'env/bin/python'), root / 'cuda toolkit',\n"
        "                           fake_build.variables(root))\n"
        "outcome, _ = here.build(shop)\n"
        "print(outcome.status, here.stages(outcome)['compile'])\n"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([SOURCE, str(here.parent), str(here)])
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(shop.root)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    limit = time.monotonic() + 30
    while not sleeping(shop) and time.monotonic() < limit:
        time.sleep(0.05)
    assert sleeping(shop)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out == "interrupted failed\n"
    assert sleeping(shop) == []


def sleeping(shop):
    """Processes that the build left or has: of its folder, by their command line or folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            folder = os.readlink(entry / "cwd")  # noqa: PTH115
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            name = (entry / "comm").read_text().strip()
        except OSError:
            continue
        if folder.startswith(str(shop.root / "build folder")) and state not in "ZX":
            found.append(name)
    return [name for name in found if name == "sleep"]
