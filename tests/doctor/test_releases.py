# SPDX-License-Identifier: Apache-2.0
"""What is known of the originals' releases and of toolchains."""

from __future__ import annotations

import pytest

from statescan.doctor import releases

FIELDS = {"cuda": "12.6", "torch": "2.7", "abi": True, "python_tag": "cp311"}


@pytest.mark.parametrize("package", releases.PACKAGES)
def test_releases_are_in_the_order_of_their_dates_and_versions(package):
    rows = releases.releases(package)
    assert [row.date for row in rows] == sorted(row.date for row in rows)
    assert len({row.version for row in rows}) == len(rows) >= 22
    assert all(releases.release(package, row.version) is row for row in rows)


def test_arguments_of_causal_conv1d_fwd_by_release():
    """Which releases of the two packages go together."""
    offered = {row.version: row.conv_generation for row in releases.releases("causal-conv1d")}
    called = {row.version: row.conv_generation for row in releases.releases("mamba-ssm")}
    assert (offered["1.0.2"], offered["1.1.1"], offered["1.4.0"], offered["1.5.1"]) == (4, 5, 7, 8)
    assert offered["1.5.0.post8"] == 7
    assert (called["1.0.1"], called["1.1.4"], called["2.2.4"], called["2.2.5"]) == (4, 5, 7, 8)


@pytest.mark.parametrize(
    ("package", "version", "nvcc", "codes"),
    [
        ("mamba-ssm", "1.1.1", "11.7", "70 80"),
        ("mamba-ssm", "1.1.1", "12.1", "70 80 90"),
        ("causal-conv1d", "1.4.0", "12.4", "53 62 70 72 80 87 90"),
        ("mamba-ssm", "2.2.5", "12.8", "53 62 70 72 80 87 90 100"),
        ("causal-conv1d", "1.6.1", "12.9", "62 70 72 75 80 87 90 100 120"),
        ("causal-conv1d", "1.6.1", "13.0", "75 80 87 90 100 103 110 120 121"),
        ("mamba-ssm", "2.3.2.post1", "12.8", "75 80 87 90 100 120"),
    ],
)
def test_gpu_code_of_a_build(package, version, nvcc, codes):
    """Never PTX: what is not listed does not run."""
    found = releases.release(package, version).cubins(nvcc)
    assert found == [f"sm_{code}" for code in codes.split()]


def test_sources_are_in_the_sdist_since_2_2_5_and_1_5_1():
    for package, first in (("mamba-ssm", "2.2.5"), ("causal-conv1d", "1.5.1")):
        complete = [r.version for r in releases.releases(package) if r.sdist_has_sources]
        assert complete[0] == first
        assert complete[-1] == releases.releases(package)[-1].version


def test_versions_that_are_not_listed_are_answered_by_their_neighbour():
    for asked, like in (("2.2.6", "2.2.6.post3"), ("2.2.6.post1", "2.2.6.post3"), ("9.0", None)):
        found = releases.release("mamba-ssm", asked)
        known = releases.release("mamba-ssm", like) if like else releases.releases("mamba-ssm")[-1]
        assert (found.version, found.exact) == (asked, False)
        assert found.archs == known.archs
    assert releases.release("mamba-ssm", "0.9") is None
    assert releases.release("mamba-ssm", "2.3.1+cu12torch2.7cxx11abiTRUE").exact


def test_wheel_names_by_generation():
    name = releases.wheel_name
    fields = {**FIELDS, "platform": "linux_x86_64"}
    assert name("mamba-ssm", "2.3.1", **fields) == (
        "mamba_ssm-2.3.1+cu12torch2.7cxx11abiTRUE-cp311-cp311-linux_x86_64.whl"
    )
    assert "+cu122torch2.7" in name("mamba-ssm", "2.2.2", **fields)
    assert "+cu118torch2.7" in name("causal-conv1d", "1.4.0", **{**fields, "cuda": "11.8"})
    arm = {**fields, "platform": "linux_aarch64"}
    assert name("mamba-ssm", "2.3.1", **arm).endswith("linux_aarch64.whl")
    assert name("causal-conv1d", "1.6.1", **arm).endswith("linux_aarch64.whl")
    assert "abiFALSE" in name("mamba-ssm", "2.2.2", **{**fields, "torch": "2.4", "abi": None})


def test_what_an_older_setup_asks_for_is_not_always_what_fits():
    """Read off the setup.py of each source package."""
    asked = releases.wheel_asked
    arm = {**FIELDS, "platform": "linux_aarch64"}
    for package, older, newer in (
        ("mamba-ssm", "2.3.1", "2.3.2.post1"),
        ("causal-conv1d", "1.6.1", "1.6.2.post1"),
    ):
        assert asked(package, older, **arm).endswith("linux_x86_64.whl")
        assert asked(package, newer, **arm).endswith("linux_aarch64.whl")
        assert asked(package, newer, **arm) == releases.wheel_name(package, newer, **arm)
    new = {**FIELDS, "cuda": "13.0", "platform": "linux_x86_64"}
    assert "+cu12torch" in asked("mamba-ssm", "2.2.5", **new)
    assert "+cu13torch" in asked("mamba-ssm", "2.2.6.post3", **new)
    assert "+cu122torch" in asked("causal-conv1d", "1.4.0", **new)
    assert "+cu12torch" in asked("causal-conv1d", "1.5.2", **new)
    assert "+cu13torch" in asked("causal-conv1d", "1.5.3.post1", **new)
    windows = {**FIELDS, "platform": "win_amd64"}
    assert asked("causal-conv1d", "1.4.0", **windows).endswith("win_amd64.whl")


def test_publication_is_known_for_some_releases_and_never_guessed():
    def published(version, **other):
        fields = {**FIELDS, "platform": "linux_x86_64", **other}
        return releases.wheel_published("mamba-ssm", version, **fields)

    assert published("2.3.1") is True
    assert published("2.3.1", torch="2.11") is False
    assert published("2.3.1", python_tag="cp314") is False
    assert published("2.3.1", cuda="13.0") is False
    assert published("2.3.1", abi=False) is False
    assert published("2.3.1", torch="2.6", abi=False) is True
    assert published("2.3.1", torch="2.6", platform="linux_aarch64") is False
    assert published("2.2.4") is None
    assert published("2.2.4", platform="win_amd64") is False
    assert published("2.2.4", platform="macosx_11_0_arm64") is False


def test_bounds_of_toolchains():
    assert releases.gcc_bounds("11.5") == ("5", "11")
    assert releases.gcc_bounds("12.1")[1] == "12"
    assert releases.gcc_bounds("12.6")[1] == "13"
    assert releases.gcc_bounds("10.1")[1] == "8"
    assert releases.msvc_bounds("12.3")[1] == "19.39"
    assert releases.nvcc_archs("12.6") == (50, 90)
    assert releases.nvcc_archs("12.8") == (50, 120)
    assert releases.nvcc_archs("13.0") == (75, 121)
    assert releases.driver_for_cuda("12.4") == "525.60.13"
    assert releases.driver_for_cuda("13.0", "windows") == "580.65"


def test_bounds_of_torch():
    assert releases.torch_min_gcc("2.0") == "5"
    assert releases.torch_min_gcc("2.7") == "9"
    assert releases.torch_pythons("2.4") == ("3.8", "3.9", "3.10", "3.11", "3.12")
    assert releases.torch_abi_default("2.5") is False
    assert releases.torch_abi_default("2.6") is None
    assert releases.torch_abi_default("2.13") is True


def test_the_matrix_has_a_least_and_a_recommended_version():
    for package, row in releases.matrix().items():
        assert set(row) == {"python", "torch", "cuda", "gcc"}, package
        assert all(least and best for least, best in row.values())
