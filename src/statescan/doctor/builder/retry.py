# SPDX-License-Identifier: Apache-2.0
"""Which failures are worth a second attempt by itself, and what it changes.

Only what cannot do harm and costs nothing but time; everything else is told to the user.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from statescan.doctor.checks.resources import GB_OF_DISK
from statescan.doctor.logs.diagnosis import Diagnosis


@dataclass(frozen=True)
class Change:
    """How the second attempt differs from the first.

    Attributes:
        text: For people, on one line.
        set: Variables.
        threads: Parallel steps of one nvcc; None to leave them.
        temporary: Whether temporary files go to the build's own folder.
        no_cache: Whether pip fetches anew what it has in its cache.
    """

    text: str
    set: tuple[tuple[str, str], ...] = ()
    threads: int | None = None
    temporary: bool = False
    no_cache: bool = False


_COMPILE = {
    "build-out-of-memory": Change(
        "MAX_JOBS=1 and one thread for each nvcc, because memory ran out",
        (("MAX_JOBS", "1"),),
        threads=1,
    ),
    "cross-device-rename": Change(
        "temporary files in the build's own folder, because files cannot be moved between disks",
        temporary=True,
    ),
}
_ELSEWHERE = Change(
    "temporary files in the build's own folder, because their disk is full and this one is not",
    temporary=True,
)
_FETCH = {
    "wheel-download-failed": Change("the download once more", no_cache=True),
    "stale-wheel-cache": Change("--no-cache-dir, because the cache is stale", no_cache=True),
    "sdist-missing-sources": Change(
        "--no-cache-dir, because the copy in the cache is not complete", no_cache=True
    ),
}


def change(stage: str, diagnosis: Diagnosis, *, roomier: bool = False) -> Change | None:
    """What to change for a second attempt of a stage; None when there should be none.

    Args:
        stage: Name of the stage that failed.
        diagnosis: Of its part of the log.
        roomier: Whether the build's folder has the room that the temporary folder lacks.
    """
    if stage == "compile" and diagnosis.root_cause == "disk-full":
        return _ELSEWHERE if roomier else None
    known = {"compile": _COMPILE, "source": _FETCH}.get(stage, {})
    return known.get(diagnosis.root_cause)


def is_roomier(folder: Path, variables: Mapping[str, str]) -> bool:
    """Whether a folder has room for a build and is on another disk than temporary files.

    Args:
        folder: Of the build.
        variables: Of its programs; a TMPDIR of the user's own is never replaced.
    """
    if variables.get("TMPDIR"):
        return False
    try:
        elsewhere = device(folder) != device(Path(tempfile.gettempdir()))
        return elsewhere and shutil.disk_usage(folder).free >= GB_OF_DISK * 1e9
    except OSError:
        return False


def device(folder: Path) -> int:
    """Which disk a folder is on."""
    return folder.stat().st_dev
