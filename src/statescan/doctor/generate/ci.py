# SPDX-License-Identifier: Apache-2.0
"""Writes a GitHub Actions workflow that proves the import and runs a smoke test.

Hosted runners have no GPU: what needs one is a job of its own, for a runner of the user.
"""

from __future__ import annotations

import shlex
import textwrap

from statescan.doctor import shells
from statescan.doctor.generate import comments, smoke
from statescan.doctor.generate.choices import Choices
from statescan.doctor.generate.originals import Source
from statescan.doctor.model import Command

FILE = "statescan.yml"

_PURPOSE = (
    "GitHub Actions workflow; its place is .github/workflows/. The actions are named by their "
    "major versions: pin them to commits where that is your rule."
)
_HEAD = """
name: {package}
on:
  push:
  pull_request:
  workflow_dispatch:
permissions:
  contents: read
defaults:
  run:
    shell: bash
jobs:
"""
_STATESCAN_JOB = """\
  smoke:
    runs-on: {runner}
    timeout-minutes: 20
    steps:
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
"""
_BUILD_JOB = """\
  build:
    # nvcc needs no GPU, and neither does loading what it made.
    runs-on: {runner}
    container: {image}
    # The originals compile every architecture they know: hours on a hosted runner.
    timeout-minutes: 350
    env:
      CC: gcc-{gcc}
      CXX: g++-{gcc}
      CUDA_HOME: /usr/local/cuda
    steps:
"""
_GPU_JOB = """\
  gpu:
    # Where the repository's variable GPU_RUNNER is true: a runner of yours with a GPU.
    if: vars.GPU_RUNNER == 'true'
    needs: build
    runs-on: [self-hosted, linux, gpu]
    container:
      image: {image}
      options: --gpus all
    timeout-minutes: 30
    steps:
"""
_PYTHON = """\
      # uv's Python brings its own headers and needs nothing of the image.
      - uses: astral-sh/setup-uv@v6
        with:
          version: "{uv}"
"""
_UPLOAD = """\
      - uses: actions/upload-artifact@v4
        with:
          name: wheels
          path: wheels/
          if-no-files-found: error
"""
_DOWNLOAD = """\
      - uses: actions/download-artifact@v4
        with:
          name: wheels
          path: wheels
"""


def write(choices: Choices) -> str:
    """The file's text."""
    head = "\n".join(comments.head("ci", choices, _PURPOSE, FILE)) + "\n"
    jobs = _build(choices) + _gpu(choices) if choices.sources else _statescan(choices)
    return head + _HEAD.format(package=choices.package) + jobs


def _statescan(choices: Choices) -> str:
    return "".join(
        (
            _STATESCAN_JOB.format(runner=_runner(choices), python=choices.target.python),
            _step("Install torch", _pip_torch(choices)),
            _step("Install statescan", shlex.join(("pip", "install", *choices.extras))),
            _step("Import", shlex.join(("python", "-c", smoke.imports(choices)))),
            _program("Smoke test: the kernels against plain torch", smoke.kernels(choices)),
        )
    )


def _build(choices: Choices) -> str:
    gcc = choices.build.gcc
    apt = (
        "apt-get update\n"
        f"apt-get install --yes --no-install-recommends ca-certificates gcc-{gcc} g++-{gcc}"
    )
    return "".join(
        (
            _BUILD_JOB.format(runner=_runner(choices), image=choices.images.build, gcc=gcc),
            _step("Host compiler", apt),
            *_environment(choices),
            *(_step(f"Build {source.package}", _wheel(source)) for source in choices.sources),
            _step("Import", shlex.join(("python", "-c", smoke.imports(choices)))),
            _program("Smoke test: the arguments fit", smoke.arguments(choices)),
            _UPLOAD,
        )
    )


def _gpu(choices: Choices) -> str:
    return "".join(
        (
            _GPU_JOB.format(image=choices.images.final),
            *_environment(choices),
            _DOWNLOAD,
            _step("Install the wheels", "pip install --no-deps wheels/*.whl"),
            _program("Smoke test: the kernels against plain torch", smoke.kernels(choices)),
        )
    )


def _environment(choices: Choices) -> tuple[str, ...]:
    """Python, torch and the pinned packages, the same in the build and on the GPU."""
    venv = (
        f"uv venv --seed --managed-python --python {choices.target.python} /opt/venv\n"
        'echo /opt/venv/bin >> "$GITHUB_PATH"'
    )
    pinned = shlex.join(("pip", "install", *choices.build.tools, *choices.extras))
    return (
        _PYTHON.format(uv=choices.images.uv.rsplit(":", 1)[1]),
        _step("Python", venv),
        _step("Install torch", _pip_torch(choices)),
        _step("Install the pinned packages", pinned),
    )


def _runner(choices: Choices) -> str:
    if choices.target.os == "linux" and choices.target.machine == "aarch64":
        return "ubuntu-24.04-arm"
    return {"windows": "windows-2022", "macos": "macos-14"}.get(choices.target.os, "ubuntu-24.04")


def _wheel(source: Source) -> str:
    """Build a wheel, which the job with the GPU takes too, and install it."""
    pip, install, *options = source.command.run
    assert (pip, install) == ("pip", "install")
    build = Command(("pip", "wheel", "--wheel-dir", "wheels", *options), env=source.command.env)
    name = source.package.replace("-", "_")
    return "\n".join((*shells.lines(build, "bash"), f"pip install --no-deps wheels/{name}-*.whl"))


def _pip_torch(choices: Choices) -> str:
    index = ("--index-url", choices.index) if choices.index else ()
    return shlex.join(("pip", "install", *index, choices.torch))


def _program(name: str, program: str) -> str:
    return _step(name, f"python - <<'PY'\n{program}PY")


def _step(name: str, script: str) -> str:
    return f'      - name: "{name}"\n        run: |\n{textwrap.indent(script, " " * 10)}\n'
