# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from helpers.fake_machine import machine, program, write

from statescan.doctor.facts import children, gather, probe
from statescan.doctor.facts.machine import Machine
from statescan.doctor.facts.names import NAMES
from statescan.doctor.model import Facts

DOCTOR = Path(gather.__file__).parents[1]
SCHEMA = json.loads((DOCTOR / "schemas" / "facts.schema.json").read_text())
SHOW = """
import json
from statescan.doctor.facts.machine import Machine
here = Machine.here()
print(json.dumps([here.sees_cwd, here.search_path.count(here.cwd)]))
"""
MACHINES = sorted((Path(__file__).parent / "machines").glob("*.json"))


def validate(document) -> None:
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)


@pytest.fixture(scope="module")
def process() -> dict:
    """What a process of its own gathered, and the modules that are then in it."""
    code = (
        "import json, sys\nfrom statescan.doctor.facts import gather\n"
        "facts = gather.gather().to_json()\n"
        "print(json.dumps({'facts': facts, 'modules': sorted(sys.modules)}))\n"
    )
    environ = {**Machine.here().environ, "PYTHONPATH": str(DOCTOR.parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def everything(process) -> Facts:
    return Facts.from_json(process["facts"])


def test_the_schema_is_a_schema_and_knows_every_fact():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SCHEMA["properties"]["facts"]["properties"]) == list(NAMES)


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_saved_facts_fit_the_schema(path):
    validate(json.loads(path.read_text()))


def test_every_fact_is_set_by_one_probe_or_child():
    names = [name for one in probe.PROBES for name in one.names]
    assert len(names) == len(set(names))
    of_children = set(NAMES) - set(names)
    assert {name.partition(".")[0] for name in of_children} == {"torch", "statescan"}


def test_everything_that_is_known_here(everything):
    assert [fact.name for fact in everything] == sorted(NAMES)
    validate(json.loads(json.dumps(everything.to_json())))
    assert Facts.from_json(everything.to_json()).to_json() == everything.to_json()
    assert all(fact.source for fact in everything)
    assert [fact.name for fact in everything if fact.problem] == []


def test_what_torch_and_statescan_say_here(everything):
    import torch

    assert everything.get("torch.import")["ok"] is True
    assert everything.get("torch.cuda_available") is torch.cuda.is_available()
    assert len(everything.fact("torch.devices").value) == torch.cuda.device_count()
    assert everything.get("statescan.smoke")["ok"] is True
    assert "torch" in [row["name"] for row in everything.get("statescan.backends")]


def test_without_imports_it_is_quick_and_says_what_was_not_tried():
    start = time.perf_counter()
    found = gather.gather_static()
    assert time.perf_counter() - start < 10
    assert [fact.name for fact in found] == sorted(NAMES)
    validate(json.loads(json.dumps(found.to_json())))
    for name in ("torch.import", "torch.devices", "statescan.backends", "statescan.smoke"):
        fact = found.fact(name)
        assert (fact.value, fact.source, fact.problem) == (None, "not tried", "")


def test_nothing_heavy_is_imported_into_this_process(process):
    assert not {"torch", "numpy", "packaging", "pynvml", "mamba_ssm"} & set(process["modules"])


@pytest.mark.parametrize("os", ["linux", "windows", "macos"])
def test_an_empty_machine_of_every_system(tmp_path, os):
    """No home, no PATH, no /proc, no torch: every fact is there, and none is a failure."""
    here = machine(tmp_path, os, environ={"HOME": "", "USERPROFILE": ""})
    found = gather.look(here, import_torch=False, smoke=False)
    assert [fact.name for fact in found] == sorted(NAMES)
    validate(json.loads(json.dumps(found.to_json())))
    assert [fact.name for fact in found if fact.problem] == []
    assert found.get("torch.version") is None
    assert found.get("toolkit.homes") == []


def test_a_probe_that_fails_spoils_its_own_facts_only(tmp_path, monkeypatch):
    def broken(_):
        raise PermissionError("/etc/os-release: not for you")

    monkeypatch.setattr(
        probe, "PROBES", [probe.Probe(("system.name", "system.distribution"), "a file", broken)]
    )
    found = gather.look(machine(tmp_path), import_torch=False, smoke=False)
    fact = found.fact("system.distribution")
    assert (fact.value, fact.source) == (None, "a file")
    assert fact.problem == "PermissionError: /etc/os-release: not for you"
    assert len(list(found)) == len(NAMES)


def test_a_child_that_cannot_be_read_spoils_no_probe(tmp_path, monkeypatch):
    here = machine(tmp_path)
    write(here.site / "torch/__init__.py")
    monkeypatch.setattr(children, "ask", lambda *_: {"torch": "no answer"})
    found = gather.look(here, import_torch=True, smoke=True)
    assert found.fact("torch.import").problem
    assert found.get("torch.location") == str(here.site / "torch")
    assert len(list(found)) == len(NAMES)


def test_without_torch_only_the_library_is_asked_for(tmp_path):
    found = gather.look(machine(tmp_path), import_torch=True, smoke=True)
    assert found.fact("torch.import").source == "not tried without torch"
    assert found.fact("statescan.smoke").value is None
    assert "No module named" in found.fact("statescan.native").problem


@pytest.mark.parametrize(
    ("way", "sees_cwd", "places"), [("-m", True, 1), ("script", False, 1), ("script", False, 0)]
)
def test_the_current_folder_keeps_its_place_in_pythonpath(tmp_path, way, sees_cwd, places):
    """Python puts it in front for -m alone; who names it in PYTHONPATH has it on the path."""
    work = write(tmp_path / "work/show.py", SHOW).parent
    script = write(tmp_path / "bin/show.py", SHOW)
    paths = [str(DOCTOR.parents[1]), *[str(work)] * places]
    command = ["-m", "show"] if way == "-m" else [str(script)]
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=work,
        env={**Machine.here().environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == [sees_cwd, places]


def test_programs_get_no_shell_no_input_and_english(tmp_path):
    tool = program(tmp_path / "tool", script='echo "$1|$LC_ALL|$(cat)|$HIDDEN"\n')
    here = machine(tmp_path, environ={"LC_ALL": "de_DE.UTF-8", "HIDDEN": "1"})
    assert here.run([tool, "$(id); *"], without=("HIDDEN",)).out == "$(id); *|C||\n"


def test_a_program_that_hangs_is_ended(tmp_path):
    tool = program(tmp_path / "tool", script="echo begun\nexec sleep 60\n")
    start = time.perf_counter()
    ran = machine(tmp_path).run([tool], timeout=0.5)
    assert time.perf_counter() - start < 10
    assert (ran.code, ran.ok, ran.problem) == (None, False, "no answer within 0.5 s")
    assert ran.out == "begun\n"


def test_a_program_that_is_none_is_a_problem(tmp_path):
    ran = machine(tmp_path).run([write(tmp_path / "text", "x")])
    assert (ran.code, ran.out) == (None, "")
    assert ran.problem.startswith(f"{tmp_path}/text does not start")


def test_the_same_program_is_started_once(tmp_path):
    tool = program(tmp_path / "tool", script=f"echo x >> {tmp_path}/log\n")
    here = machine(tmp_path)
    assert here.run([tool]) is here.run([tool])
    assert (tmp_path / "log").read_text() == "x\n"
