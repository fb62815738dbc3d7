# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from helpers.fake_machine import distribution, machine, write

from statescan.doctor.facts import packages

WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp310-cp310-linux_x86_64\n"


@pytest.fixture
def here(tmp_path):
    return machine(tmp_path)


def test_a_wheel_that_pip_installed(here):
    distribution(here.site, "mamba_ssm", "2.2.2", INSTALLER="pip\n", WHEEL=WHEEL)
    assert packages.installed(here) == {
        "mamba-ssm": {
            "version": "2.2.2",
            "location": str(here.site),
            "installer": "pip",
            "wheel_tags": ["cp310-cp310-linux_x86_64"],
            "editable": False,
            "direct_url": None,
        }
    }


def test_names_are_in_normal_form_and_versions_whole(here):
    distribution(here.site, "Jinja2", "3.1.4")
    distribution(here.site, "ruamel.yaml", "0.18.6")
    distribution(here.site, "torch", "2.7.1+cu128")
    write(here.site / "causal_conv1d-1.4.0-py3.11.egg-info/PKG-INFO", "Name: causal-conv1d\n")
    write(here.site / "old.egg-info", "Metadata-Version: 1.0\nName: Old_Thing\nVersion: 1.2\n")
    versions = {name: row["version"] for name, row in packages.installed(here).items()}
    assert versions == {
        "causal-conv1d": "1.4.0",
        "jinja2": "3.1.4",
        "old-thing": "1.2",
        "ruamel-yaml": "0.18.6",
        "torch": "2.7.1+cu128",
    }


def test_editable_installs_and_addresses_without_passwords(here):
    url = "https://me:secret@example.org/mamba.git"
    distribution(
        here.site,
        "mamba_ssm",
        "2.2.4",
        direct_url__json=json.dumps(
            {"url": "file:///home/x/mamba", "dir_info": {"editable": True}}
        ),
    )
    distribution(here.site, "einops", "0.8.1", direct_url__json=json.dumps({"url": url}))
    distribution(here.site, "wheel", "0.45.1", direct_url__json="{ not json")
    write(here.site / "vmamba.egg-link", "/home/x/vmamba\n")
    distribution(here.site, "vmamba", "1.0")
    rows = packages.installed(here)
    assert (rows["mamba-ssm"]["editable"], rows["vmamba"]["editable"]) == (True, True)
    assert rows["mamba-ssm"]["direct_url"] == "file:///home/x/mamba"
    assert rows["einops"]["direct_url"] == "https://example.org/mamba.git"
    assert (rows["wheel"]["editable"], rows["wheel"]["direct_url"]) == (False, None)


def test_of_two_of_one_name_the_first_on_the_path_counts(tmp_path):
    user = tmp_path / "home/.local/lib/python3.11/site-packages"
    here = machine(tmp_path)
    here.search_path = (user, here.site)
    distribution(user, "torch", "2.1.0")
    distribution(here.site, "torch", "2.7.1")
    assert packages.installed(here)["torch"] == {
        **packages.installed(here)["torch"],
        "version": "2.1.0",
        "location": str(user),
    }


@pytest.mark.parametrize("archive", [False, True])
def test_what_setup_py_install_leaves(here, archive):
    """Old setuptools makes a folder or an archive of its own, and no metadata beside it."""
    egg = here.site / "mamba_ssm-1.1.1-py3.10-linux-x86_64.egg"
    if archive:
        write(egg, "PK")
    else:
        write(egg / "EGG-INFO/PKG-INFO", "Name: mamba-ssm\nVersion: 1.1.1\n")
    assert packages.installed(here) == {}
    here.search_path = (egg, here.site)
    distribution(here.site, "mamba_ssm", "2.2.2")
    row = packages.installed(here)["mamba-ssm"]
    assert (row["version"], row["location"], row["editable"]) == ("1.1.1", str(egg), False)


def test_what_setup_py_develop_leaves(here, tmp_path):
    """The metadata stays in the folder of the sources, which a link in site-packages names."""
    clone = tmp_path / "Vim/mamba-1p1p1"
    write(clone / "mamba_ssm.egg-info/PKG-INFO", "Name: mamba-ssm\nVersion: 1.1.1\n")
    write(clone / "other.egg-info/PKG-INFO", "Name: other\nVersion: 1\n")
    write(here.site / "mamba-ssm.egg-link", f"{clone}\n.")
    rows = packages.installed(here)
    assert list(rows) == ["mamba-ssm"]
    row = rows["mamba-ssm"]
    assert (row["version"], row["location"], row["editable"]) == ("1.1.1", str(clone), True)


def test_what_half_removed_packages_leave(here):
    distribution(here.site, "~orch", "2.6.0")
    write(here.site / "~orch/__init__.py")
    assert packages.invalid(here) == ["~orch", "~orch-2.6.0.dist-info"]
    assert packages.installed(here) == {}


def test_a_folder_without_a_name_is_left_out(here):
    write(here.site / "broken.dist-info/RECORD")
    assert packages.installed(here) == {}


def test_the_same_as_importlib_says_of_this_environment():
    from importlib import metadata

    from statescan.doctor.facts.machine import Machine

    here = Machine.here()
    folders = list(map(str, packages.site_folders(here)))
    found = {name: row["version"] for name, row in packages.installed(here).items()}
    expected = {}
    for one in metadata.distributions(path=folders):
        expected.setdefault(one.name.lower().replace("_", "-").replace(".", "-"), one.version)
    assert found == expected
