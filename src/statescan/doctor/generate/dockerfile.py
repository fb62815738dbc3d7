# SPDX-License-Identifier: Apache-2.0
"""Writes ``Dockerfile``: a build stage, and a final stage without compiler, run by a plain user.

The same choices as in every other file; only their order and layers are decided here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from statescan.doctor.generate import comments, smoke
from statescan.doctor.generate.choices import Choices

FILE = "Dockerfile"

_PURPOSE = "Image in two stages; needs BuildKit, which docker has used since version 23."
_UV = (
    "uv's Python is the same build in both stages, brings its own headers and needs nothing of the "
    "distribution; the version of uv pins its patch release."
)
_APT = "A version of a distribution's package is gone with its next update, so none is pinned here."
_TORCH = "torch alone: its index holds other packages too, in old versions."
_BUILD = (
    "Built against the torch above: no isolation, no guessed download, no new torch. The variables "
    "count only when they are TRUE."
)
_TRITON = (
    "Triton compiles a small C file at the first call of each of its kernels, and this image has "
    "no compiler. The CUDA kernels (selective_scan_fn, causal_conv1d_fn) need none. For Mamba-2, "
    "the decode step and the fused norm of mamba-ssm put this line here:"
)
_GCC = (
    "#   RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev",
    "# and take gcc and cc out of the check below.",
)
_PROOF = "The build fails here rather than the program later: no compiler, and the import works."


def write(choices: Choices) -> str:
    """The file's text."""
    lines = comments.head("dockerfile", choices, _PURPOSE, FILE)
    stage = _build_originals(choices) if choices.sources else _build_statescan(choices)
    return "\n".join([*lines, "", *stage, "", *_final(choices)]) + "\n"


def _build_statescan(choices: Choices) -> list[str]:
    return [
        f"FROM {choices.images.build} AS build",
        "ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1",
        "RUN python -m venv /opt/venv",
        "ENV PATH=/opt/venv/bin:$PATH",
        *_torch(choices),
        _run(("pip", "install", *choices.extras)),
    ]


def _build_originals(choices: Choices) -> list[str]:
    gcc = choices.build.gcc
    lines = [
        f"FROM {choices.images.build} AS build",
        *comments.comment(_UV),
        f"COPY --from={choices.images.uv} /uv /usr/local/bin/uv",
        *comments.comment(_APT),
        "# hadolint ignore=DL3008",
        "RUN apt-get update \\",
        "    && apt-get install --yes --no-install-recommends \\",
        f"        ca-certificates gcc-{gcc} g++-{gcc} \\",
        "    && rm -rf /var/lib/apt/lists/*",
        "# torch's build helper reads CC and CXX, and hands CC on to nvcc.",
        f"ENV CC=gcc-{gcc} CXX=g++-{gcc} CUDA_HOME=/usr/local/cuda",
        "ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_PYTHON_INSTALL_DIR=/opt/python",
        f"RUN uv venv --seed --managed-python --python {choices.target.python} /opt/venv",
        "ENV PATH=/opt/venv/bin:$PATH",
        *_torch(choices),
        _run(("pip", "install", *choices.build.tools, *choices.extras)),
        *comments.comment(f"Compilers at once: {choices.why('MAX_JOBS')}."),
        f"ARG MAX_JOBS={choices.build.jobs}",
        *comments.comment(_BUILD),
    ]
    for source in choices.sources:
        # Left to the build argument above, so that --build-arg MAX_JOBS=8 has an effect.
        env = {key: value for key, value in source.command.env.items() if key != "MAX_JOBS"}
        words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
        lines.append("RUN " + " \\\n    ".join([*words, shlex.join(source.command.run)]))
    return lines


def _torch(choices: Choices) -> list[str]:
    index = ("--index-url", choices.index) if choices.index else ()
    return [*comments.comment(_TORCH), _run(("pip", "install", *index, choices.torch))]


def _final(choices: Choices) -> list[str]:
    lines = []
    if choices.images.small:
        lines += comments.comment(
            f"{choices.images.small} is smaller and will do where nothing but torch uses CUDA, "
            "since torch's wheels bring their own CUDA libraries."
        )
    lines += [f"FROM {choices.images.final} AS final"]
    if choices.package == "mamba-ssm":
        lines += [*comments.comment(_TRITON), *_GCC]
    lines += [
        "# The folder belongs to the user, and so will a volume that is mounted there.",
        "RUN groupadd --gid 10001 app \\",
        "    && useradd --create-home --uid 10001 --gid 10001 app \\",
        "    && install --directory --owner=app --group=app /home/app/.cache",
    ]
    if choices.sources:
        lines += ["COPY --from=build /opt/python /opt/python"]
    lines += ["COPY --from=build /opt/venv /opt/venv", "ENV PATH=/opt/venv/bin:$PATH"]
    if choices.gpu and not choices.sources:
        lines += [
            "# The NVIDIA Container Toolkit mounts the driver into images that ask for it.",
            "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ]
    return [*lines, *_proof(choices)]


def _proof(choices: Choices) -> list[str]:
    # By number, because some hosts refuse a user whose number they cannot see.
    lines = ["USER 10001:10001", "WORKDIR /home/app", *comments.comment(_PROOF)]
    lines += [
        'RUN for compiler in gcc cc nvcc; do ! command -v "$compiler" || exit 1; done',
        _run(("python", "-c", smoke.imports(choices))),
    ]
    where = "on a GPU" if choices.sources else "on the GPU or the CPU"
    return [
        *lines,
        *comments.comment(f"Run until another command is given: kernels against torch, {where}."),
        "COPY <<'PY' /home/app/smoke.py",
        *smoke.kernels(choices).splitlines(),
        *("PY", ""),
        'CMD ["python", "/home/app/smoke.py"]',
    ]


def _run(words: Sequence[str]) -> str:
    """A RUN line; long ones continue, a word or two on each line."""
    line = f"RUN {shlex.join(words)}"
    if len(line) <= comments.WIDTH or words[:2] != ("pip", "install"):
        return line
    return "RUN pip install" + "".join(f" \\\n    {shlex.quote(word)}" for word in words[2:])
