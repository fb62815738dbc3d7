# SPDX-License-Identifier: Apache-2.0
"""Every version and setting that the files name, chosen once, each with the reason for it.

Only decides; the writers of the files put it into their formats and decide nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import statescan
from statescan.doctor import catalog
from statescan.doctor.generate import matrix, originals, table
from statescan.doctor.generate.choice import Choice, number
from statescan.doctor.generate.matrix import ImpossibleTarget
from statescan.doctor.generate.originals import Build, Source
from statescan.doctor.generate.target import Target, in_container

PACKAGES = ("statescan", "mamba-ssm", "causal-conv1d")
CONTAINER_KINDS = ("dockerfile", "compose", "ci")
INDEX = "https://download.pytorch.org/whl/"

_UNPROVED = (
    "the releases were chosen by what is known of them; nothing was built to write this file. The "
    "workflow of `statescan write ci` proves that they build, load and agree with torch."
)


@dataclass(frozen=True)
class Images:
    """Base images: to build in, to run in, and a smaller one that may do; uv's to copy it from."""

    build: str = ""
    final: str = ""
    small: str = ""
    uv: str = ""


@dataclass(frozen=True)
class Choices:
    """What the files say.

    Attributes:
        package: What is installed.
        asked: The target as it was given.
        target: With no field left open.
        rows: Every decision with its reason.
        torch: Requirement of torch, with the local part where an index has one.
        index: The index that has this torch; empty for PyPI alone.
        extras: Requirements of the package at run time, or the package itself.
        build: The build of the originals.
        images: Base images of containers.
        notes: What a reader must know beyond the choices.
    """

    package: str
    asked: Target
    target: Target
    rows: tuple[Choice, ...]
    torch: str
    index: str
    extras: tuple[str, ...]
    build: Build
    images: Images
    notes: tuple[str, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """The originals to build, in their order."""
        return self.build.sources

    @property
    def gpu(self) -> bool:
        """Whether torch is built for NVIDIA GPUs."""
        return self.target.cuda[:1].isdigit()

    @property
    def name(self) -> str:
        """For images and environments: package, Python, torch and CUDA."""
        cuda = "cpu" if self.target.cuda == "none" else self.target.cuda
        cuda = f"cu{cuda}" if self.gpu else cuda
        parts = (self.package, f"py{self.target.python}", f"torch{self.target.torch}", cuda)
        return "-".join(re.sub(r"[^a-z0-9-]", "", part) for part in parts)

    def why(self, name: str) -> str:
        """The reason for a choice; empty when it was none."""
        return next((row.why for row in self.rows if row.name == name), "")


def choose(kind: str, package: str, asked: Target) -> Choices:
    """Decide everything for one file.

    Raises:
        ImpossibleTarget: No such environment exists.
    """
    contained = kind in CONTAINER_KINDS and asked.os != "macos"
    target, rows = _system(package, in_container(asked) if contained else asked)
    target, version_rows, notes = _versions(package, target)
    torch, index = torch_requirement(target)
    if package == "statescan":
        build, extras = _own(target)
    else:
        build = originals.build(package, target, kind == "ci")
        extras = build.extras
        notes.append(_UNPROVED)
    images, image_rows = _images(kind, package, target)
    return Choices(
        package=package,
        asked=asked,
        target=target,
        rows=(*rows, *version_rows, _index_row(index), *build.rows, *image_rows),
        torch=torch,
        index=index,
        extras=extras,
        build=build,
        images=images,
        notes=tuple(notes),
    )


def torch_requirement(target: Target) -> tuple[str, str]:
    """torch's requirement and the index that serves it, for a target without open fields."""
    release, cuda = target.torch, target.cuda
    if cuda.startswith("rocm"):
        return f"torch=={release}+{cuda}", INDEX + cuda
    if cuda != "none":
        tag = f"cu{cuda.replace('.', '')}"
        return f"torch=={release}+{tag}", INDEX + tag
    if target.os == "linux":
        # The local part appears on x86_64 in every release and on aarch64 only in newer ones.
        local = "+cpu" if target.machine == "x86_64" else ""
        return f"torch=={release}{local}", INDEX + "cpu"
    return f"torch=={release}", ""


def _own(target: Target) -> tuple[Build, tuple[str, ...]]:
    """statescan itself: one requirement, and nothing to build."""
    version = target.statescan or statescan.__version__
    why = "the release that wrote this file; it fits every torch from 2.4 on"
    row = Choice("statescan", version, why)
    return Build((), (), (), "", 0, (row,)), (f"statescan=={version}",)


def _system(package: str, target: Target) -> tuple[Target, list[Choice]]:
    """The target with its system and machine, refused where the package cannot be there."""
    rows = []
    if not target.os:
        target = replace(target, os="linux")
        rows.append(Choice("os", "linux", "nothing was said"))
    if not target.machine:
        machine = "aarch64" if target.os == "macos" else "x86_64"
        target = replace(target, machine=machine)
        rows.append(Choice("machine", machine, "the usual one; nothing was said"))
    reason = _homeless(package, target)
    if reason:
        raise _elsewhere(package, target, reason)
    if target.os == "macos" and target.cuda not in ("", "none"):
        raise ImpossibleTarget(
            "torch for macOS has no CUDA.",
            "There it runs on the CPU and on Apple's GPU, from one build.",
            matrix.nearest_text(package, replace(target, cuda="none", gpus=())),
        )
    return target, rows


def _homeless(package: str, target: Target) -> str:
    """Why a package cannot be on a system at all; empty where it can."""
    if package != "statescan" and target.os == "macos":
        return f"{package} has CUDA kernels only, and macOS has no CUDA."
    if package != "statescan" and target.os == "windows":
        return f"{package} has no Windows wheels, and pip alone cannot build it there."
    if target.machine not in ("x86_64", "aarch64"):
        return f"torch has no wheels for {target.machine}."
    if target.libc == "musl":
        return "torch has no wheels for musl, the C library of Alpine."
    return ""


def _elsewhere(package: str, target: Target, reason: str) -> ImpossibleTarget:
    known = target.machine in ("x86_64", "aarch64") and target.os != "macos"
    needed = "It needs Linux with glibc."
    if package != "statescan":
        needed = (
            "It needs Linux with glibc and an NVIDIA GPU (on Windows: WSL2, or a container); "
            "statescan runs anywhere: --for statescan."
        )
    cuda = target.cuda if target.cuda[:1].isdigit() or package == "statescan" else ""
    there = replace(target, os="linux", cuda=cuda)
    machine = target.machine if known else "x86_64"
    return ImpossibleTarget(reason, needed, matrix.nearest_text(package, there, "linux", machine))


def _versions(package: str, target: Target) -> tuple[Target, list[Choice], list[str]]:
    """The target with its torch, Python and CUDA, and why these."""
    open_target = _servable(package, target)
    found = matrix.fit(package, open_target)
    minor, entry, newer = table.row(found.torch)
    exact = target.torch if target.torch.count(".") == 2 else str(entry["patch"])
    notes = []
    if newer or number(exact) > number(str(entry["patch"])):
        notes.append(f"torch {exact} is newer than this statescan; nothing about it was checked.")
    said = "as given" if target.origin == "target" else "what this machine has"
    why_python = said if target.python else f"nothing was said; torch {minor} has wheels for it"
    rows = [
        Choice("python", found.python, why_python),
        Choice("torch", exact, _why_torch(target, exact, minor, said)),
        Choice("cuda", found.cuda, _why_cuda(target, found, said)),
    ]
    return replace(target, python=found.python, torch=exact, cuda=found.cuda), rows, notes


def _servable(package: str, target: Target) -> Target:
    """Of a machine, a CUDA that no index serves is left open: another build of the same torch."""
    if target.origin == "target" or not target.torch or target.cuda.startswith("rocm"):
        return target
    _, entry, newer = table.row(target.torch)
    served = newer or target.cuda in entry.get("cuda", ())
    if target.cuda == "none":
        served = package == "statescan"
    return target if served else replace(target, cuda="")


def _why_torch(target: Target, exact: str, minor: str, said: str) -> str:
    if not target.torch:
        return "nothing was said; of those that fit the rest, the newest that is recommended"
    if target.torch != exact:
        return f"{said}, in its last patch release"
    return said


def _why_cuda(target: Target, found: matrix.Fit, said: str) -> str:
    if target.cuda == found.cuda:
        return said
    if target.cuda:
        had = "a CPU build" if target.cuda == "none" else f"built for CUDA {target.cuda}"
        return f"this machine's torch is {had}, which will not do"
    if found.cuda == "none":
        return "nothing was said, and statescan needs no GPU"
    if target.driver_cuda:
        return f"the best of torch {found.torch} for a driver that serves {target.driver_cuda}"
    return f"nothing was said; torch {found.torch} is built for it, and many drivers serve it"


def _index_row(index: str) -> Choice:
    if not index:
        return Choice("torch index", "PyPI", "its wheels for this system are the right build")
    tag = index.removeprefix(INDEX)
    if tag == "cpu":
        why = "the CPU builds; PyPI's for Linux bring gigabytes of CUDA libraries"
    else:
        why = f"the {tag} builds; PyPI has one CUDA for each torch"
    return Choice("torch index", index, why)


def _images(kind: str, package: str, target: Target) -> tuple[Images, list[Choice]]:
    if kind not in CONTAINER_KINDS:
        return Images(), []
    known = catalog.load("images")
    if package == "statescan":
        image = known["python"].get(target.python, f"python:{target.python}-slim-bookworm")
        why = "small, with glibc; torch's wheels bring all that a GPU needs but the driver"
        return Images(image, image), [Choice("image", image, why)]
    entry = known["cuda"].get(target.cuda)
    if entry is None:
        raise ImpossibleTarget(
            f"No image of nvidia/cuda is known for CUDA {target.cuda}.",
            f"Known are those for CUDA {', '.join(known['cuda'])}.",
            matrix.nearest_text(package, replace(target, cuda="")),
        )
    stem = f"nvidia/cuda:{entry['release']}-%s-{entry['system']}"
    images = Images(stem % "devel", stem % "runtime", stem % "base", known["uv"])
    return images, [
        Choice("build image", images.build, "devel has nvcc and the headers of torch's CUDA"),
        Choice("final image", images.final, "runtime has no compiler, and the same glibc"),
    ]
