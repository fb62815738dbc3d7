# SPDX-License-Identifier: Apache-2.0
"""Rules of the first stages: commands, downloads, the environment of a build, source packages.

Each looks at one line with its surroundings and says what it shows.
"""

from __future__ import annotations

import re

from statescan.doctor.logs.opinion import HARD, INFERRED, SIGN, Opinion, Scene, rule
from statescan.doctor.logs.record import Hit


def building(scene: Scene) -> bool:
    """Whether the line comes from a setup.py or a build backend, not from a program of the user."""
    hit = scene.hit
    near = {"backend-error", "subprocess-exited", "torch-build", "isolation-step", "box"}
    if any(part in frame.path for frame in hit.frames for part in ("site-packages/mamba_ssm",)):
        return False
    inside = scene.attempt.box[0] and scene.attempt.box[0] < hit.number
    closed = scene.attempt.box[1] and scene.attempt.box[1] < hit.number
    if inside and not closed:
        return True
    if scene.attempt.kind == "install":
        return True
    if scene.attempt.kind == "run" and "setup.py" not in scene.attempt.command:
        return False
    return bool(near & hit.nearby) or any(
        frame.path.endswith("setup.py") or "build_meta" in frame.path for frame in hit.frames
    )


@rule
def redirect_file(scene: Scene) -> Opinion | None:
    """A file named like ``=1.2.0`` was made by the shell."""
    if scene.hit.values["file"] and scene.evidence.log.attempts:
        return Opinion(
            *("shell-redirect", SIGN),
            "a file of such a name is what the shell makes of an unquoted > in a requirement",
        )
    return None


@rule
def not_editable(scene: Scene) -> Opinion | None:
    """pip got a requirement where a folder belongs, often with the bound cut off by the shell."""
    command = scene.attempt.command
    if command and not re.search(r"[<>]", command):
        return Opinion("shell-redirect", INFERRED, "pip was given a name where it needs a folder")
    return Opinion(
        "shell-redirect", HARD, "the requirement is no folder, and the shell took its bound"
    )


@rule
def download(scene: Scene) -> Opinion | None:
    """A network error of setup.py's own download; pip's downloads retry by themselves."""
    hit = scene.hit
    guessed = bool({"guessing", "torch-build"} & hit.nearby) or hit.in_frames(
        "setup.py", "urllib", "get_wheel_url", "bdist_wheel"
    )
    found_before = "precompiled" in hit.nearby
    if guessed and not found_before:
        return Opinion(
            *("wheel-download-failed", HARD),
            "setup.py downloads the wheel itself and ends at any network error but a missing file",
        )
    if hit.text.lstrip().startswith("WARNING"):
        return Opinion("wheel-download-failed", SIGN, "pip could not reach its server at first")
    return Opinion("wheel-download-failed", INFERRED, "a download broke off")


@rule
def unsupported_wheel(scene: Scene) -> Opinion | None:
    """pip refuses a wheel: by its processor, else by its other tags."""
    wheel = scene.hit.values.get("wheel", "")
    for_x86 = "x86_64" in wheel or "amd64" in wheel
    if (scene.evidence.aarch64 and for_x86) or ("aarch64" in wheel and not scene.evidence.aarch64):
        return Opinion(
            *("wheel-wrong-cpu-arch", HARD),
            "the wheel's name tells another processor than this machine has",
            ("wheel-tag-mismatch",),
            {"file": wheel},
        )
    return Opinion(
        *("wheel-tag-mismatch", HARD),
        "pip compares the tags in the name with this Python and platform",
        ("torch-abi-mismatch",),
        {"file": wheel},
    )


@rule
def uv_tag(scene: Scene) -> Opinion | None:
    """uv refuses a wheel by its tags; of torch itself, the Python is the one that is too new."""
    text, package = scene.hit.text, _package_in(scene.hit.text)
    if package == "torch" and "Python" in text:
        return Opinion(
            *("python-version-unsupported", INFERRED), "torch has no wheel for this Python"
        )
    if scene.evidence.aarch64 and "x86_64" in text:
        return Opinion("wheel-wrong-cpu-arch", HARD, "the wheel is for another processor")
    if scene.evidence.macos and package in ("triton", "torch"):
        return Opinion("macos-unsupported", HARD, "there is no such wheel for macOS")
    return Opinion("wheel-tag-mismatch", HARD, "uv compares the wheel's tags with this Python")


def _package_in(text: str) -> str:
    match = re.search(r"\b(torch|triton|mamba[-_]ssm|causal[-_]conv1d)\b", text)
    return match[1] if match else ""


@rule
def no_torch(scene: Scene) -> Opinion | None:
    """A build that cannot import torch."""
    if not building(scene) and scene.attempt.kind == "run":
        return Opinion(
            *("torch-missing-in-build", SIGN), "torch is not installed in the Python that ran this"
        )
    isolated = scene.evidence.isolated(scene.attempt) is not None
    why = (
        "pip builds in an environment of its own, in which torch is not installed"
        if isolated
        else "setup.py imports torch, and the environment of the build has none"
    )
    return Opinion(
        "torch-missing-in-build", HARD, why, values={"isolated": "yes" if isolated else ""}
    )


@rule
def pep517(scene: Scene) -> Opinion | None:
    """Poetry's words for a build backend that failed."""
    return Opinion(
        *("torch-missing-in-build", INFERRED),
        "poetry says so when setup.py fails in its isolated build, where torch is missing",
    )


@rule
def no_build_tool(scene: Scene) -> Opinion | None:
    """A build that lacks a tool which isolation would have brought."""
    if not building(scene) and not scene.hit.in_frames("setup.py", "cpp_extension"):
        return Opinion("build-deps-missing", INFERRED, "a module that builds need is not installed")
    return Opinion(
        *("build-deps-missing", HARD),
        "without build isolation these modules must be in the environment already",
        ("torch-missing-in-build",),
    )


@rule
def no_dependency(scene: Scene) -> Opinion | None:
    """A dependency that --no-deps left out."""
    return Opinion("build-deps-missing", SIGN, "a dependency is missing, as after pip's --no-deps")


@rule
def cuda_version_none(scene: Scene) -> Opinion | None:
    """setup.py parses ``torch.version.cuda``, which is None in a CPU build."""
    hit, evidence = scene.hit, scene.evidence
    parsing = (
        bool({"cuda-parse"} & hit.nearby)
        or hit.in_frames(
            "get_wheel_url", "packaging/version", "packaging\\version", "get_torch_cuda"
        )
        or (hit.in_frames("setup.py", "<string>") and "torch-build" in hit.nearby)
    )
    known_cpu = evidence.torch_cuda == "none" or "+cpu" in evidence.torch
    built = evidence.torch_of_build
    if built is not None and "+rocm" in built.values["version"] and parsing:
        return Opinion("rocm-hip-compile", INFERRED, "setup.py cannot read this ROCm version")
    if known_cpu and (parsing or building(scene)):
        return Opinion(
            *("torch-is-cpu-only", HARD),
            "torch is a build without CUDA, whose CUDA version is None",
        )
    if parsing and "split" not in hit.text:
        return Opinion(
            *("torch-is-cpu-only", INFERRED), "setup.py parses torch.version.cuda, and it was None"
        )
    return None


@rule
def not_compiled_with_cuda(scene: Scene) -> Opinion | None:
    """torch says that it is a CPU build."""
    if scene.evidence.macos:
        return Opinion("macos-unsupported", HARD, "torch for macOS has no CUDA")
    return Opinion("torch-is-cpu-only", HARD, "torch itself says that it was built without CUDA")


@rule
def cuda_torch_library(scene: Scene) -> Opinion | None:
    """A library that only CUDA builds of torch have."""
    if scene.evidence.torch_cuda not in ("none", ""):
        return Opinion(
            *("torch-abi-mismatch", INFERRED), "a library of torch was not found when it was needed"
        )
    return Opinion(*("torch-is-cpu-only", INFERRED), "only CUDA builds of torch have that library")


@rule
def python_range(scene: Scene) -> Opinion | None:
    """A resolver's sentence about Python; only about the packages concerned or torch."""
    if re.search(r"requires-python|Requires-Python", scene.hit.text):
        about = re.search(r"mamba|causal|torch|triton", scene.hit.text)
        return (
            Opinion("python-version-unsupported", SIGN, "a bound of Python is named")
            if about
            else None
        )
    return Opinion(
        *("python-version-unsupported", HARD), "the resolver compares this Python with the bounds"
    )


@rule
def python_ignored(scene: Scene) -> Opinion | None:
    """pip left out versions because of their Python bound."""
    return Opinion(
        *("python-version-unsupported", SIGN), "pip left out releases that need another Python"
    )


@rule
def old_python_syntax(scene: Scene) -> Opinion | None:
    """Syntax of a newer Python in the packages or their build."""
    if scene.hit.in_frames("mamba_ssm", "causal_conv1d", "setup.py", "triton", "mamba", "<string>"):
        return Opinion(
            *("python-version-unsupported", INFERRED),
            "the sources use what this Python does not know",
        )
    return None


@rule
def syntax_error(scene: Scene) -> Opinion | None:
    """A syntax error in one of the packages."""
    if scene.hit.in_frames(
        "site-packages/mamba_ssm", "site-packages/causal_conv1d", "site-packages/triton"
    ):
        return Opinion(
            *("python-version-unsupported", INFERRED),
            "the sources use what this Python does not know",
        )
    return None


@rule
def no_torch_distribution(scene: Scene) -> Opinion | None:
    """pip finds no torch at all: no network, a Mac's old macOS, or a Python without wheels."""
    attempt = scene.attempt
    if any(attempt.of("pip-network")):
        return Opinion("wheel-download-failed", INFERRED, "pip could not reach its server")
    return Opinion(
        *("python-version-unsupported", INFERRED),
        "torch has no wheel for this Python or platform",
    )


@rule
def missing_source(scene: Scene) -> Opinion | None:
    """ninja cannot find a source file."""
    return Opinion(
        *("sdist-missing-sources", HARD), "the file is not in the source package that was unpacked"
    )


@rule
def missing_csrc(scene: Scene) -> Opinion | None:
    """A compiler or setup.py cannot find a source file."""
    rest = scene.hit.values.get("rest", "")
    text = scene.hit.text
    if not re.search(
        r"[Nn]o such file|没有那|does not exist|open (?:source|input) file|无法打开", text + rest
    ):
        return None
    return Opinion(
        "sdist-missing-sources", HARD, "the source file is not where the build expects it"
    )


@rule
def ninja_command(scene: Scene) -> Opinion | None:
    """torch was edited to ask ninja for its version instead of compiling."""
    return Opinion(
        *("ninja-hack", HARD), "torch calls ninja only for its version, so nothing is compiled"
    )


@rule
def missing_objects(scene: Scene) -> Opinion | None:
    """The linker finds no object files although no compilation failed."""
    attempt, hit = scene.attempt, scene.hit
    failed = [row for row in attempt.of("failed-object") if row.number <= hit.number]
    if failed or re.search(r"crt[1in]\.o|crtbegin|Scrt1", hit.text):
        return None
    marked = ninja_mark(scene) is not None
    return Opinion(
        *("ninja-hack", HARD if marked else INFERRED),
        "ninja printed its version instead of compiling, so the linker has no object files"
        if marked
        else "the linker has no object files although no compilation failed",
        values={"file": hit.values["file"]},
        proof=ninja_mark(scene),
    )


@rule
def ninja_version_line(scene: Scene) -> Opinion | None:
    """A version alone on a line where compile commands belong."""
    if not {"ninja-start", "building-source"} & scene.hit.nearby:
        return None
    return Opinion("ninja-hack", SIGN, "ninja printed its version where compile commands belong")


def ninja_mark(scene: Scene) -> Hit | None:
    """The line in which ninja printed its version, if the attempt has one."""
    lines = (row for row in scene.attempt.of("ninja-version-line") if row.number < scene.hit.number)
    return next(lines, None)
