# SPDX-License-Identifier: Apache-2.0
"""Rules of calls: GPUs, drivers, Triton and its compiler, Mamba-3's libraries.

Each looks at one line with its surroundings and says what it shows.
"""

from __future__ import annotations

import re

from statescan.doctor.logs.opinion import HARD, INFERRED, SIGN, Opinion, Scene, rule


@rule
def mamba3(scene: Scene) -> Opinion | None:
    """A dependency of Mamba-3 breaks; other users of these libraries are none of ours."""
    hit = scene.hit
    module = hit.values.get("module", "")
    if module in ("tvm_ffi", "tilelang", "quack") or "_NestedLoop" in hit.text:
        return Opinion("mamba3-deps", HARD, "Mamba-3's kernels break in a library that they use")
    if hit.in_frames("tilelang", "tvm_ffi", "mamba3", "quack", "mamba_ssm"):
        return Opinion("mamba3-deps", HARD, "Mamba-3's kernels break in a library that they use")
    return None


@rule
def mamba3_frames(scene: Scene) -> Opinion | None:
    """Any error whose traceback ends in one of Mamba-3's libraries."""
    last = " ".join(frame.path for frame in scene.hit.frames[-3:])
    whole = " ".join(frame.path for frame in scene.hit.frames)
    if re.search(r"[/\\](?:tilelang|tvm_ffi|quack|cutlass)[/\\]", last) and re.search(
        r"mamba_ssm|mamba3", whole
    ):
        return Opinion(
            "mamba3-deps", INFERRED, "Mamba-3's kernels break in a library that they use"
        )
    return None


@rule
def no_kernel_image(scene: Scene) -> Opinion | None:
    """No machine code for this GPU: in torch, or in the extension that was called."""
    evidence, hit = scene.evidence, scene.hit
    capability = evidence.capability
    sm = f"{capability[0]}{capability[1]}" if capability else ""
    if evidence.has("torch-arch", "torch-old-gpu"):
        return Opinion(
            *("gpu-arch-not-in-torch", HARD),
            "torch itself says that it has no code for this GPU",
            ("gpu-arch-not-in-binary",),
            {"sm": sm},
            evidence.first("torch-arch", "torch-old-gpu"),
        )
    if capability and evidence.torch_archs and not serves(evidence.torch_archs, capability):
        return Opinion(
            *("gpu-arch-not-in-torch", HARD),
            "torch's list of architectures has none for this GPU",
            ("gpu-arch-not-in-binary",),
            {"sm": sm},
            evidence.last("arch-list", "arch-supported"),
        )
    ours = hit.in_frames("mamba_ssm", "causal_conv1d", "selective_scan", "mamba")
    plain = bool(hit.frames) and not ours
    if plain and re.search(r"[/\\]torch[/\\]", hit.frames[-1].path):
        return Opinion(
            "gpu-arch-not-in-torch",
            INFERRED,
            "the error came up in a function of torch itself",
            values={"sm": sm},
        )
    return Opinion(
        *("gpu-arch-not-in-binary", HARD),
        "CUDA found none for it when the extension was called",
        ("gpu-arch-not-in-torch", "driver-too-old"),
        {"sm": sm},
    )


def serves(archs: list[str], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a GPU: same major, or PTX of an older one."""
    for arch in archs:
        kind, _, digits = arch.partition("_")
        pair = divmod(int(digits), 10)
        if kind == "sm" and pair[0] == capability[0] and pair[1] <= capability[1]:
            return True
        if kind == "compute" and pair <= capability:
            return True
    return False


@rule
def torch_arch(scene: Scene) -> Opinion | None:
    """torch's own warning about the GPU."""
    return Opinion(
        *("gpu-arch-not-in-torch", HARD),
        "torch itself says that it has no code for this GPU",
        ("gpu-arch-not-in-binary",),
    )


@rule
def driver(scene: Scene) -> Opinion | None:
    """The driver is older than what was compiled."""
    if "Found no NVIDIA driver" in scene.hit.text:
        return Opinion("driver-too-old", SIGN, "torch finds no driver at all")
    return Opinion("driver-too-old", HARD, "the driver refuses code that is newer than it")


@rule
def cpu_tensor(scene: Scene) -> Opinion | None:
    """A CUDA function was given a CPU tensor."""
    if scene.evidence.torch_cuda == "none" and not scene.evidence.macos:
        return Opinion(
            "torch-is-cpu-only", INFERRED, "the tensors are on the CPU, as torch has no CUDA"
        )
    return Opinion(
        *("macos-unsupported", HARD if scene.evidence.macos else INFERRED),
        "the tensors are on the CPU, and these packages compute on CUDA only",
    )


@rule
def no_triton_distribution(scene: Scene) -> Opinion | None:
    """pip finds no triton: there is none for macOS, nor under that name for Windows."""
    evidence = scene.evidence
    if any(scene.attempt.of("pip-network")):
        return Opinion("wheel-download-failed", INFERRED, "pip could not reach its server")
    if evidence.windows:
        return Opinion(
            "triton-version", INFERRED, "Triton has no wheel for Windows under that name"
        )
    if evidence.macos:
        return Opinion("macos-unsupported", HARD, "there is no Triton for macOS")
    if re.search(r"linux|/usr/lib|/home/", " ".join(hit.text for hit in scene.attempt.hits)):
        return Opinion(
            "python-version-unsupported",
            INFERRED,
            "Triton has no wheel for this Python or platform",
        )
    return Opinion("macos-unsupported", INFERRED, "there is no Triton for macOS")


@rule
def no_triton(scene: Scene) -> Opinion | None:
    """triton or a part of it cannot be imported."""
    if scene.evidence.macos:
        return Opinion("macos-unsupported", HARD, "there is no Triton for macOS")
    return Opinion(
        "triton-version", INFERRED, "this Triton lacks a module, or Triton is not installed"
    )


@rule
def triton_api(scene: Scene) -> Opinion | None:
    """A function of Triton is missing or refuses a kernel."""
    return Opinion("triton-version", HARD, "the kernels ask for what this Triton does not have")


@rule
def triton_no_cc(scene: Scene) -> Opinion | None:
    """Triton compiles C when it runs."""
    if scene.evidence.windows:
        return Opinion(
            "msvc-missing", INFERRED, "Triton compiles C when it runs and found no compiler"
        )
    return Opinion(
        "triton-host-compiler",
        HARD,
        "Triton compiles C when it runs and found no compiler",
        ("host-compiler-missing",),
    )


@rule
def triton_main_c(scene: Scene) -> Opinion | None:
    """The C file that Triton writes does not compile."""
    return Opinion(
        "triton-host-compiler", INFERRED, "the C compiler refuses the file that Triton writes"
    )


@rule
def triton_lcuda(scene: Scene) -> Opinion | None:
    """libcuda is not found, by the loader or by Triton's search."""
    return Opinion(
        "triton-libcuda-missing", HARD, "Triton needs libcuda of the driver and does not find it"
    )


@rule
def no_active_driver(scene: Scene) -> Opinion | None:
    """Triton finds no GPU at all."""
    return Opinion("triton-libcuda-missing", INFERRED, "Triton found no driver that it can use")
