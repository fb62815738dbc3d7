# SPDX-License-Identifier: Apache-2.0
import pytest
from helpers.fake_machine import machine, write

from statescan.doctor.facts import environment


def test_only_variables_of_the_list_are_told(tmp_path):
    environ = {"CUDA_HOME": "/usr/local/cuda", "MAX_JOBS": "", "API_TOKEN": "x", "CC_SECRET": "y"}
    found = environment.variables(machine(tmp_path, environ=environ))
    assert found == {"CUDA_HOME": "/usr/local/cuda", "MAX_JOBS": "", "HOME": f"{tmp_path}/home"}
    secret = ("TOKEN", "SECRET", "PASSWORD", "KEY")
    assert not [name for name in environment.VARIABLES if any(word in name for word in secret)]


def test_every_variable_that_a_check_reads_is_on_the_list():
    from statescan.doctor import checks, releases

    prefixes = checks.base.PREFIXES.values()
    switches = checks.environment._SWITCHES
    wanted = {f"{prefix}_{switch}" for prefix in prefixes for switch in switches}
    wanted |= {"CUDA_VISIBLE_DEVICES", "TORCH_CUDA_ARCH_LIST", "PIP_BREAK_SYSTEM_PACKAGES"}
    wanted |= {name for one in checks.base.ORIGINALS for name in releases.variables(one).values()}
    assert wanted <= set(environment.VARIABLES)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("https://me:pass@example.org/simple", "https://example.org/simple"),
        ("https://token@a.org/s https://u:p@b.org/s", "https://a.org/s https://b.org/s"),
        ("https://example.org/a@b", "https://example.org/a@b"),
        ("https://me:p@ss@example.org/s", "https://example.org/s"),
        ("me:p@ss@proxy:8080", "proxy:8080"),
        ("name=https://me:pass@a.org/s me:pass@b:80", "name=https://a.org/s b:80"),
        ("proxy:8080", "proxy:8080"),
        ("mail@example.org", "mail@example.org"),
        ("/plain/folder", "/plain/folder"),
    ],
)
def test_passwords_are_taken_out_of_addresses(tmp_path, value, told):
    here = machine(tmp_path, environ={"PIP_EXTRA_INDEX_URL": value, "https_proxy": value})
    found = environment.variables(here)
    assert (found["PIP_EXTRA_INDEX_URL"], found["https_proxy"]) == (told, told)


def test_the_folders_of_path(tmp_path):
    assert environment.path(machine(tmp_path, environ={"PATH": "/a:/b::/a"})) == ["/a", "/b", "/a"]
    windows = machine(tmp_path, "windows", environ={"PATH": "C:\\a;C:\\b"})
    assert environment.path(windows) == ["C:\\a", "C:\\b"]


@pytest.mark.parametrize(
    ("os", "environ", "folder"),
    [
        ("linux", {}, "home/.cache/pip"),
        ("linux", {"XDG_CACHE_HOME": "{0}/x"}, "x/pip"),
        ("linux", {"PIP_CACHE_DIR": "{0}/y"}, "y"),
        ("macos", {}, "home/Library/Caches/pip"),
        ("windows", {"LOCALAPPDATA": "{0}/Local"}, "Local/pip/Cache"),
    ],
)
def test_wheels_that_pip_built(tmp_path, os, environ, folder):
    values = {name: value.format(tmp_path) for name, value in environ.items()}
    here = machine(tmp_path, os, environ=values)
    assert environment.pip_wheels(here) == []
    name = "mamba_ssm-2.2.2-cp310-cp310-linux_x86_64.whl"
    path = write(tmp_path / folder / "wheels/1f/2a/3b/4c" / name)
    write(path.with_name("numpy-2.0.0-cp310-cp310-linux_x86_64.whl"))
    assert environment.pip_wheels(here) == [{"file": name, "path": str(path)}]
    assert {"name": "pip", "path": str(tmp_path / folder), "size_mb": 0} in environment.folders(
        here
    )


def test_caches_that_exist_with_their_sizes(tmp_path, monkeypatch):
    here = machine(tmp_path, environ={"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")})
    write(tmp_path / "home/.triton/cache/a/b", "x" * (3 << 20))
    write(tmp_path / "ext/py311/main.o", "x")
    triton = {"name": "triton", "path": f"{tmp_path}/home/.triton/cache", "size_mb": 3}
    extensions = {"name": "torch_extensions", "path": f"{tmp_path}/ext", "size_mb": 0}
    assert environment.folders(here) == [triton, extensions]
    monkeypatch.setattr(environment, "_MOST_FILES", 0)
    assert environment.folders(here)[0]["size_mb"] is None


def test_without_a_home_there_is_no_cache(tmp_path):
    here = machine(tmp_path, environ={"HOME": "", "PIP_CACHE_DIR": ""})
    assert (environment.pip_wheels(here), environment.folders(here)) == ([], [])
