# SPDX-License-Identifier: Apache-2.0
"""Which checks run for which question, in which order, and what is left out as a consequence."""

from __future__ import annotations

import pytest
from helpers.judging import facts, ids, judge, to_build
from helpers.machine_parts import no_gcc, no_toolkit, originals
from helpers.machines_base import laptop, linux

from statescan.doctor import catalog, checks
from statescan.doctor.checks import base
from statescan.doctor.facts.names import NAMES
from statescan.doctor.model import Facts, Severity
from statescan.errors import ArgumentError


def results(values, package=None, **changes):
    report = checks.examine(facts(values, **changes), package)
    return {row.check.name: row for row in report.results}


@pytest.mark.parametrize("row", base.REGISTRY, ids=lambda row: row.name)
def test_a_check_is_described_and_its_problems_are_in_the_catalogue(row):
    assert row.area in checks.AREAS
    assert row.about
    assert not row.about.endswith(".")
    assert set(row.packages) <= set(checks.PACKAGES)
    assert len(row.codes) == len(row.slugs) > 0
    assert row.causes <= set(catalog.problems()), "an unknown cause never suppresses anything"
    assert not row.causes & set(row.slugs), "a check cannot come after itself"


def test_names_are_unique():
    names = [row.name for row in base.REGISTRY]
    assert len(set(names)) == len(names)


def test_a_check_runs_after_those_whose_findings_make_it_superfluous():
    order = list(checks._ordered())
    assert len(order) == len(base.REGISTRY)
    for row in order:
        for other in order:
            if other is not row and set(other.slugs) & row.causes:
                assert order.index(other) < order.index(row)


def test_all_checks_are_listed_area_by_area():
    areas = [row.area for row in checks.all_checks()]
    assert areas == sorted(areas, key=list(checks.AREAS).index)
    assert set(areas) == set(checks.AREAS)


def test_errors_come_before_warnings_and_earlier_stages_first():
    values = to_build()
    no_toolkit(values)
    no_gcc(values)
    values["python.headers"]["present"] = False
    values["environment.variables"]["MAMBA_FORCE_BUILD"] = "1"
    rows = judge(values, "mamba-ssm")
    assert [row.severity for row in rows] == [Severity.ERROR] * 3 + [Severity.WARNING]
    assert [row.problem.layer for row in rows[:3]] == ["toolkit", "host-compiler", "headers"]


def test_without_a_name_only_statescan_and_what_is_installed_is_judged():
    values = laptop()
    assert checks.examine(facts(values)).question.judged == ("statescan",)
    values = linux()
    originals(values)
    report = checks.examine(facts(values))
    assert report.question.judged == ("statescan", "mamba-ssm", "causal-conv1d")


def test_a_module_without_its_distribution_counts_as_installed():
    values = linux()
    originals(values)
    for name in ("mamba-ssm", "causal-conv1d"):
        del values["packages.installed"][name]
    assert checks.examine(facts(values)).question.used == ("mamba-ssm", "causal-conv1d")


def test_mamba_is_judged_with_the_convolution_that_it_calls_and_not_the_other_way():
    values = linux()
    originals(values)
    both = checks.examine(facts(values), "mamba-ssm").question
    assert both.judged == ("mamba-ssm", "causal-conv1d")
    assert checks.examine(facts(values), "causal-conv1d").question.judged == ("causal-conv1d",)


def test_a_build_is_judged_only_where_one_was_asked_for():
    values = to_build()
    no_toolkit(values)
    assert ids(values) == []
    assert ids(values, "statescan") == []
    assert ids(values, "mamba-ssm") == ["nvcc-missing"]
    originals(values)
    assert ids(values, "mamba-ssm") == [], "what is installed and whole need not be built"


def test_a_broken_install_that_was_asked_for_must_be_buildable_too():
    values = to_build()
    originals(values, lacks=("_ZN3c104cuda9SetDeviceEi",))
    assert ids(values, "mamba-ssm") == ["torch-abi-mismatch"]
    no_toolkit(values)
    assert ids(values, "mamba-ssm") == ["nvcc-missing", "torch-abi-mismatch"]
    assert ids(values) == ["torch-abi-mismatch"], "nobody spoke of a build"


def test_reasons_of_what_is_left_out():
    rows = results(laptop())
    assert rows["nvcc-present"].reason == "not needed for statescan"
    assert rows["nvcc-present"].status == "skipped"
    values = to_build()
    no_toolkit(values)
    rows = results(values, "mamba-ssm")
    assert rows["nvcc-present"].status == "found"
    assert rows["nvcc-age"].reason == "TK101 nvcc-missing comes first"
    assert rows["cxx-present"].status == "ok"
    assert rows["module-present"].reason == "nothing is installed"
    originals(values)
    assert results(values, "mamba-ssm")["nvcc-present"].reason == "nothing is to be installed"
    assert results(laptop(), statescan__smoke=None)["smoke-test"].reason == (
        "nobody looked: statescan.smoke"
    )


def test_what_no_probe_told_is_not_judged():
    report = checks.examine(Facts(), "mamba-ssm")
    reasons = {row.check.name: row.reason for row in report.results}
    assert reasons["nvcc-present"] == "nothing is known of toolkit.build"
    assert report.findings == ()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_probe_that_failed_is_no_cause_for_alarm(name):
    """Its fact has no value, which is not the same as a thing that is not there."""
    for values, package in ((to_build(), "mamba-ssm"), (laptop(), None)):
        document = facts(values).to_json()
        document["facts"][name] = {"value": None, "source": "x", "problem": "PermissionError"}
        assert checks.run(Facts.from_json(document), package) == []


def test_a_clone_in_the_current_folder_is_no_install():
    row = {"importable": False, "error": "No module named", "file": "/x/__init__.py", "usable": {}}
    report = checks.examine(facts(laptop(), extensions__python={"mamba_ssm": row}))
    assert (report.question.used, report.findings) == ((), ())


@pytest.mark.parametrize("name", ["toolkit", "TK101", "tk101", "nvcc-missing"])
def test_checks_are_chosen_by_area_code_or_id(name):
    values = to_build()
    no_toolkit(values)
    no_gcc(values)
    report = checks.examine(facts(values), "mamba-ssm", [name])
    assert [row.problem.slug for row in report.findings] == ["nvcc-missing"]
    assert {row.check.area for row in report.results} == {"toolkit"}


def test_a_choice_does_not_show_what_follows_from_a_cause_outside_it():
    values = to_build()
    no_toolkit(values)
    report = checks.examine(facts(values), "mamba-ssm", ["nvcc-too-old"])
    assert report.findings == ()
    assert report.results[0].reason == "TK101 nvcc-missing comes first"


def test_an_unknown_name_is_refused_with_those_near_it():
    with pytest.raises(ArgumentError, match=r"Near it: .*nvcc-missing"):
        checks.run(Facts(), None, ["nvcc-mising"])  # typos: ignore
    with pytest.raises(ArgumentError, match="Areas: environment, python"):
        checks.run(Facts(), None, ["zzzzzz"])
    with pytest.raises(ArgumentError, match="'flash-attn' is not one"):
        checks.run(Facts(), "flash-attn")


def test_one_cause_for_two_modules_is_one_finding():
    values = linux()
    originals(values, lacks=("_ZN3c104cuda9SetDeviceEi",))
    (row,) = judge(values)
    assert row.packages == ("mamba-ssm", "causal-conv1d")
    assert "causal_conv1d_cuda" in row.evidence[-1]


def test_a_warning_of_a_half_removed_package_hides_no_error():
    values = linux()
    originals(values, lacks=("_ZN3c104cuda9SetDeviceEi",))
    values["packages.invalid"] = ["~orch"]
    assert ids(values) == ["torch-abi-mismatch", "package-half-removed"]
