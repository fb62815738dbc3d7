# SPDX-License-Identifier: Apache-2.0
"""Files for an environment that works: lock, requirements, conda, Dockerfile, compose, CI.

``target`` says what is wanted, ``choices`` decides once, and one module for each file writes it.
Text comes out, and the same target gives the same bytes; no file is written here.
"""

from __future__ import annotations

from collections.abc import Callable

from statescan.doctor.generate import ci, compose, conda, dockerfile, lockfile, requirements
from statescan.doctor.generate.choices import Choices

WRITERS: dict[str, Callable[[Choices], str]] = {
    "lock": lockfile.write,
    "requirements": requirements.write,
    "conda": conda.write,
    "dockerfile": dockerfile.write,
    "compose": compose.write,
    "ci": ci.write,
}
"""Kinds of files, in the order of the help, and what writes each."""

FILES = {
    "lock": lockfile.FILE,
    "requirements": requirements.FILE,
    "conda": conda.FILE,
    "dockerfile": dockerfile.FILE,
    "compose": compose.FILE,
    "ci": ci.FILE,
}
"""The usual name of each kind of file."""
