# SPDX-License-Identifier: Apache-2.0
"""Logs that were written without a look at the analyser: each must give the cause on its label.

The analyser's own rules have their tests elsewhere; here only whole logs are read, in the formats
and encodings in which people have them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from statescan.doctor.catalog import problems
from statescan.doctor.logs.analyse import analyse

FOLDER = Path(__file__).parent / "heldout"
LOGS = sorted(FOLDER.glob("*.log"))


def label(log: Path) -> tuple[str, set[str]]:
    """The expected cause of a log, and every cause that counts as right."""
    lines = log.with_suffix(".expect").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(": ", 1) for line in lines if line)
    also = {slug.strip() for slug in fields.get("also_accept", "").split(",")} - {""}
    return fields["root_cause"], {fields["root_cause"], *also}


def test_every_log_has_a_label_and_every_label_a_log():
    assert len(LOGS) >= 60
    assert {log.stem for log in LOGS} == {path.stem for path in FOLDER.glob("*.expect")}
    assert all(log.stat().st_size < 12_000 for log in LOGS)


def test_the_labels_are_causes_of_the_catalogue_and_each_cause_has_two_logs():
    known = {problem.slug for problem in problems().values()}
    causes = [label(log)[0] for log in LOGS]
    accepted = set().union(*(label(log)[1] for log in LOGS))
    assert accepted <= known
    assert len(set(causes)) == 57
    assert [cause for cause in set(causes) if causes.count(cause) < 2] == []


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_the_cause_is_the_one_on_the_label(log):
    expected, accepted = label(log)
    with log.open("rb") as stream:
        diagnosis = analyse(stream)
    assert diagnosis.root_cause in accepted, f"{diagnosis.root_cause} instead of {expected}"
