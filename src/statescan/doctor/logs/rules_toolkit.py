# SPDX-License-Identifier: Apache-2.0
"""Rules of the CUDA toolkit: whether it is found, its version, its headers and its libraries.

Each looks at one line with its surroundings and says what it shows.
"""

from __future__ import annotations

import re

from statescan.doctor.logs.evidence import cuda_of, major
from statescan.doctor.logs.opinion import HARD, INFERRED, SIGN, Opinion, Scene, rule

_NEWEST_GCC_OF_CUDA_10 = 8
"""Bound of nvcc 10.x. These packages need CUDA 11.6, so such an nvcc is too old for them."""


@rule
def bare_metal(scene: Scene) -> Opinion | None:
    """setup.py goes on without nvcc: nothing to cure on a Mac, and isolation's torch on ROCm."""
    evidence, hit = scene.evidence, scene.hit
    warned = hit.id == "nvcc-warning"
    if evidence.macos:
        return Opinion("macos-unsupported", HARD, "there is no CUDA for macOS", ("nvcc-missing",))
    if evidence.rocm and _cuda_torch_on_rocm(scene):
        return Opinion(
            *("rocm-isolation-cuda-torch", HARD),
            "the torch of the build is not the ROCm torch of this machine",
            ("nvcc-missing",),
            proof=scene.evidence.torch_of_build,
        )
    if warned and evidence.has("skip-build"):
        return None
    built = evidence.torch_of_build
    if (built is not None and "+cpu" in built.values["version"]) or evidence.torch_cuda == "none":
        return Opinion(
            *("torch-is-cpu-only", INFERRED if warned else HARD),
            "torch is a build without CUDA, which looks for no toolkit",
            ("nvcc-missing",),
            proof=built,
        )
    return Opinion(
        *("nvcc-missing", INFERRED if warned else HARD),
        "setup.py found no nvcc, warns, and then uses the version that it could not read",
    )


def _cuda_torch_on_rocm(scene: Scene) -> bool:
    build = scene.evidence.torch_of_build
    if build is not None:
        return "+rocm" not in build.values["version"]
    return scene.evidence.isolated(scene.attempt) is not None


@rule
def cuda_home_none(scene: Scene) -> Opinion | None:
    """A path is joined to a CUDA_HOME that is None."""
    if scene.hit.in_frames(
        "cpp_extension", "get_cuda_bare_metal_version", "_join_cuda_home", "setup.py", "<string>"
    ):
        if scene.evidence.macos:
            return Opinion(
                "macos-unsupported", HARD, "there is no CUDA for macOS", ("nvcc-missing",)
            )
        return Opinion("nvcc-missing", INFERRED, "CUDA_HOME is None: torch found no toolkit")
    return None


@rule
def nvcc_path(scene: Scene) -> Opinion | None:
    """nvcc was called by a path at which it is not."""
    path = scene.hit.values["path"]
    folder = re.sub(r"[/\\]bin[/\\]nvcc(?:\.exe)?$", "", path)
    if folder == path and not re.search(r"[/\\]", path):
        return Opinion("nvcc-missing", HARD, "nvcc is called by its name and is on no PATH")
    image = scene.evidence.last("runtime-image")
    if image is not None and re.search(r"-(?:runtime|base)\b", image.values["image"]):
        return Opinion(
            *("nvcc-missing", HARD), "an image for running only has the folder of CUDA without nvcc"
        )
    values = {"path": folder, "cuda_home": _one_folder(folder)}
    if ":" in folder.lstrip("ABCDEFGH:"):
        why = "CUDA_HOME is a list of folders, and torch takes it for one"
    else:
        why = "the folder that CUDA_HOME names holds no bin/nvcc"
    return Opinion("cuda-home-wrong", HARD, why, ("nvcc-missing",), values)


def _one_folder(folder: str) -> str:
    """The first folder of a list."""
    parts = [part for part in folder.split(":") if part.startswith("/")]
    return parts[0] if len(parts) > 1 else ""


@rule
def nvcc_command(scene: Scene) -> Opinion | None:
    """A shell does not know nvcc: in a build the cause, when the user only asked a sign."""
    if scene.evidence.macos:
        return None
    weight = SIGN if scene.attempt.kind == "probe" or not scene.attempt.box[0] else INFERRED
    return Opinion("nvcc-missing", weight, "the shell finds no nvcc on PATH")


@rule
def winerror_2(scene: Scene) -> Opinion | None:
    """Windows does not find a program: which one is in the traceback or on the line."""
    hit = scene.hit
    if hit.in_frames("get_cuda_bare_metal_version") or re.search(r"bin\\+nvcc", hit.text):
        slug = "cuda-home-wrong" if scene.evidence.cuda_home else "nvcc-missing"
        return Opinion(slug, INFERRED, "nvcc is not in the folder that setup.py took for a toolkit")
    if "nvcc" in hit.text:
        return Opinion("nvcc-missing", INFERRED, "Windows finds no nvcc")
    if re.search(r"Error checking compiler version for", hit.text):
        return None
    if hit.in_frames("triton") or re.search(r"\bcl\b|vswhere|cl\.exe", hit.text):
        return Opinion("msvc-missing", INFERRED, "Windows finds no compiler to start")
    if hit.in_frames("cpp_extension", "_msvccompiler", "msvc9compiler", "_compile"):
        return Opinion("msvc-missing", INFERRED, "Windows finds no compiler to start")
    return None


@rule
def bf16_header(scene: Scene) -> Opinion | None:
    """The header exists since CUDA 11, so its absence tells the age of nvcc."""
    return Opinion(
        *("nvcc-too-old", HARD),
        "cuda_bf16.h is part of every CUDA since 11, so this nvcc is older",
        ("cuda-headers-missing",),
    )


@rule
def cuda_mismatch(scene: Scene) -> Opinion | None:
    """nvcc and torch of the build differ in CUDA's major: really, or by isolation's other torch."""
    hit, evidence = scene.hit, scene.evidence
    nvcc = hit.values["found"]
    built = hit.values.get("needed", "")
    if not built:
        match = re.search(r"PyTorch \((\d[\d.]{0,8})\)", " ".join(hit.follow))
        built = match[1] if match else ""
    values = {"found": nvcc, "needed": built, "cuda": built}
    installed = evidence.torch if evidence.packages.get("torch") else ""
    cuda = cuda_of(installed) or (evidence.torch_cuda if installed else "")
    isolated = evidence.isolated(scene.attempt)
    if isolated is None and cuda not in ("", "none") and major(cuda) != major(nvcc):
        return Opinion(
            *("nvcc-torch-cuda-mismatch", HARD),
            f"nvcc is of CUDA {nvcc} and the installed torch of CUDA {cuda}",
            ("build-isolation-wrong-torch",),
            {**values, "cuda": cuda},
        )
    printed = evidence.torch_of_build
    other = (
        printed is not None
        and installed
        and printed.values["version"].partition("+")[0] != installed.partition("+")[0]
    )
    if evidence.rocm and "+rocm" in installed:
        return Opinion(
            "rocm-isolation-cuda-torch", HARD, "the build used a CUDA torch", values=values
        )
    if isolated is not None or other or (cuda and built and major(cuda) != major(built)):
        why = "the build ran in an environment of its own with another torch than the installed one"
        if cuda not in ("", "none") and major(cuda) != major(nvcc):
            why += f"; and nvcc {nvcc} does not fit the installed torch of CUDA {cuda} either"
        return Opinion(
            *("build-isolation-wrong-torch", HARD if isolated else INFERRED),
            why,
            ("nvcc-torch-cuda-mismatch",),
            {**values, "cuda": cuda or nvcc},
        )
    return Opinion(
        *("nvcc-torch-cuda-mismatch", HARD),
        f"torch compares the CUDA major of nvcc ({nvcc}) with its own ({built or 'another'})",
        values=values,
    )


@rule
def ptxas_arch(scene: Scene) -> Opinion | None:
    """An assembler without that GPU: Triton's own at run time, else nvcc's."""
    if scene.hit.in_frames("triton") or "c-compiler-use" in scene.hit.nearby:
        return Opinion("triton-version", HARD, "Triton's own ptxas does not know this GPU")
    return Opinion("nvcc-arch-unsupported", HARD, "this CUDA's ptxas does not know that GPU")


@rule
def gcc_unsupported(scene: Scene) -> Opinion | None:
    """nvcc refuses the compiler; an nvcc whose bound is that low is itself too old."""
    bound = int(scene.hit.values["needed"][:3])
    if "GNU" in scene.hit.text and bound <= _NEWEST_GCC_OF_CUDA_10:
        return Opinion(
            *("nvcc-too-old", HARD),
            f"an nvcc that stops at gcc {bound} is of CUDA 10 or older",
            ("gcc-too-new-for-nvcc",),
        )
    return Opinion("gcc-too-new-for-nvcc", HARD, f"this nvcc accepts compilers up to {bound}")


@rule
def cuda_header(scene: Scene) -> Opinion | None:
    """A header of the toolkit is missing; ROCm has others."""
    if scene.evidence.rocm and "nvcc" not in scene.hit.text:
        return Opinion(
            *("rocm-hip-compile", HARD),
            "the sources include a header of CUDA that ROCm does not have",
            ("cuda-headers-missing",),
        )
    return Opinion(
        *("cuda-headers-missing", HARD), "nvcc is there, and this header of the toolkit is not"
    )


@rule
def link_cuda(scene: Scene) -> Opinion | None:
    """The linker lacks a library of CUDA: at run time it is Triton that links."""
    hit = scene.hit
    library = next((hit.values[key] for key in ("file", "file2", "file3") if key in hit.values), "")
    building = any(scene.attempt.of("building-source", "box", "failed-object", "torch-build"))
    if library == "cuda" and not building and _triton_links(scene):
        return Opinion(
            *("triton-libcuda-missing", HARD),
            "Triton links against libcuda when it runs, and the linker has no such name",
            ("cuda-lib-link-missing",),
        )
    return Opinion(
        *("cuda-lib-link-missing", HARD),
        "the linker has no folder with that library",
        values={"file": f"lib{library}.so" if not library.endswith(".lib") else library},
    )


def _triton_links(scene: Scene) -> bool:
    """Whether Triton is at work in the attempt, or no build is."""
    return not (scene.attempt.kind == "install" or scene.attempt.box[0])
