# SPDX-License-Identifier: Apache-2.0
"""Rules of host compilers, of the sources' errors, and of memory while compiling.

Each looks at one line with its surroundings and says what it shows.
"""

from __future__ import annotations

import re

from statescan.doctor.logs.opinion import HARD, INFERRED, SIGN, Opinion, Scene, rule
from statescan.doctor.symbols.generation import version as pair_of


@rule
def old_cxx(scene: Scene) -> Opinion | None:
    """torch's headers ask for a C++ that the compiler was not set to, or does not know."""
    told = scene.evidence.gcc_version
    if scene.evidence.has("std14") and (not told or pair_of(told) >= (9, 0)):
        return Opinion(
            *("gcc-too-old", SIGN),
            "the compiler was called with -std=c++14, by a release that is older than this torch",
        )
    if told and pair_of(told) >= (9, 0):
        return Opinion("gcc-too-old", INFERRED, "the compiler in use is older than the gcc shown")
    return Opinion(
        "gcc-too-old", HARD, "the host compiler does not know the C++ of torch's headers"
    )


@rule
def gcc_bounds(scene: Scene) -> Opinion | None:
    """torch compared the compiler with the bounds of nvcc."""
    values = dict(scene.hit.values)
    name = values.get("compiler", "")
    if name == "cl" or name.endswith("cl.exe"):
        return Opinion(
            "msvc-too-new-for-nvcc", HARD, "torch compared Visual C++ with nvcc's bounds"
        )
    if values["found"].startswith("0."):
        return Opinion(
            *("host-compiler-missing", HARD),
            "torch found no version of the compiler, as when there is no compiler at all",
            ("gcc-too-old",),
        )
    if values["way"] == "less":
        return Opinion("gcc-too-old", HARD, "torch compared the compiler with nvcc's bounds")
    return Opinion("gcc-too-new-for-nvcc", HARD, "torch compared the compiler with nvcc's bounds")


@rule
def compiler_command(scene: Scene) -> Opinion | None:
    """A shell or a driver does not find a compiler."""
    hit = scene.hit
    if scene.attempt.kind == "probe":
        return Opinion("host-compiler-missing", SIGN, "the shell finds no such compiler")
    if re.search(r"\S+\.(?:o|cpp|cu|c|so)\b", hit.text) or "error:" in hit.text:
        return None
    return Opinion("host-compiler-missing", HARD, "the compiler that the build calls is not there")


@rule
def compiler_file(scene: Scene) -> Opinion | None:
    """Python could not start a compiler."""
    if scene.hit.in_frames("triton"):
        return Opinion(
            "triton-host-compiler", HARD, "Triton compiles C when it runs and found no compiler"
        )
    # torch warns so before it compiles; the compilation that fails after it says it for sure.
    weight = INFERRED if "Error checking compiler version" in scene.hit.text else HARD
    return Opinion(
        "host-compiler-missing", weight, "the compiler that the build calls is not there"
    )


@rule
def cc1(scene: Scene) -> Opinion | None:
    """A compiler driver without the compiler proper."""
    if scene.hit.in_frames("triton") or "c-compiler-use" in scene.hit.nearby:
        return Opinion(
            "triton-host-compiler", HARD, "the C compiler that Triton calls is incomplete"
        )
    return Opinion("host-compiler-missing", HARD, "the driver is there, the compiler itself is not")


@rule
def nvcc_host(scene: Scene) -> Opinion | None:
    """nvcc could not run a host compiler."""
    if scene.evidence.windows:
        return Opinion("msvc-missing", INFERRED, "nvcc could not run Visual C++")
    return Opinion("host-compiler-missing", INFERRED, "nvcc could not run a host compiler")


@rule
def msvc_error(scene: Scene) -> Opinion | None:
    """A language error of Visual C++ in the sources of the packages or in torch's headers."""
    return Opinion(
        *("msvc-code-portability", HARD),
        "the sources are written for gcc, and Visual C++ refuses this",
        ("msvc-missing",),
    )


@rule
def msvc_link(scene: Scene) -> Opinion | None:
    """Visual C++ linked nothing together."""
    return Opinion(
        "msvc-code-portability", INFERRED, "the objects do not fit together under Windows"
    )


@rule
def winerror_5(scene: Scene) -> Opinion | None:
    """Windows refuses to start or to write something."""
    hit = scene.hit
    tools = hit.in_frames("triton", "cpp_extension", "subprocess", "distutils", "setuptools")
    if tools or re.search(r"nvcc|cl\.exe|gcc|CreateProcess", hit.text):
        return Opinion("win-permission-toolchain", HARD, "Windows refuses to start the compiler")
    return Opinion("win-permission-toolchain", SIGN, "Windows refuses access to a file")


@rule
def python_header(scene: Scene) -> Opinion | None:
    """Python's own header is missing, in a build or when Triton compiles."""
    return Opinion(
        *("python-headers-missing", HARD),
        "the header belongs to this Python and comes with its development package",
        ("triton-host-compiler",) if re.search(r"/tmp\w*/", scene.hit.text) else (),
        values={"file": "Python.h"},
    )


@rule
def hip(scene: Scene) -> Opinion | None:
    """The sources do not compile for AMD's GPUs."""
    return Opinion("rocm-hip-compile", HARD, "the sources as translated for ROCm do not compile")


@rule
def hip_generic(scene: Scene) -> Opinion | None:
    """Any compile error in a ROCm build."""
    ours = "csrc" in scene.hit.text or "clang" in scene.hit.text
    if not scene.evidence.rocm or not ours:
        return None
    return Opinion("rocm-hip-compile", INFERRED, "a compile error in a build for ROCm")


@rule
def killed(scene: Scene) -> Opinion | None:
    """The system ended a process; a program of the user may be ended for other reasons."""
    built = any(
        scene.attempt.of(
            "building-source",
            "ninja-start",
            "building-wheel",
            "failed-object",
            "torch-build",
            "collecting",
            "guessing",
        )
    )
    if built or re.search(
        r"cicc|cc1plus|ptxas|nvcc|ninja|pip\d? install|setup\.py", scene.hit.text
    ):
        return Opinion(
            "build-out-of-memory", HARD, "the system kills the compiler when memory runs out"
        )
    if scene.attempt.kind != "install":
        return None
    return Opinion(
        "build-out-of-memory", SIGN, "the system killed a process, as when memory runs out"
    )


@rule
def no_memory(scene: Scene) -> Opinion | None:
    """A compiler or a builder got no memory."""
    run = scene.attempt.kind == "run" and not any(
        scene.attempt.of("building-source", "building-wheel", "torch-build", "ninja-start")
    )
    weight = SIGN if run and "C10" not in scene.hit.text else HARD
    return Opinion("build-out-of-memory", weight, "the compiler says that it got no memory")
