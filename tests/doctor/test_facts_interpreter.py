# SPDX-License-Identifier: Apache-2.0
import sysconfig

import pytest
from helpers.fake_machine import distribution, machine, program, write

from statescan.doctor.facts import interpreter


@pytest.fixture
def here(tmp_path):
    return machine(tmp_path)


def kind(here):
    found = interpreter.environment(here)
    return found["kind"] if isinstance(found, dict) else found.value["kind"]


def test_a_virtual_environment_and_who_made_it(here):
    assert kind(here) == "venv"
    write(here.prefix / "pyvenv.cfg", "home = /usr/bin\nversion = 3.11.9\n")
    assert kind(here) == "venv"
    write(here.prefix / "pyvenv.cfg", "home = /usr/bin\nuv = 0.5.1\n")
    assert kind(here) == "uv"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("usr", "system"), ("miniconda3/conda-meta", "conda"), ("p/.pixi/envs/x/conda-meta", "pixi")],
)
def test_other_environments(tmp_path, prefix, expected):
    folder = tmp_path / prefix
    folder.mkdir(parents=True)
    top = folder.parent if folder.name == "conda-meta" else folder
    assert kind(machine(tmp_path, prefix=top, base_prefix=top)) == expected


def test_the_mark_of_a_system_that_keeps_its_python_to_itself(tmp_path):
    system = machine(tmp_path, prefix=tmp_path / "usr")
    assert interpreter.externally_managed(system).value is False
    mark = system.path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    write(mark, "[externally-managed]\n")
    found = interpreter.externally_managed(system)
    assert (found.value, found.source) == (True, str(mark))
    # Inside a venv of that Python pip is free.
    assert interpreter.externally_managed(machine(tmp_path)).value is False


def test_headers(here):
    folder = sysconfig.get_path("include")
    assert interpreter.headers(here) == {"folder": folder, "present": False}
    write(here.path(folder) / "Python.h")
    assert interpreter.headers(here) == {"folder": folder, "present": True}


def test_pip_is_that_of_the_environment(here):
    assert interpreter.pip(here) is None
    distribution(here.site, "pip", "24.0")
    assert interpreter.pip(here) == {"version": "24.0"}


def test_uv(tmp_path):
    here = machine(tmp_path, environ={"PATH": str(tmp_path / "bin")})
    assert interpreter.uv(here) is None
    path = program(tmp_path / "bin/uv", "uv 0.5.1 (4ca8a5f 2024-11-08)")
    assert interpreter.uv(here) == {"version": "0.5.1", "path": str(path)}


def test_conda_is_not_started_for_its_version(tmp_path):
    path = program(tmp_path / "c/bin/conda", script=f"touch {tmp_path}/started\n")
    write(tmp_path / "c/conda-meta/conda-24.1.2-py311h06a4308_0.json")
    write(tmp_path / "c/conda-meta/conda-libmamba-solver-24.1.0-pyhd_0.json")
    active = str(tmp_path / "c/envs/x")
    here = machine(tmp_path, environ={"CONDA_EXE": str(path), "CONDA_PREFIX": active})
    found = interpreter.conda(here)
    assert found.value == {"version": "24.1.2", "path": str(path), "prefix": active}
    assert not (tmp_path / "started").exists()


def test_micromamba_tells_its_version(tmp_path):
    path = program(tmp_path / "bin/micromamba", "1.5.8")
    found = interpreter.conda(machine(tmp_path, environ={"PATH": str(tmp_path / "bin")}))
    assert found.value == {"version": "1.5.8", "path": str(path), "prefix": None}
    assert interpreter.conda(machine(tmp_path)) is None


def test_the_tag_is_that_of_wheels_for_this_interpreter(here):
    from packaging import tags

    assert interpreter.tag(here) == next(tags.sys_tags()).interpreter
