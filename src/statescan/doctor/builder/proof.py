# SPDX-License-Identifier: Apache-2.0
"""Programs that prove a build: the module loads, has the expected arguments, and computes right.

They run in a child process, print what they saw, and end with an error when something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from statescan.doctor.builder.target import Targets
from statescan.doctor.checks.base import EXTENSIONS, MODULES
from statescan.doctor.generate import smoke
from statescan.doctor.releases import Release
from statescan.doctor.symbols import report

SAID = "proof: "
"""What a line of these programs begins with; libraries print lines of their own."""

_ARGUMENTS = """\
import re
text = causal_conv1d_cuda.causal_conv1d_fwd.__doc__
found = len(re.findall(r"\\barg\\d+:", text))
assert found == {count}, f"causal_conv1d_fwd takes {{found}} arguments instead of {count}"
print("{said}causal_conv1d_fwd takes the {count} arguments of its release")
"""
_PACKAGE = """\
try:
    import {module}
    print("{said}{module}", {module}.__version__, "imports")
except ModuleNotFoundError as error:
    print("{said}{module} itself also needs", error.name)
except Exception as error:
    # Triton, which it imports, may refuse where there is no driver; the module is what was built.
    print("{said}{module} itself does not import here:", type(error).__name__, error)
"""


def loads(release: Release) -> str:
    """A program that imports the compiled module and then the package around it."""
    extension, module = EXTENSIONS[release.package], MODULES[release.package]
    # torch comes first: loading it is what makes its libraries known to the module.
    program = f"import torch, {extension}\nprint('{SAID}' + {extension}.__file__)\n"
    if release.package == "causal-conv1d":
        program += _ARGUMENTS.format(count=release.conv_generation, said=SAID)
    return program + _PACKAGE.format(module=module, said=SAID)


def computes(release: Release) -> str:
    """A program that compares the kernels with plain torch on a GPU."""
    return smoke.program(release.package)


def lacking(file: Path, targets: Targets) -> tuple[str, ...]:
    """Targets of the build that the file has no code for, read without loading it."""
    held = report.report(file, look=False)["cuda_archs"]
    inside = {*held["cubin"], *held["ptx"]}
    return tuple(name for name in targets.names if name not in inside)


def inside(file: Path) -> Iterable[str]:
    """What GPU code the file holds."""
    held = report.report(file, look=False)["cuda_archs"]
    return [*held["cubin"], *held["ptx"]]
